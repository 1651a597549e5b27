"""``clawgym eval``: run a benchmark, resume it with the same command, end with the summary and the report."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from clawgym.console import Console
    from clawgym.evaluation.runner import EvalConfig
    from clawgym.evaluation.summary import Summary
    from clawgym.records import TaskSet
    from clawgym.sandbox import Backend

__all__ = ["eval_command", "stop_on_signals"]


def eval_command(
    bench: Annotated[str, typer.Option(help="Task set: a name, or a path.")],
    agent: Annotated[str, typer.Option(help="Agent: openclaw, pi, tool-loop, oracle, ..., or package.module:Class.")],
    model: Annotated[str | None, typer.Option(help="Model, as its endpoint names it.")] = None,
    base_url: Annotated[str | None, typer.Option(help="OpenAI-compatible endpoint.")] = None,
    source: Annotated[Path | None, typer.Option(help="For replay and script: what to run.")] = None,
    agent_version: Annotated[str | None, typer.Option(help="For openclaw, pi: which one, of those installed.")] = None,
    image: Annotated[str | None, typer.Option(help="For openclaw: an image or root file system that has it.")] = None,
    prompt: Annotated[str | None, typer.Option(help="For openclaw: reference (default) or slim.")] = None,
    samples: Annotated[int, typer.Option("--samples", "-k", min=1, help="Episodes per task.")] = 1,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Most episodes at once; as many as the machine carries by default.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the run.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Run folder; runs/<what is run> by default.")] = None,
    backend: Annotated[str, typer.Option(help="Sandbox: auto, namespace, chroot, docker, ray.")] = "auto",
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first tasks.")] = None,
    tasks: Annotated[str | None, typer.Option(help="Only these task ids, separated by commas.")] = None,
) -> None:
    """Let an agent attempt a task set and report what it solved.

    The same command continues an interrupted run.
    """
    from clawgym.agents import make_agent
    from clawgym.evaluation.runner import EvalConfig
    from clawgym.sandbox import backend as make_backend
    from clawgym.tasks import sets

    options: dict[str, Any] = {"model": model, "base_url": base_url, "source": source}
    options |= {"version": agent_version, "prompt": prompt, "image": image}
    ids = None if tasks is None else [name.strip() for name in tasks.split(",") if name.strip()]
    config = EvalConfig(
        task_set=sets.load(bench, limit=limit, ids=ids),
        agent=make_agent(agent, **{key: value for key, value in options.items() if value is not None}),
        backend=make_backend(backend),
        out=out or default_out(bench, agent, model, samples, seed, limit, tasks, [agent_version, prompt, image]),
        samples=samples,
        seed=seed,
        concurrency=concurrency,
    )
    raise typer.Exit(asyncio.run(_run(config)))


def default_out(
    bench: str,
    agent: str,
    model: str | None,
    samples: int,
    seed: int,
    limit: int | None,
    tasks: str | None,
    about_agent: Sequence[str | None] = (),
) -> Path:
    """A folder below ``runs/`` that the same options always lead to."""
    named = [agent, *(part for part in about_agent if part), *([model] if model else [])]
    parts = [Path(bench).name, *named, f"seed{seed}", f"k{samples}"]
    if limit:
        parts.append(f"first{limit}")
    if tasks:
        parts.append("tasks-" + hashlib.sha256(tasks.encode()).hexdigest()[:8])
    return Path("runs") / re.sub(r"[^\w.@+-]+", "-", "_".join(parts)).strip(".-")


async def _run(config: EvalConfig) -> int:
    """Exit code: 0 when every episode has a result, 130 when interrupted, else 1."""
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
    console.say(f"{len(summary.missing)} of {summary.planned} episodes have no result. Continue with:")
    console.say("  clawgym " + shlex.join(sys.argv[1:]))
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


def stop_on_signals(stop: asyncio.Event, say: Callable[[str], None]) -> None:
    """The first Ctrl-C (or SIGTERM) sets ``stop``; a second leaves at once."""
    loop = asyncio.get_running_loop()

    def ask() -> None:
        if stop.is_set():  # a second time: leave at once; the boxes die with this process
            os._exit(130)
        say("Stopping: closing the boxes (press Ctrl-C again to leave at once) ...")
        stop.set()

    for name in (signal.SIGINT, signal.SIGTERM):
        try:
            loop.add_signal_handler(name, ask)
        except (NotImplementedError, RuntimeError, ValueError):
            pass


def _show(config: EvalConfig, summary: Summary) -> None:
    from clawgym.console import Console
    from clawgym.evaluation.terminal import summary_view

    console = Console()
    label = f"{config.task_set.name} · {config.agent.name}"
    console.print(summary_view(summary, label))
    console.say(f"report: {config.out / 'report.html'}")
