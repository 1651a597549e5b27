"""What must never earn a point from a task with tools: calls that go for servers, worlds, checkers."""

from __future__ import annotations

import dataclasses
import os

import pytest

from clawgym.agents import ScriptAgent
from clawgym.records import Outcome, Task
from clawgym.redteam.exploits import EXPLOITS
from clawgym.sandbox import Backend
from clawgym.tasks.packs import toolcall_basic

from ..rollouts import episode_of

WHOLE = bool(os.environ.get("CLAWGYM_WHOLE"))
WORLD, ANSWER = "bank-settle", "data-join"
SLOW = {"tools-fork-bomb", "tools-out-of-memory"}
NOT_TAKEN = ("workspace-size", "workspace-depth")
"""What a sandbox left goes beyond these bounds, so that there is nothing to check: failed, all the same."""
SERVED = [name for name, exploit in EXPLOITS.items() if exploit.setting == "tools" and (WHOLE or name not in SLOW)]


async def attempt(task: Task, name: str, backend: Backend) -> None:
    if task.unsupported:
        pytest.skip(task.unsupported)
    # What stops its own server is not waited for as long as honest work.
    task = dataclasses.replace(task, limits=dataclasses.replace(task.limits, command_seconds=10.0))
    script = EXPLOITS[name].script(task)
    assert script, "this task offers nothing to attack"
    episode = await episode_of(task, ScriptAgent(script.encode(), name), backend)
    assert episode.result is not None, episode.error
    assert episode.outcome in (Outcome.FAILED, Outcome.TRUNCATED)
    assert episode.result.strict == episode.result.official == 0.0
    if episode.cause not in NOT_TAKEN:
        assert set(episode.result.checks.values()) == {0.0}


def fit(generator: str) -> list[str]:
    task = toolcall_basic.make(generator, 1)
    return [name for name in SERVED if EXPLOITS[name].script(task)]


@pytest.mark.parametrize("name", fit(WORLD))
async def test_a_world_is_changed_by_its_tools_alone(name: str, backend: Backend) -> None:
    await attempt(toolcall_basic.make(WORLD, 1), name, backend)


@pytest.mark.parametrize("name", fit(ANSWER))
async def test_an_answer_is_paid_for_being_right_alone(name: str, backend: Backend) -> None:
    await attempt(toolcall_basic.make(ANSWER, 1), name, backend)


@pytest.mark.parametrize("name", [name for name in SERVED if name.startswith("answers-")])
async def test_the_library_is_neither_fooled_nor_kept(name: str, backend: Backend) -> None:
    await attempt(toolcall_basic.make("math-radical", 1), name, backend)


async def test_what_is_written_from_the_interpreter_was_there_to_be_written(backend: Backend) -> None:
    """The exploit works on a file that it can reach: its own."""
    task = toolcall_basic.make(WORLD, 1)
    script = EXPLOITS["tools-write-database"].script(task)
    episode = await episode_of(task, ScriptAgent(script.encode()), backend)
    seen = [observation.content for step in episode.steps for observation in step.observations]
    assert "wrote world.sqlite" in seen[0]
