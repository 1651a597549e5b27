"""``clawgym tasks audit``: check whether the rewards of a task set can be trusted."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from clawgym.cli._options import Concurrency, Out, Sample, SandboxName, Seed, TaskSetName

if TYPE_CHECKING:
    from rich.console import RenderableType

    from clawgym.evaluation.findings import Audit
    from clawgym.records import TaskSet
    from clawgym.sandbox import Backend

__all__ = ["audit_command"]

_MAX_SHOWN = 12
"""How many tasks with flaws are shown."""


def audit_command(
    taskset: TaskSetName,
    sample: Sample = None,
    seed: Seed = 0,
    out: Out = None,
    sandbox: SandboxName = "auto",
    concurrency: Concurrency = None,
) -> None:
    """Check whether the rewards of a task set can be trusted.

    Grades each task on no-model baselines and analyses its verifier. Writes audit.json (one record per task) and
    clean.csv (which tasks to keep). The same command resumes. Exit status 1 if the reward of a task is broken
    (docs/tutorials/read-an-audit.md), or if a task could not be audited.
    """
    from clawgym.evaluation import audit
    from clawgym.sandbox import backend as make_backend
    from clawgym.tasks import load

    tasks = load(taskset)
    if sample is not None:
        tasks = audit.sample(tasks, sample, seed)
    folder = out or default_out(taskset, sample, seed)
    raise typer.Exit(asyncio.run(_run(tasks, make_backend(sandbox), folder, concurrency)))


def default_out(taskset: str, sample: int | None, seed: int) -> Path:
    """The default folder, below ``audits/``; the same options give the same folder."""
    parts = [Path(taskset).name, *([f"n{sample}", f"seed{seed}"] if sample else [])]
    return Path("audits") / re.sub(r"[^\w.@+-]+", "-", "_".join(parts)).strip(".-")


async def _run(tasks: TaskSet, backend: Backend, out: Path, concurrency: int | None) -> int:
    """Run the audit and return the exit status: 0 if every task was audited and none is broken, 130 when interrupted,
    else 1."""
    from clawgym.cli._running import TaskProgress, resume_command, stop_on_signals
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
    console.say(f"{missing} of {len(tasks)} tasks could not be audited. Resume with:")
    console.say(resume_command())
    for task, why in list(found.infra.items())[:3]:
        console.say(f"  {task}: {why.strip().splitlines()[-1]}")
    return 130 if stop.is_set() else 1


def _view(found: Audit) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from clawgym.visible import visible

    kept = sum(not task.flaws for task in found.tasks)
    lines = [Text(f"{len(found.tasks)} tasks audited, {kept} without a flaw", style="bold")]
    if seconds := found.seconds:
        lines.append(Text("time per grading: " + ", ".join(f"{name} {1000 * s:.0f} ms" for name, s in seconds.items())))
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

    table = Table(title="no-model baselines (official score)", title_justify="left", box=box.SIMPLE_HEAD)
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
        title="flaws (in red: the reward is broken)",
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
    title = "tasks with flaws" + (f", {_MAX_SHOWN} of {len(flawed)}" if len(flawed) > _MAX_SHOWN else "")
    table = Table(
        "task",
        Column("no-model\nbaseline", justify="right"),
        "flaws",
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for task, flaws in flawed[:_MAX_SHOWN]:
        what = Text("\n").join(Text(visible(f"{name}: {_short(text)}")) for name, text in flaws.items())
        table.add_row(Text(visible(task.task)), f"{task.floor:.2f}", what)
    return [table]


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 90 else text[:87] + "..."
