"""``clawgym eval`` as a user gives it: what is found before anything starts, what is pinned, what may change later."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from clawgym.cli.eval import default_out, folder_of, limited
from clawgym.leaderboards import load_entry
from clawgym.records import TaskSet
from clawgym.records.run_folder import RunFolder

from ..engines.fake_openai import FakeOpenAI, error, fake_openai
from ..verifiers.tasks_for_tests import task

__all__ = ["fake_openai"]

KEY = "sk-thisisasecretkey123"
TASK = ("terminal-basic", "--limit", "1")


def out(taskset="terminal-basic", agent="noop", model=None, seed=0, limit=None, tasks=None, about=()) -> Path:
    return default_out(taskset, agent, model, seed, limit, tasks, about)


async def clawgym(*words: str | Path, cwd: Path, **env: str) -> tuple[int, str, str]:
    """Exit status, output and errors."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from clawgym.cli import main; main()", "eval", *map(str, words)),
        cwd=cwd,
        env={**os.environ, "COLUMNS": "200", **env},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    said, errors = await asyncio.wait_for(process.communicate(), 150)
    return process.returncode or 0, said.decode(), errors.decode()


# -- the folder


def test_same_options_give_the_same_run_folder() -> None:
    assert out() == out() == Path("runs/terminal-basic_noop_seed0")


@pytest.mark.parametrize(
    "change",
    [
        {"taskset": "other"},
        {"agent": "oracle"},
        {"model": "m"},
        {"seed": 1},
        {"limit": 3},
        {"tasks": ["a", "b"]},
        {"tasks": ["a", "c"]},
        {"about": ["prompt=slim"]},
        {"about": ["temperature=0.5"]},
        {"about": [f"text={'x' * 200}"]},
        {"about": [f"text={'x' * 201}"]},
    ],
)
def test_other_options_give_another_run_folder(change) -> None:
    assert out(**change) != out()
    assert out(about=[f"text={'x' * 200}"]) != out(about=[f"text={'x' * 201}"])


@pytest.mark.parametrize("taskset", ["a/b/c", "../..", "x y:z", "/abs/bench.jsonl", "pack@1:train"])
def test_run_folder_is_directly_below_runs(taskset: str) -> None:
    path = out(taskset=taskset, model="org/model: v1")
    assert path.parent == Path("runs")
    assert path.name not in ("", "..", ".")
    assert " " not in path.name


def test_each_model_has_its_own_folder() -> None:
    assert folder_of(Path("run"), "org/m", several=False) == Path("run")
    assert folder_of(Path("run"), "org/m", several=True) == Path("run/org-m")
    assert folder_of(None, "org/m", several=True) is None


def test_limits_do_not_change_the_task_hash() -> None:
    tasks = TaskSet("demo", (task(),))
    assert limited(tasks, None, None) == (tasks, {})
    changed, settings = limited(tasks, 7, 60.0)
    assert (changed.tasks[0].limits.max_steps, changed.tasks[0].limits.agent_seconds) == (7, 60.0)
    assert changed.content_hash == tasks.content_hash
    assert settings == {"limits": {"max_steps": 7, "agent_seconds": 60.0}}


# -- before anything starts


async def test_wrong_model_key_or_url_is_found_with_one_call(tmp_path: Path, fake_openai: FakeOpenAI) -> None:
    def words(url: str) -> list[str]:
        return [*TASK, "--agent", "tool-loop", "--model", "modle", "--base-url", url]

    fake_openai.models = ["model", "another"]
    for behaviour, said in [
        (error(404, "unknown"), "does not serve the model 'modle'. Did you mean 'model'? It serves: model, another"),
        (error(401, "bad key"), "The key was read from the environment variable MY_KEY:"),
    ]:
        fake_openai.requests.clear()
        fake_openai.default = behaviour
        given = words(fake_openai.base_url)
        code, printed, errors = await clawgym(*given, "--api-key-env", "MY_KEY", cwd=tmp_path, MY_KEY=KEY)
        assert (code, printed) == (2, "")
        assert said in " ".join(errors.split())
        assert KEY not in errors
        assert len(fake_openai.requests) == 1
    code, _, errors = await clawgym(*words("http://127.0.0.1:9/v1"), cwd=tmp_path)
    assert code == 2
    assert "http://127.0.0.1:9/v1: no connection" in errors
    assert list(tmp_path.iterdir()) == [], "nothing is left of what did not start"


async def test_missing_openclaw_is_found_before_the_endpoint_is_asked(tmp_path: Path, fake_openai: FakeOpenAI) -> None:
    words = [*TASK, "--agent", "openclaw", "--model", "m", "--base-url", fake_openai.base_url]
    code, _, errors = await clawgym(*words, cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path), OPENCLAW_ROOTFS="")
    assert (code, "is not installed" in errors, fake_openai.requests) == (2, True, [])


async def test_agent_without_a_model_makes_no_call(tmp_path: Path, fake_openai: FakeOpenAI) -> None:
    env = {"OPENAI_BASE_URL": fake_openai.base_url, "OPENAI_API_KEY": KEY}
    code, _, errors = await clawgym(*TASK, "--agent", "noop", "--out", "run", cwd=tmp_path, **env)
    assert code == 0, errors
    assert not fake_openai.requests


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--agent", "noop", "--temperature", "0.5"), "leave temperature and max_tokens out"),
        (("--agent", "noop", "--agent-option", "prompt=slim"), "agent 'noop' does not take prompt"),
        (("--agent", "tool-loop", "--agent-option", f"api_key={KEY}"), "--api-key-env"),
        (("--agent", "tool-loop", "--agent-option", "engine=x"), "use --model and --base-url"),
        (("--agent", "tool-loop", "--model", "m", "--api-key-env", "NOT_SET_HERE"), "set NOT_SET_HERE"),
        (("--agent", "tool-loop", "--model", "m", "--model", "m"), "a model is given twice"),
        (
            ("--agent", "tool-loop", "--model", "m", "--agent-option", "protocol=no"),
            "Input should be 'auto', 'tools' or 'text'",
        ),
    ],
)
async def test_invalid_options_are_refused(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    code, _, errors = await clawgym(*TASK, *words, cwd=tmp_path, OPENAI_BASE_URL="http://127.0.0.1:9/v1")
    assert code == 2
    assert said in " ".join(errors.replace("│", " ").split())
    assert list(tmp_path.iterdir()) == []


# -- a run


async def test_options_reach_the_model_and_the_run_manifest(tmp_path: Path, fake_openai: FakeOpenAI) -> None:
    url = fake_openai.base_url.replace("http://", "http://me:pass@")
    words = [
        *TASK,
        "--agent",
        "tool-loop",
        "--model",
        "m",
        "--base-url",
        url,
        "--api-key-env",
        "MY_KEY",
        "--out",
        "run",
    ]
    words += ["--temperature", "0.25", "--max-tokens", "99", "--max-steps", "2", "--timeout", "50"]
    words += ["--agent-option", "protocol=text"]
    code, _, errors = await clawgym(*words, cwd=tmp_path, MY_KEY=KEY)
    assert code == 0, errors
    assert {request.get("max_tokens") for request in fake_openai.requests[1:]} == {99}
    assert {request.get("temperature") for request in fake_openai.requests[1:]} == {0.25}
    run = RunFolder.read(tmp_path / "run")
    assert run.manifest.engine["base_url"] == fake_openai.base_url
    assert (run.manifest.sampling["temperature"], run.manifest.sampling["max_tokens"]) == (0.25, 99)
    assert run.manifest.config == {"limits": {"max_steps": 2, "agent_seconds": 50.0}}
    for path in (tmp_path / "run").rglob("*"):
        held = path.read_bytes() if path.is_file() else b""
        assert KEY.encode() not in held, path
        assert b"me:pass" not in held, path

    asked = len(fake_openai.requests)
    code, _, errors = await clawgym(*words, cwd=tmp_path, MY_KEY=KEY)
    assert (code, len(fake_openai.requests)) == (0, asked), "a run with nothing left to do needs no endpoint"
    code, _, errors = await clawgym(*words, "--temperature", "0.5", cwd=tmp_path, MY_KEY=KEY)
    assert code == 2
    assert "sampling.temperature: 0.25 there, 0.5 asked for" in errors


async def test_resuming_with_another_endpoint_is_refused(tmp_path: Path, fake_openai: FakeOpenAI) -> None:
    words = [*TASK, "--agent", "tool-loop", "--model", "m", "--out", "run"]
    code, _, errors = await clawgym(*words, "--base-url", fake_openai.base_url, cwd=tmp_path, OPENAI_API_KEY=KEY)
    assert code == 0, errors
    other = FakeOpenAI()
    await other.start()
    try:
        code, _, errors = await clawgym(*words, "--base-url", other.base_url, cwd=tmp_path, OPENAI_API_KEY=KEY)
    finally:
        await other.stop()
    assert code == 2
    said = " ".join(errors.split())
    assert f"was made with the endpoint {fake_openai.base_url}, not {other.base_url}" in said
    assert f"give --base-url {fake_openai.base_url} to resume it, or choose another --out" in said


async def test_samples_can_be_raised_but_not_lowered(tmp_path: Path) -> None:
    words = [*TASK, "--agent", "oracle"]
    for samples in ("1", "3"):
        code, _, errors = await clawgym(*words, "-k", samples, cwd=tmp_path)
        assert code == 0, errors
    (folder,) = (tmp_path / "runs").iterdir()
    run = RunFolder.read(folder)
    assert sorted(row["sample"] for row in run.rows) == [0, 1, 2]
    assert run.manifest.samples == load_entry(folder).samples == 3
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["planned"], summary["complete"], summary["scores"]["episodes"]) == (3, True, 3)
    assert set(summary["pass_at"]) == {"1", "2", "3"}
    code, _, errors = await clawgym(*words, "-k", "1", cwd=tmp_path)
    assert code == 2
    assert "has 3 samples per task, more than the requested 1: give -k 3" in " ".join(errors.split())
    assert RunFolder.read(folder).manifest.samples == 3


async def test_several_models_are_run_and_compared(tmp_path: Path, fake_openai: FakeOpenAI) -> None:
    words = ["terminal-basic", "--limit", "6", "--agent", "tool-loop", "--model", "org/one", "--model", "two"]
    words += ["--base-url", fake_openai.base_url, "--out", "both", "--agent-option", "max-malformed=1"]
    code, printed, errors = await clawgym(*words, cwd=tmp_path, OPENAI_API_KEY=KEY)
    assert code == 0, errors
    assert [request["model"] for request in fake_openai.requests[:2]] == ["org/one", "two"], "both are checked first"
    assert sorted(path.name for path in (tmp_path / "both").iterdir()) == ["org-one", "two"]
    assert "tool-loop · org/one" in printed
    assert "6 tasks, paired" in printed
