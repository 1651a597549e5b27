"""``ClawGym/swe-v0``: Gymnasium's contract, with a repository in a real sandbox."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import pytest

import clawgym  # noqa: F401  # registers the ids
from clawgym.records import Limits, TaskFile, TaskSet

from ..verifiers.tasks_for_tests import task
from .messages import says, seen

LIMITS = Limits(max_steps=6, verify_seconds=10, memory_mb=256, disk_mb=64, agent_seconds=60, command_seconds=3)
NUMBERS = (TaskFile("input/numbers.txt", b"1 2 3\n"), TaskFile("sum.py", b"print(1)\n", executable=True))
TASKS = TaskSet("sums", (task(limits=LIMITS, inputs=NUMBERS),))


@pytest.fixture
def env() -> Iterator[gym.Env]:
    made = gym.make("ClawGym/swe-v0", tasks=TASKS)
    yield made
    made.close()


def test_commands_and_editor_share_sandbox(env: gym.Env) -> None:
    observation, info = env.reset(seed=1)
    assert json.loads(observation["messages"]) == [{"role": "user", "content": info["instruction"]}]
    assert [tool["function"]["name"] for tool in info["tools"]] == [
        "bash",
        "read_file",
        "write_file",
        "edit_file",
        "submit",
    ]
    assert seen(env.step("cd input; X=7")[0])[0].startswith("[exit code 0; cwd ")
    assert seen(env.step("{ echo $X; pwd; }")[0])[0].startswith("7\n")
    edit: dict[str, Any] = {"path": "sum.py", "old": "print(1)", "new": "print(1 + 2 + 3)"}
    observation, *_, info = env.step(
        says(
            ("edit_file", edit),
            ("edit_file", edit),
            ("bash", {"command": "cd ..; mkdir output; ./sum.py > output/sum.txt || python3 sum.py > output/sum.txt"}),
            ("read_file", {"path": "output/sum.txt", "first_line": 1, "last_line": 1}),
            ("bash", {"command": "test -x sum.py"}),
        )
    )
    texts = seen(observation)
    assert texts[0] == "[replaced 1 time]"
    assert "does not stand in" in texts[1]
    assert texts[3] == "6\n[lines 1 to 1 of 1]"
    assert "exit code 0" in texts[4]
    assert info["malformed_calls"] == 0
    _, reward, terminated, truncated, info = env.step(" submit\n")
    assert (reward, terminated, truncated, info["outcome"]) == (1.0, True, False, "solved")


def test_message_without_calls_and_text_command(env: gym.Env) -> None:
    env.reset(seed=1)
    assert "no tool call" in seen(env.step('{"content": "echo hi"}')[0])[0]
    assert "hi\n" in seen(env.step("echo hi")[0])[0]
    assert "NUL" in seen(env.step("echo \0")[0])[0]


def test_max_steps_truncates(env: gym.Env) -> None:
    env.reset(seed=1)
    results = [env.step("true") for _ in range(6)]
    assert [r[3] for r in results] == [False] * 5 + [True]
    assert results[-1][4]["cause"] == "steps"


def test_broken_sandbox_ends_episode(env: gym.Env) -> None:
    env.reset(seed=1)
    from clawgym.envs._runtime import runtime

    attempt = env.unwrapped._runner.attempt  # type: ignore[attr-defined]
    runtime().run(attempt.backend.supervised.ask("kill", attempt.sandbox.id))
    _, reward, terminated, _, info = env.step("true")
    assert (reward, terminated, info["outcome"]) == (0.0, True, "failed")
    assert "instruction" in env.reset(seed=2)[1]


def test_graded_diff_is_in_info() -> None:
    protected = dataclasses.replace(TASKS.tasks[0].verifier, protected=("tests/*",))
    env = gym.make("ClawGym/swe-v0", tasks=TaskSet("sums", (dataclasses.replace(TASKS.tasks[0], verifier=protected),)))
    env.reset(seed=0)
    env.step("mkdir -p output tests; echo 6 > output/sum.txt; echo x > tests/a")
    info = env.step("submit")[4]
    assert info["outcome"] == "solved"
    assert "+6\n" in info["diff"]
    assert "tests/a" not in info["diff"]
    env.close()
