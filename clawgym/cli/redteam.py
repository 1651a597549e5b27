"""``clawgym redteam``: attack the sandboxes and the scores, and report the attacks that succeed."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import platform
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clawgym.cli._options import Concurrency, JsonFlag, Out, SandboxName, TaskSetName

if TYPE_CHECKING:
    from rich.progress import TaskID

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True, help="Attack the sandboxes and the scores, and report the attacks that succeed."
)


@app.command()
def escape(
    sandbox: Annotated[
        list[str] | None,
        typer.Option("--sandbox", metavar="NAME", help="Only this backend (repeatable). Default: all that work here."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Try to escape from the sandboxes.

    Exit status 0 if only the declared escapes succeed, else 1.
    """
    raise typer.Exit(_escape(sandbox, as_json))


@app.command()
def exploits(
    taskset: TaskSetName,
    per_class: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Only N tasks of each class of grader, always the same ones.")
    ] = None,
    exploit: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this exploit. May be given several times.")
    ] = None,
    baseline: Annotated[bool, typer.Option(help="Also grade with the original grader, to compare.")] = True,
    out: Out = None,
    sandbox: SandboxName = "auto",
    concurrency: Concurrency = None,
    as_json: JsonFlag = False,
) -> None:
    """Try to earn the rewards of a task set without doing the tasks.

    Exit status 0 if every task was attacked and no exploit earned a reward that it should not, else 1. The same command
    resumes.
    """
    raise typer.Exit(
        asyncio.run(_exploits(taskset, per_class, exploit or [], baseline, sandbox, out, concurrency, as_json))
    )


@app.command()
def scan(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, a Harbor job folder, or an ATIF file.")],
    as_json: JsonFlag = False,
) -> None:
    """Find attempts at tampering in the transcripts and workspaces of a run.

    Exit status 0 if nothing was found, else 1.
    """
    from clawgym.console import Console
    from clawgym.redteam.scan import scan as scan_folder

    found = scan_folder(run)
    console = Console()
    if as_json:
        console.json(found.to_dict())
    else:
        for one in found.findings:
            place = f"turn {one.turn}" if one.turn is not None else "workspace"
            console.say(f"{one.episode}  {place}  {one.kind}  {one.where}: {one.evidence}")
        episodes = len({one.episode for one in found.findings})
        console.say(f"{len(found.findings)} findings in {episodes} of {found.episodes} episodes")
    raise typer.Exit(int(bool(found.findings)))


def default_out(task_set: str, n: int | None, exploits: list[str], baseline: bool) -> Path:
    """The default folder, below ``attacks/``; the same options give the same folder."""
    parts = [Path(task_set).name, *([f"n{n}"] if n else []), *exploits, *([] if baseline else ["no-baseline"])]
    return Path("attacks") / re.sub(r"[^\w.@+-]+", "-", "_".join(parts)).strip(".-")[:150]


async def _exploits(
    name: str,
    n: int | None,
    exploits: list[str],
    baseline: bool,
    sandbox: str,
    out: Path | None,
    concurrency: int | None,
    as_json: bool,
) -> int:
    """Run the attack and return the exit status: 0 if every task was attacked and no exploit earned a reward that it
    should not, 130 when interrupted, else 1."""
    from clawgym.cli._running import TaskProgress, resume_command, stop_on_signals
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
    backend = make_backend(sandbox)
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
    if as_json:
        shown.json(found.to_dict())
    else:
        wide = shown if shown.is_terminal else Console(width=200)  # do not wrap tables in files
        wide.print(attack_view(found))
        shown.say(str(folder / attacks.ATTACK))
    if found.complete:
        return int(bool(found.failures))
    console.say(f"{found.attacked} tasks attacked. Resume with:")
    console.say(resume_command())
    for task, why in list(found.infra.items())[:3]:
        console.say(f"  {task}: {why.strip().splitlines()[-1]}")
    return 130 if stop.is_set() else 1


def _escape(names: list[str] | None, as_json: bool) -> int:
    """Run the attack and return the exit status: 0 if only declared escapes succeed; 1 if another one does, or if no
    backend could be attacked."""
    from clawgym.console import Console, progress
    from clawgym.redteam import escape as attacks
    from clawgym.redteam.escape.table import lines, table
    from clawgym.sandbox import backend as make_backend
    from clawgym.sandbox import local_names

    names = list(dict.fromkeys(names or local_names()))
    for name in names:
        if name not in local_names():
            make_backend(name)  # raises for unknown names
            raise typer.BadParameter(f"{name}: cannot be attacked from here: run `clawgym redteam escape` on a node")
    console = Console(stderr=True)
    with progress(console, transient=False) as shown:
        tasks: dict[str, TaskID] = {}

        def watch(name: str, finding: attacks.ProbeFinding, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = shown.add_task(name, total=total)
                if not console.is_terminal:
                    console.say(f"{name}: {total} probes")
            shown.update(tasks[name], completed=done, description=f"{name}: {finding.probe}")

        columns = asyncio.run(attacks.attack_all(names, watch=watch))
    real = [column for column in columns if not column.baseline]
    out = Console()
    if as_json:
        host = {"kernel": platform.release(), "machine": platform.machine(), "root": os.geteuid() == 0}
        out.json({"host": host, "columns": [column.as_dict() for column in columns]})
    else:
        user = "root" if os.geteuid() == 0 else "an ordinary user"
        out.say(f"Linux {platform.release()}, {platform.machine()}, {user}")
        wide = out if out.is_terminal else Console(width=200)  # do not wrap tables in files
        wide.print(table(columns))
        for line in lines(columns):
            out.say(line)
    return 1 if any(column.unexpected for column in real) or not any(column.findings for column in real) else 0
