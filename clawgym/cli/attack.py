"""``clawgym attack``: our own attacks, on the sandboxes and on the scores; what is open is printed, and fails."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import platform
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.progress import TaskID

__all__ = ["attack"]


def attack(
    task_set: Annotated[str | None, typer.Argument(help="Attack the scores of this task set.")] = None,
    sandbox: Annotated[bool, typer.Option("--sandbox", help="Attack the sandboxes: try to get out of a box.")] = False,
    backend: Annotated[
        list[str] | None, typer.Option(help="Only this backend (repeatable); otherwise every one that works here.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write what was found to this file.")] = None,
    n: Annotated[
        int | None, typer.Option("-n", min=1, help="Only so many tasks of each class, always the same.")
    ] = None,
    exploit: Annotated[list[str] | None, typer.Option(help="Only this exploit (repeatable), on every task.")] = None,
    baseline: Annotated[bool, typer.Option(help="Also grade the stock way, to compare.")] = True,
    out: Annotated[Path | None, typer.Option(help="Folder; attacks/<what is attacked> by default.")] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Most tasks at once; as many as the machine carries by default.")
    ] = None,
) -> None:
    """Try to get out of the sandboxes (--sandbox), or to be paid for work not done (TASKSET).

    Exit status 0 if nothing is open that should be closed, else 1.
    """
    if not sandbox and task_set is None:
        raise typer.BadParameter("say what to attack: `clawgym attack --sandbox`, or the name of a task set")
    if sandbox:
        raise typer.Exit(_sandboxes(backend, json_file))
    assert task_set is not None
    if backend and len(backend) > 1:
        raise typer.BadParameter("scores are attacked on one backend at a time: give --backend once")
    raise typer.Exit(
        asyncio.run(
            _scores(task_set, n, exploit or [], baseline, (backend or ["auto"])[0], out, json_file, concurrency)
        )
    )


def default_out(task_set: str, n: int | None, exploits: list[str], baseline: bool) -> Path:
    """A folder below ``attacks/`` that the same options always lead to."""
    parts = [Path(task_set).name, *([f"n{n}"] if n else []), *exploits, *([] if baseline else ["no-baseline"])]
    return Path("attacks") / re.sub(r"[^\w.@+-]+", "-", "_".join(parts)).strip(".-")[:150]


async def _scores(
    name: str,
    n: int | None,
    exploits: list[str],
    baseline: bool,
    backend_name: str,
    out: Path | None,
    json_file: Path | None,
    concurrency: int | None,
) -> int:
    """0 if every task was attacked and nothing was earned that must not be, 130 when interrupted, else 1."""
    from clawgym.cli.audit import TaskProgress
    from clawgym.cli.eval import stop_on_signals
    from clawgym.console import Console
    from clawgym.redteam import attack as attacks
    from clawgym.redteam.rates import attack_view
    from clawgym.sandbox import backend as make_backend
    from clawgym.tasks import load

    tasks = load(name)
    if n is not None:
        tasks = dataclasses.replace(tasks, tasks=tuple(attacks.draw(tasks.tasks, n)))
    folder = out or default_out(name, n, exploits, baseline)
    console = Console(stderr=True)
    stop = asyncio.Event()
    stop_on_signals(stop, console.say)
    backend = make_backend(backend_name)
    try:
        found = await attacks.attack(
            tasks,
            backend,
            folder,
            names=exploits,
            baseline=baseline,
            concurrency=concurrency,
            progress=TaskProgress(console, "attacking"),
            stop=stop,
        )
    finally:
        await backend.aclose()
    shown = Console()
    wide = shown if shown.is_terminal else Console(width=200)  # a table in a file is not folded
    wide.print(attack_view(found))
    shown.say(str(folder / attacks.ATTACK))
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(found.to_dict(), indent=2) + "\n")
    if found.complete:
        return int(bool(found.failures))
    console.say(f"{found.attacked} tasks attacked. Continue with:")
    console.say("  clawgym " + shlex.join(sys.argv[1:]))
    for task, why in list(found.infra.items())[:3]:
        console.say(f"  {task}: {why.strip().splitlines()[-1]}")
    return 130 if stop.is_set() else 1


def _sandboxes(names: list[str] | None, json_file: Path | None) -> int:
    """0 if nothing is open but what was declared, 1 if something is, or no backend could be attacked."""
    from clawgym.console import Console, progress
    from clawgym.redteam import escape
    from clawgym.redteam.escape.table import lines, table
    from clawgym.sandbox import backend as make_backend
    from clawgym.sandbox import local_names

    names = list(dict.fromkeys(names or local_names()))
    for name in names:
        if name not in local_names():
            make_backend(name)  # says what there is
            raise typer.BadParameter(f"{name}: attack the sandboxes of a node there: `clawgym attack --sandbox`")
    console = Console(stderr=True)
    with progress(console, transient=False) as shown:
        tasks: dict[str, TaskID] = {}

        def watch(name: str, finding: escape.ProbeFinding, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = shown.add_task(name, total=total)
                if not console.is_terminal:
                    console.say(f"{name}: {total} probes")
            shown.update(tasks[name], completed=done, description=f"{name}: {finding.probe}")

        columns = asyncio.run(escape.attack_all(names, watch=watch))
    real = [column for column in columns if not column.baseline]
    if json_file is not None:
        host = {"kernel": platform.release(), "machine": platform.machine(), "root": os.geteuid() == 0}
        text = json.dumps({"host": host, "columns": [column.as_dict() for column in columns]}, indent=2)
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(text + "\n")
    out = Console()
    out.say(f"Linux {platform.release()}, {platform.machine()}, {'root' if os.geteuid() == 0 else 'an ordinary user'}")
    printed = table(columns)
    wide = out if out.is_terminal else Console(width=200)  # a table in a file is not folded
    wide.print(printed)
    for line in lines(columns):
        out.say(line)
    return 1 if any(column.unexpected for column in real) or not any(column.findings for column in real) else 0
