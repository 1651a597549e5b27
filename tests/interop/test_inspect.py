"""Inspect AI: its own conformance checks on our sandboxes, our tasks in its evaluations, its tasks in ours, its logs.

Needs the package ``inspect-ai``.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import pytest_asyncio

import clawgym
from clawgym.agents import make_agent
from clawgym.agents.protocol import AgentContext, AgentReport
from clawgym.errors import TaskError
from clawgym.evaluation.runner import EvalConfig, evaluate
from clawgym.records import Observation, Step, ToolCall
from clawgym.rollout.attempt import utc_now
from clawgym.sandbox import backend

pytest.importorskip("inspect_ai", reason="needs Inspect AI: clawgym interop check inspect")

from inspect_ai import eval as run_eval
from inspect_ai.log import read_eval_log
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.util import OutputLimitExceededError, SandboxUserUnsupportedError
from inspect_ai.util._sandbox import self_check
from inspect_ai.util._sandbox.self_check import *  # noqa: F403

from clawgym.interop.inspect import ClawGymSandbox, ClawGymSandboxConfig, taskset, write_log

from .one_task import EPISODES, FILE, by_gym_make

TASKS = "terminal-basic:heldout"
HERE = Path(__file__).parent
CANNOT = {
    "test_exec_as_user": "a sandbox has one user, root",
}
"""Checks of Inspect AI that our sandboxes do not pass, and why."""


@pytest_asyncio.fixture
async def sandbox_env(request: pytest.FixtureRequest) -> AsyncIterator[ClawGymSandbox]:
    if why := CANNOT.get(request.node.originalname):
        request.applymarker(pytest.mark.xfail(reason=why, strict=True))
    environments = await ClawGymSandbox.sample_init("check", None, {})
    yield environments["default"]
    await ClawGymSandbox.sample_cleanup("check", None, environments, False)


def test_conformance_is_complete(record_property: Callable[..., None]) -> None:
    names = set(self_check.__all__)
    assert names <= globals().keys()
    assert set(CANNOT) < names
    passed = len(names) - len(CANNOT)
    record_property("held", f"{passed} of {len(names)} of its conformance checks; the other: {CANNOT.popitem()[1]}")


async def test_sandbox_is_ours(sandbox_env: ClawGymSandbox) -> None:
    with pytest.raises(SandboxUserUnsupportedError):
        await sandbox_env.exec(["id"], user="nobody")
    with pytest.raises(OutputLimitExceededError):
        await sandbox_env.exec(["head", "-c", "20000000", "/dev/zero"])
    await sandbox_env.exec(["ln", "-s", "/etc/hostname", "link"])
    done = await sandbox_env.exec(["cat", "/etc/hostname"])
    assert await sandbox_env.read_file("link") == done.stdout, "links are followed in the sandbox, not on this machine"
    assert (await sandbox_env.exec(["sh", "-c", "echo $0; exit 3"])).returncode == 3


def solution_of(task: clawgym.Task) -> str:
    return next(file for file in task.solution if file.path == "solve.sh").read().decode()


def scripted(replies: list[ModelOutput]) -> Any:
    return get_model("mockllm/model", custom_outputs=replies)


def call(name: str, **arguments: Any) -> ModelOutput:
    made = ModelOutput.for_tool_call("mockllm/model", name, arguments)
    made.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)  # counting them would need a download
    return made


@pytest.mark.parametrize("solved", [True, False])
def test_our_tasks_in_its_evaluation(solved: bool, tmp_path: Path, record_property: Callable[..., None]) -> None:
    tasks = clawgym.load(TASKS, limit=3)
    local = gym.make("ClawGym/terminal-v0", tasks=tasks)
    compared = 0
    for task in tasks.tasks:
        commands = ["pwd; ls -a", solution_of(task) if solved else "echo no > answer", "false; printf 'é\\n'", "ls"]
        replies = [*(call("bash", command=command) for command in commands), call("submit", answer="done")]
        chosen = taskset(TASKS)
        chosen.dataset = chosen.dataset.filter(lambda sample, task=task: sample.id == task.id)
        (log,) = run_eval(chosen, model=scripted(replies), log_dir=str(tmp_path), display="none")
        assert log.status == "success", log.error
        (sample,) = log.samples
        outputs = [message.text for message in sample.messages if message.role == "tool" and message.function == "bash"]
        local.reset(options={"task_ids": [task.id]})
        expected = [local.step(command)[0]["output"] for command in commands]
        reward, info = local.step("submit")[1::3]
        assert [output.strip() for output in outputs] == [output.strip() for output in expected]
        score = sample.scores["clawgym_verifier"]
        assert score.value == reward
        assert score.metadata["checks"] == info["checks"]
        assert (reward == 1) is solved
        compared += len(outputs)
    local.close()
    what = "solved" if solved else "failed"
    record_property("held", f"our tasks in its evaluation: {compared} observations and 3 scores ({what}) as `gym.make`")


@pytest.mark.parametrize("what", EPISODES)
def test_the_task_of_several_routes(what: str, tmp_path: Path, record_property: Callable[..., None]) -> None:
    commands, played = EPISODES[what], by_gym_make(EPISODES[what])
    replies = [*(call("bash", command=command) for command in commands), call("submit", answer="done")]
    (log,) = run_eval(taskset(str(FILE)), model=scripted(replies), log_dir=str(tmp_path), display="none")
    assert log.status == "success", log.error
    (sample,) = log.samples
    outputs = [message.text for message in sample.messages if message.role == "tool" and message.function == "bash"]
    score = sample.scores["clawgym_verifier"]
    assert [output.strip() for output in outputs] == [output.strip() for output in played.outputs]
    assert (score.value, score.metadata["checks"]) == (played.reward, played.checks)
    record_property("held", f"a task that other routes play ({what}): outputs, score and checks as `gym.make`")


class Says:
    """Repairs the program, and says an answer."""

    name, version = "says", "1"

    def __init__(self, answer: str, command: str = "true") -> None:
        self.answer, self.command = answer, command

    async def run(self, context: AgentContext) -> AgentReport:
        done = await context.sandbox.exec(["bash", "-c", self.command], cwd=context.task.workspace)
        calls = (ToolCall("1", "bash", {"command": self.command}),)
        context.record(Step("agent", "", utc_now(), calls, (Observation(done.text, "1"),)))
        return AgentReport(final_message=self.answer)

    def identity(self) -> dict[str, Any]:
        return {"name": self.name, "version": self.version, "answer": self.answer}

    async def aclose(self) -> None: ...


async def results_of(tasks: clawgym.TaskSet, agent: Any, out: Path) -> dict[str, dict[str, Any]]:
    made = backend("auto")
    try:
        await evaluate(EvalConfig(tasks, agent, made, out))
    finally:
        await made.aclose()
    return {row["task_id"]: row for row in map(json.loads, (out / "results.jsonl").read_text().splitlines())}


async def test_its_tasks_in_our_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[..., None]
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    questions = clawgym.load("inspect:inspect_tasks.questions")
    rows = await results_of(questions, Says("42"), tmp_path / "questions")
    assert rows["sum"]["result"]["checks"] == {"exact": 1.0, "includes": 1.0}
    assert rows["capital"]["result"]["checks"] == {"exact": 0.0, "includes": 0.0}
    assert "multiple choice" in (questions.by_id["letters"].unsupported or "")
    rows = await results_of(questions, Says("It is 42."), tmp_path / "wordy")
    assert rows["sum"]["result"]["checks"] == {"exact": 0.0, "includes": 1.0}

    programs = clawgym.load("inspect:inspect_tasks.programs")
    assert {file.path for file in programs.tasks[0].inputs} == {"double.py", "data/note.txt"}
    repair = "sed -i 's/+ 2/* 2/' double.py"
    for command, outcome, right in ((repair, "solved", 1.0), ("true", "failed", 0.0)):
        rows = await results_of(programs, Says("done", command), tmp_path / outcome)
        assert rows["repair"]["outcome"] == outcome, rows
        assert rows["repair"]["result"]["checks"] == {"doubled:runs": 1.0, "doubled:right": right}
    with pytest.raises(TaskError, match=r"write inspect:MODULE\.FUNCTION"):
        clawgym.load("inspect:inspect_tasks.nothing")
    record_property("held", "its tasks by our agents, scored by its scorers, with and without a sandbox")


async def test_evals_of_inspect_evals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[..., None]
) -> None:
    """HumanEval and GSM8K as they are published, on rows of the same form in a local folder of the same name."""
    pytest.importorskip("inspect_evals", reason="needs inspect-evals: clawgym interop check inspect")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # Inspect AI keeps data sets there
    sums = [{"question": f"How much is {n} and {n}?", "answer": f"{n} + {n} = {n + n}\n#### {n + n}"} for n in (4, 21)]
    prompt = 'def double(x: int) -> int:\n    """Return twice x."""\n'
    body, check = "    return 2 * x\n", "def check(candidate):\n    assert candidate(21) == 42\n"
    code = {"task_id": "HumanEval/0", "prompt": prompt, "canonical_solution": body, "test": check}
    for name, rows in (
        ("gsm8k/main/train", sums * 5),  # ten of them are examples in the prompt
        ("gsm8k/main/test", sums),
        ("openai_humaneval/test", [{**code, "entry_point": "double"}]),
    ):
        file = tmp_path / f"openai/{name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)

    questions = await asyncio.to_thread(clawgym.load, "inspect:inspect_evals.gsm8k.gsm8k")
    rows = await results_of(questions, Says("It is twice 21.\n\nANSWER: 42"), tmp_path / "sums")
    checks = {questions.by_id[id].instruction: row["result"]["checks"] for id, row in rows.items()}
    assert checks == {sums[0]["question"]: {"match": 0.0}, sums[1]["question"]: {"match": 1.0}}

    programs = await asyncio.to_thread(clawgym.load, "inspect:inspect_evals.humaneval.humaneval")
    for said, right in ((body, 1.0), ("    return x\n", 0.0)):
        answer = f"Here it is.\n```python\n{prompt}{said}```"
        rows = await results_of(programs, Says(answer), tmp_path / f"programs-{right}")
        assert rows["HumanEval/0"]["result"]["checks"] == {"verify": right}, rows
    record_property("held", "`humaneval` and `gsm8k` of `inspect-evals` by our agents, on local data")


async def our_run(out: Path) -> clawgym.TaskSet:
    """A run with two samples of two tasks. Returns the tasks."""
    tasks = clawgym.load(TASKS, limit=2)
    made = backend("auto")
    try:
        await evaluate(EvalConfig(tasks, make_agent("oracle"), made, out, samples=2))
    finally:
        await made.aclose()
    return tasks


async def test_our_run_as_its_log(tmp_path: Path, record_property: Callable[..., None]) -> None:
    tasks = await our_run(tmp_path / "run")
    for name in ("mine.eval", "mine.json"):
        await asyncio.to_thread(write_log, tmp_path / "run", tmp_path / name)
        log = await asyncio.to_thread(read_eval_log, str(tmp_path / name))
        assert log.status == "success"
        assert {(sample.id, sample.epoch) for sample in log.samples} == {(t.id, n) for t in tasks.tasks for n in (1, 2)}
        assert {score.name: score.metrics["mean"].value for score in log.results.scores} == {"strict": 1, "official": 1}
        for sample in log.samples:
            assert sample.input == tasks.by_id[sample.id].instruction
            assert sample.scores["strict"].value == 1.0
            assert any(message.role == "tool" for message in sample.messages) or len(sample.messages) > 1
    record_property("held", "`read_eval_log` opens a run of `clawgym eval` with transcripts and scores")


def test_our_run_in_its_viewer(tmp_path: Path, record_property: Callable[..., None]) -> None:
    """The server of `inspect view` gives its page the episodes with their transcripts and scores."""
    tasks = asyncio.run(our_run(tmp_path / "run"))
    write_log(tmp_path / "run", tmp_path / "logs/mine.eval")
    with socket.socket() as free:  # the viewer refuses port 0
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    inspect = str(Path(sys.executable).with_name("inspect"))
    command = [inspect, "view", "start", "--log-dir", str(tmp_path / "logs"), "--port", str(port), "--display", "plain"]
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | {"HOME": str(tmp_path)}
    )
    url = f"http://127.0.0.1:{port}"

    def get(path: str) -> Any:
        with urllib.request.urlopen(f"{url}/api/{path}") as answer:
            return json.load(answer)

    try:
        assert server.stdout is not None
        said = ""
        while "Running on" not in said:
            line = server.stdout.readline()
            said += line
            assert line, said
        (listed,) = get("log-files")["files"]
        log = get(f"logs/{urllib.parse.quote(listed['name'], safe='')}")
        shown = {(one["id"], one["epoch"]): one for one in log["samples"]}
        assert shown.keys() == {(task.id, n) for task in tasks.tasks for n in (1, 2)}
        for (task_id, _), sample in shown.items():
            assert sample["input"] == tasks.by_id[task_id].instruction
            assert any(message["role"] == "assistant" for message in sample["messages"])
            assert [sample["scores"][name]["value"] for name in ("strict", "official")] == [1.0, 1.0]
        record_property("held", f"`inspect view` shows {len(shown)} episodes of a run, with transcripts and scores")
    finally:
        server.terminate()
        server.communicate()


def test_configuration() -> None:
    assert ClawGymSandbox.config_deserialize({"image": "x", "cpus": 2}) == ClawGymSandboxConfig(image="x", cpus=2.0)
