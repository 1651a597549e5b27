"""``clawgym eval``: run a benchmark, resume it with the same command, end with the summary and the report."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clawgym.cli._options import BaseUrl, Concurrency, Limit, Out, SandboxName, Seed, TaskIds, TaskSetName, named_values

if TYPE_CHECKING:
    from clawgym.console import Console
    from clawgym.evaluation.runner import EvalConfig
    from clawgym.evaluation.summary import Summary
    from clawgym.records import TaskSet
    from clawgym.sandbox import Backend

__all__ = ["eval_command"]


def eval_command(
    taskset: TaskSetName,
    agent: Annotated[
        str, typer.Option(metavar="NAME", help="Agent: one of `clawgym list agents`, or package.module:Class.")
    ],
    model: Annotated[str | None, typer.Option(help="Model, by the name that its endpoint uses.")] = None,
    base_url: BaseUrl = None,
    agent_option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="An option of the agent: see `clawgym list agents NAME`. Repeatable."),
    ] = None,
    samples: Annotated[int, typer.Option("--samples", "-k", min=1, help="Episodes of each task.")] = 1,
    concurrency: Concurrency = None,
    seed: Seed = 0,
    out: Out = None,
    sandbox: SandboxName = "auto",
    limit: Limit = None,
    task: TaskIds = None,
) -> None:
    """Let an agent attempt a task set and report what it solved.

    The same command continues an interrupted run.
    """
    from clawgym.agents import make_agent
    from clawgym.evaluation.runner import EvalConfig
    from clawgym.sandbox import backend as make_backend
    from clawgym.tasks import sets

    options: dict[str, Any] = {"model": model, "base_url": base_url, **named_values(agent_option, "--agent-option")}
    config = EvalConfig(
        task_set=sets.load(taskset, limit=limit, ids=task),
        agent=make_agent(agent, **{key: value for key, value in options.items() if value is not None}),
        backend=make_backend(sandbox),
        out=out or default_out(taskset, agent, model, samples, seed, limit, task, agent_option or ()),
        samples=samples,
        seed=seed,
        concurrency=concurrency,
    )
    raise typer.Exit(asyncio.run(_run(config)))


def default_out(
    taskset: str,
    agent: str,
    model: str | None,
    samples: int,
    seed: int,
    limit: int | None,
    tasks: Sequence[str] | None,
    about_agent: Sequence[str] = (),
) -> Path:
    """A folder below ``runs/`` that the same options always lead to."""
    named = [agent, *about_agent, *([model] if model else [])]
    parts = [Path(taskset).name, *named, f"seed{seed}", f"k{samples}"]
    if limit:
        parts.append(f"first{limit}")
    if tasks:
        parts.append("tasks-" + hashlib.sha256(",".join(tasks).encode()).hexdigest()[:8])
    return Path("runs") / re.sub(r"[^\w.@+-]+", "-", "_".join(parts)).strip(".-")


async def _run(config: EvalConfig) -> int:
    """Exit code: 0 when every episode has a result, 130 when interrupted, else 1."""
    from clawgym.cli._running import resume_command, stop_on_signals
    from clawgym.console import Console
    from clawgym.evaluation.progress import RichProgress
    from clawgym.evaluation.runner import evaluate

    console = Console(stderr=True)
    stop = asyncio.Event()
    stop_on_signals(stop, console.say)
    try:
        await config.backend.probe()
        config = dataclasses.replace(
            config, floors=await floors_with_progress(config.task_set, config.backend, console)
        )
        summary = await evaluate(config, progress=RichProgress(console), stop=stop)
    finally:
        await config.agent.aclose()
        await config.backend.aclose()
    _show(config, summary)
    if summary.complete:
        return 0
    for cause, count in list(summary.infra_causes.items())[:3]:
        console.say(f"infra, {count} attempts: {cause}")
    if summary.infra_causes:
        console.say(f"Each has an error.log below {config.out / 'episodes'}.")
    console.say(f"{len(summary.missing)} of {summary.planned} episodes have no result. Resume with:")
    console.say(resume_command())
    return 130 if stop.is_set() else 1


async def floors_with_progress(task_set: TaskSet, backend: Backend, console: Console) -> dict[str, float]:
    """The floors of ``task_set``; those not known yet are measured under a progress bar."""
    from clawgym.console import progress
    from clawgym.evaluation.floors import measure_floors

    with progress(console) as shown:
        bar = shown.add_task("what doing nothing pays", total=None)
        return await measure_floors(
            task_set, backend, lambda done, total: shown.update(bar, completed=done, total=total)
        )


def _show(config: EvalConfig, summary: Summary) -> None:
    from clawgym.console import Console
    from clawgym.evaluation.terminal import summary_view

    console = Console()
    label = f"{config.task_set.name} · {config.agent.name}"
    console.print(summary_view(summary, label))
    console.say(f"report: {config.out / 'report.html'}")
