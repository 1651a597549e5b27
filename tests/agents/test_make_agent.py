"""make_agent: names, options and error messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clawgym.agents import Agent, ToolLoopAgent, make_agent
from clawgym.agents.programs.releases import RELEASES
from clawgym.engines import Prices, ReplayEngine
from clawgym.errors import AgentError
from clawgym.registry import agents


@pytest.mark.usefixtures("openclaw")
def test_make_agent_by_every_name(tmp_path: Path):
    script = tmp_path / "a.sh"
    script.write_text("true\n")
    lines = tmp_path / "c.jsonl"
    lines.write_text('{"task_id": "a", "commands": []}\n')
    options: dict[str, dict[str, Any]] = {
        "script": {"source": script},
        "replay": {"source": lines},
        "tool-loop": {"model": "m", "base_url": "http://127.0.0.1:1/v1"},
        "openclaw": {"model": "m", "base_url": "http://127.0.0.1:1/v1", "prompt": "slim"},
        "openclaw-dense": {"model": "m", "base_url": "http://127.0.0.1:1/v1", "prompt": "slim"},
        "pi": {"model": "m", "base_url": "http://127.0.0.1:1/v1"},
    }
    others = {*RELEASES, "acp"} - {"openclaw"}  # make agents installs them; acp has its package in make interop
    for name in agents.names():
        if name in others:
            continue
        agent = make_agent(name, **options.get(name, {}))
        assert isinstance(agent, Agent)
        assert agent.name == name
        assert agent.version


def test_make_agent_with_engine():
    assert isinstance(make_agent("tool-loop", engine=ReplayEngine([]), protocol="text"), ToolLoopAgent)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("orcale", {}, "Did you mean 'oracle'"),
        ("zzz", {}, "Known agents: acp, aider, claude-code, codex"),
        ("oracle", {"model": "m"}, "does not take model: it takes no options"),
        ("replay", {"model": "m"}, "it takes source"),
        ("replay", {}, "needs source: give source="),
        ("script", {}, "needs source: give source="),
        ("script", {"source": "/nowhere.sh"}, "check the path"),
        ("tool-loop", {}, "needs a model"),
        ("tests.agents.nowhere:Claw", {}, "was not found .*PYTHONPATH"),
        ("json:Claw", {}, "was not found"),
        (":Claw", {}, "was not found"),
        ("tool-loop", {"model": "m", "protocol": "x"}, "option protocol='x': Input should be"),
        ("tool-loop", {"model": "m", "protcol": "text"}, "does not take protcol.*Did you mean 'protocol'"),
        ("json:loads", {"s": "1"}, "is not an agent but int"),
        ("json:JSONDecoder", {}, "is not an agent: give it run"),
        ("tool-loop", {"engine": ReplayEngine([]), "prices": Prices(1, 1)}, "already sets prices"),
    ],
)
def test_make_agent_error_messages(name: str, options: dict[str, Any], message: str):
    with pytest.raises(AgentError, match=message):
        make_agent(name, **options)
