"""``clawgym audit``: can a task set's rewards be trusted? What nobody's work earns, and what breaks a verifier."""

from __future__ import annotations

import asyncio
import re
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

    from clawgym.console import Console
    from clawgym.evaluation.findings import Audit
    from clawgym.evaluation.progress import Ledger
    from clawgym.records import TaskSet
    from clawgym.sandbox import Backend

__all__ = ["TaskProgress", "audit_command"]

_WORST = 12


def audit_command(
    taskset: Annotated[str, typer.Argument(help="A set's name, a pack (NAME:split), a folder or a JSONL file.")],
    sample: Annotated[int | None, typer.Option("-n", min=1, help="Only so many tasks, drawn at random.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the draw.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder; audits/<what is audited> by default.")] = None,
    backend: Annotated[str, typer.Option(help="Sandbox: auto, or a backend's name.")] = "auto",
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Most tasks at once; as many as the machine carries by default.")
    ] = None,
) -> None:
    """Grade each task on work that nobody did, twice, and read its verifier.

    Writes audit.json (a record a task) and clean.csv (which tasks to keep). The same command continues an interrupted
    audit. Exit status 1 if a task's reward is broken (docs/audit.md says what counts), or if a task has no record.
    """
    from clawgym.evaluation import audit
    from clawgym.sandbox import backend as make_backend
    from clawgym.tasks import load

    tasks = load(taskset)
    if sample is not None:
        tasks = audit.sample(tasks, sample, seed)
    folder = out or default_out(taskset, sample, seed)
    raise typer.Exit(asyncio.run(_run(tasks, make_backend(backend), folder, concurrency)))


def default_out(taskset: str, sample: int | None, seed: int) -> Path:
    """A folder below ``audits/`` that the same options always lead to."""
    parts = [Path(taskset).name, *([f"n{sample}", f"seed{seed}"] if sample else [])]
    return Path("audits") / re.sub(r"[^\w.@+-]+", "-", "_".join(parts)).strip(".-")


async def _run(tasks: TaskSet, backend: Backend, out: Path, concurrency: int | None) -> int:
    """Exit code: 0 if every task has a record and none is broken, 130 when interrupted, else 1."""
    from clawgym.cli.eval import stop_on_signals
    from clawgym.console import Console
    from clawgym.evaluation.audit import AUDIT, CLEAN, audit

    console = Console(stderr=True)
    stop = asyncio.Event()
    stop_on_signals(stop, console.say)
    try:
        view = TaskProgress(console, "auditing")
        found = await audit(tasks, backend, out, concurrency=concurrency, progress=view, stop=stop)
    finally:
        await backend.aclose()
    shown = Console()
    shown.print(_view(found))
    shown.say(str(out / AUDIT))
    shown.say(str(out / CLEAN))
    if found.complete:
        return int(found.broken)
    missing = len(tasks) - len(found.tasks) - len(found.unsupported)
    console.say(f"{missing} of {len(tasks)} tasks have no record. Continue with:")
    console.say("  clawgym " + shlex.join(sys.argv[1:]))
    for task, why in list(found.infra.items())[:3]:
        console.say(f"  {task}: {why.strip().splitlines()[-1]}")
    return 130 if stop.is_set() else 1


class TaskProgress:
    """A bar on a terminal, else a line every tenth (:class:`~clawgym.evaluation.progress.ProgressView`)."""

    def __init__(self, console: Console, doing: str) -> None:
        from clawgym.console import progress

        self._console = console
        self._bar = progress(console)
        self._doing = doing
        self._task = self._bar.add_task(doing, total=None)
        self._done = self._total = self._infra = 0
        self._began = time.monotonic()

    def start(self, folder: Ledger, to_run: int) -> None:
        self._done = sum(key in folder.done for key in folder.latest)
        self._total = self._done + to_run
        if self._done:
            self._console.say(f"Continuing: {self._done} of {self._total} tasks are already there.")
        self._bar.update(self._task, total=self._total, completed=self._done)
        if self._console.is_terminal:
            self._bar.start()

    def running(self, now: int, limit: int) -> None:
        self._bar.update(self._task, description=f"{self._doing}, {now} at once")

    def finished(self, row: Mapping[str, Any]) -> None:
        if row["outcome"] == "infra":
            self._infra += 1
            return
        self._done += 1
        self._bar.update(self._task, completed=self._done)
        if not self._console.is_terminal and (self._done == self._total or self._done % max(1, self._total // 10) == 0):
            faults = f", {self._infra} infrastructure errors" if self._infra else ""
            seconds = time.monotonic() - self._began
            self._console.say(f"{self._done}/{self._total} tasks, {seconds:.0f} s{faults}")

    def stop(self, hopeless: str | None) -> None:
        self._bar.stop()
        if hopeless:
            from clawgym.evaluation.progress import stopped_text

            self._console.say(stopped_text(hopeless), style="bold red")


def _view(found: Audit) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from clawgym.visible import visible

    kept = sum(not task.flaws for task in found.tasks)
    lines = [Text(f"{len(found.tasks)} tasks audited, {kept} without a flaw", style="bold")]
    if seconds := found.seconds:
        lines.append(Text("one grading: " + ", ".join(f"{name} {1000 * s:.0f} ms" for name, s in seconds.items())))
    if found.unsupported:
        lines.append(Text(f"{len(found.unsupported)} cannot run here", style="yellow"))
    lines += [
        Text(visible(f"unreadable: {where}: {why}"), style="yellow") for where, why in found.task_set.problems.items()
    ]
    return Group(_policies(found), _flaws(found), *_worst(found), *lines)


def _policies(found: Audit) -> RenderableType:
    from rich import box
    from rich.table import Table

    from clawgym.verifiers.cheap import CHEAP_POLICIES

    table = Table(title="what no work earns (official score)", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("policy")
    for name in ("mean", "max", "> 0", ">= 0.5", "no score"):
        table.add_column(name, justify="right")
    for policy in CHEAP_POLICIES:
        earned = found.earned(policy)
        counts = (f"{earned[key]:.0f}" for key in ("above_0", "above_half", "crashed"))
        table.add_row(policy, f"{earned['mean']:.4f}", f"{earned['max']:.3f}", *counts)
    return table


def _flaws(found: Audit) -> RenderableType:
    from rich import box
    from rich.table import Column, Table
    from rich.text import Text

    from clawgym.evaluation.findings import FLAWS

    table = Table(
        "flaw",
        Column("tasks", justify="right"),
        "",
        title="flaws (red: the reward is broken)",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    counts = found.counts
    for flaw in FLAWS:
        count = counts[flaw.name]
        style = "dim" if not count else "bold red" if flaw.breaks else ""
        table.add_row(Text(flaw.name, style), Text(str(count), style), Text(flaw.about, style))
    return table


def _worst(found: Audit) -> list[RenderableType]:
    """The tasks with the most flaws, broken rewards first."""
    from rich import box
    from rich.table import Column, Table
    from rich.text import Text

    from clawgym.evaluation.findings import FLAWS
    from clawgym.visible import visible

    breaking = {flaw.name for flaw in FLAWS if flaw.breaks}
    flawed = [(task, task.flaws) for task in found.tasks if task.flaws]
    flawed.sort(key=lambda pair: (-len(breaking & pair[1].keys()), -len(pair[1]), -pair[0].floor))
    if not flawed:
        return []
    title = f"the worst of {len(flawed)}" if len(flawed) > _WORST else "tasks with flaws"
    table = Table(
        "task",
        Column("floor", justify="right"),
        "flaws",
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for task, flaws in flawed[:_WORST]:
        what = Text("\n").join(Text(visible(f"{name}: {_short(text)}")) for name, text in flaws.items())
        table.add_row(Text(visible(task.task)), f"{task.floor:.2f}", what)
    return [table]


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 90 else text[:87] + "..."
