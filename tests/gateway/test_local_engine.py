"""A model in this process as the engine of an agent: no server, exact tokens."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from clawgym.agents import make_agent
from clawgym.agents.tool_loop import ToolLoopAgent
from clawgym.engines import OpenAIEngine, Sampling
from clawgym.engines.tiny import make_tiny_model
from clawgym.errors import EngineError
from clawgym.gateway.local_engine import LocalEngine
from clawgym.pool.sequences import sequences_of

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("m") / "model", spread=0.05)


async def test_later_turn_continues_the_sampled_ids(folder: Path) -> None:
    engine = LocalEngine(str(folder))
    sampling = Sampling(1.0, max_tokens=8, seed=3)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go."}]
    try:
        await engine.check()
        first = await engine.complete(messages, sampling=sampling)
        messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "More."}]
        await engine.complete(messages, sampling=sampling)
        await engine.complete(messages[:2], sampling=Sampling(1.0, max_tokens=8, seed=4))
        gateway = await engine._started()
        sessions = {one.id: gateway.pool.turns(one.id) for one in gateway.pool.episodes(channel="local")}
    finally:
        await engine.aclose()
    long, short = sorted(sessions.values(), key=len, reverse=True)
    assert (len(long), len(short)) == (2, 1), "each conversation has a session of its own"
    assert [turn.flaw for turn in long] == [None, None]
    assert len(sequences_of(long)) == 1, "the second turn's prompt begins with the ids of the first turn"


def test_identity_tells_two_checkpoints_apart(folder: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "model", spread=0.06)
    same, changed = LocalEngine(str(folder)).identity(), LocalEngine(str(other)).identity()
    assert same["model"] == changed["model"] == "model"
    assert same["weights_sha256"] != changed["weights_sha256"]
    assert LocalEngine(str(folder)).identity() == same


def test_folder_runs_here_unless_an_endpoint_is_named(folder: Path) -> None:
    here = make_agent("tool-loop", model=str(folder))
    there = make_agent("tool-loop", model=str(folder), base_url="http://127.0.0.1:9/v1", api_key="none")
    assert isinstance(here, ToolLoopAgent)
    assert here.identity()["engine"]["name"] == "transformers"
    assert there.identity()["engine"]["name"] == OpenAIEngine.name


@pytest.mark.parametrize(("template", "protocol"), [(None, "tools"), (PLAIN, "text")])
def test_model_without_tools_in_its_template_writes_text(
    folder: Path, tmp_path: Path, template: str | None, protocol: str
) -> None:
    made = make_tiny_model(tmp_path / "model", spread=0.05)
    if template:
        (made / "chat_template.jinja").write_text(template)
    assert make_agent("tool-loop", model=str(made)).identity()["protocol"] == protocol
    assert make_agent("tool-loop", model=str(made), protocol="tools").identity()["protocol"] == "tools"


def test_missing_extra_is_named(folder: Path) -> None:
    code = (
        "import sys; sys.modules['sqlalchemy'] = None; from clawgym.agents import make_agent; "
        f"make_agent('tool-loop', model={str(folder)!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert re.search(r"MissingDependency: .*pip install 'clawgym\[local\]', or give --base-url", done.stderr)


def test_missing_model_is_named() -> None:
    with pytest.raises(EngineError, match=r"no-such: no such folder|no-such"):
        LocalEngine("./no-such")
