"""Layers of a task reach the boxes of programs that bring their own; tools of a task do not, which is said."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clawgym.agents.openclaw.claw import OpenClaw
from clawgym.agents.openclaw.dense import DenseOpenClaw
from clawgym.agents.pi import Pi
from clawgym.errors import AgentError, UnsupportedTask
from clawgym.records import Layer, Outcome, Task

from ..rollouts import episode_of
from ..tools.tasks_with_tools import noting
from .blackbox.conftest import room, task
from .test_pi import call

__all__ = ["room"]

COMMAND = "python3 -c 'import layered'"
LONG = {"context_window": 200_000}


def layered(folder: Path, mark: str) -> Task:
    """A task whose Python finds a module that only its layer has."""
    site = folder / mark
    site.mkdir(parents=True)
    (site / "layered.py").write_text(f"print('this is {mark}')\n")
    layer = Layer(f"test/{mark}", mark * 64, site)
    env = {"PYTHONPATH": "/opt/layers/site"}
    return dataclasses.replace(task(), layers={"/opt/layers/site": layer}, env=env)


@pytest.mark.usefixtures("openclaw")
@pytest.mark.parametrize(
    ("claw", "tool"),
    [
        (lambda: OpenClaw(prompt="slim"), "exec"),
        (lambda: DenseOpenClaw(prompt="slim"), "exec"),
        (Pi, "bash"),
    ],
    ids=["openclaw", "openclaw-dense", "pi"],
)
async def test_programs_see_the_layers_of_their_task(
    room: Any, tmp_path: Path, claw: Callable[[], Any], tool: str
) -> None:
    it = await room(lambda _, n: call(tool, command=COMMAND) if n % 2 == 0 else "Done.", claw=claw(), engine=LONG)
    for sample, mark in enumerate("ab"):  # a box that was made ahead is of the same layers
        episode = await it.attempt(layered(tmp_path / str(sample), mark), sample=sample)
        assert episode.outcome is Outcome.FAILED
        assert [o.content.strip() for s in episode.steps for o in s.observations] == [f"this is {mark}"]


async def test_a_program_with_tools_of_its_own_takes_no_task_that_brings_others(room: Any) -> None:
    it = await room(["Done."])
    with pytest.raises(AgentError, match="use tool-loop"):
        await it.attempt(noting())
    assert not it.boxes


async def test_a_layer_that_is_gone_is_named(room: Any, tmp_path: Path) -> None:
    it = await room(["Done."])
    made = layered(tmp_path, "a")
    (tmp_path / "a" / "layered.py").unlink()
    (tmp_path / "a").rmdir()
    with pytest.raises(UnsupportedTask, match=r"test/a is gone.*clawgym tasks prepare"):
        await episode_of(made, it.agent, it.backend)
