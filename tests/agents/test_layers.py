"""Black-box programs see the layers of a task in their sandboxes, and refuse tasks with tools of their own."""

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
from .blackbox.conftest import black_box, task
from .test_pi import call

__all__ = ["black_box"]

COMMAND = "python3 -c 'import layered'"
LONG = {"context_window": 200_000}


def layered(folder: Path, mark: str) -> Task:
    """A task that imports a Python module which only its layer provides."""
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
async def test_program_sees_layers_of_its_task(
    black_box: Any, tmp_path: Path, claw: Callable[[], Any], tool: str
) -> None:
    setup = await black_box(
        lambda _, n: call(tool, command=COMMAND) if n % 2 == 0 else "Done.", claw=claw(), engine=LONG
    )
    for sample, mark in enumerate("ab"):  # spares have the same layers
        episode = await setup.attempt(layered(tmp_path / str(sample), mark), sample=sample)
        assert episode.outcome is Outcome.FAILED
        assert [o.content.strip() for s in episode.steps for o in s.observations] == [f"this is {mark}"]


async def test_program_agent_refuses_task_with_tools(black_box: Any) -> None:
    setup = await black_box(["Done."])
    with pytest.raises(AgentError, match="use tool-loop"):
        await setup.attempt(noting())
    assert not setup.sandboxes


async def test_missing_layer_raises_unsupported_task(black_box: Any, tmp_path: Path) -> None:
    setup = await black_box(["Done."])
    made = layered(tmp_path, "a")
    (tmp_path / "a" / "layered.py").unlink()
    (tmp_path / "a").rmdir()
    with pytest.raises(UnsupportedTask, match=r"test/a is missing.*clawgym tasks prepare"):
        await episode_of(made, setup.agent, setup.backend)
