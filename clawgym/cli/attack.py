"""``clawgym attack``: our own attacks, on the sandboxes and on the scores; what is open is printed, and fails."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["attack"]


def attack(
    task_set: Annotated[str | None, typer.Argument(help="Attack the scores of this task set.")] = None,
    sandbox: Annotated[bool, typer.Option("--sandbox", help="Attack the sandboxes: try to get out of a box.")] = False,
    backend: Annotated[
        list[str] | None, typer.Option(help="Only this backend (repeatable); otherwise every one that works here.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write what was found to this file.")] = None,
) -> None:
    """Try to get out of the sandboxes (--sandbox), or to be paid for work not done (TASKSET).

    Exit status 0 if nothing is open that should be closed, else 1.
    """
    if not sandbox and task_set is None:
        raise typer.BadParameter("say what to attack: `clawgym attack --sandbox`, or the name of a task set")
    if sandbox:
        raise typer.Exit(_sandboxes(backend, json_file))


def _sandboxes(names: list[str] | None, json_file: Path | None) -> int:
    raise typer.BadParameter("not here yet")
