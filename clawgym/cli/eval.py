"""``clawgym eval``: evaluate an agent on a task set, then print the summary and write the report."""

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


_OWN_OPTIONS = {
    "api_key": "keep the key in an environment variable, and give its name with --api-key-env",
    "api_key_env": "use --api-key-env",
    "base_url": "use --base-url",
    "engine": "use --model and --base-url",
    "gateway": "use --model and --base-url",
    "model": "use --model",
    "sampling": "use --temperature and --max-tokens",
}
"""Options that --agent-option refuses -> what to use instead."""


def eval_command(
    agent: Annotated[
        str, typer.Option(metavar="NAME", help="Agent: one of `clawgym list agents`, or package.module:Class.")
    ],
    taskset: TaskSetName = "",
    bench: Annotated[str, typer.Option(metavar="TASKSET", help="The same as TASKSET.", show_default=False)] = "",
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Model, by the name that its endpoint uses. Several: one run folder for each, then a comparison.",
        ),
    ] = None,
    base_url: BaseUrl = None,
    api_key_env: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Environment variable that holds the API key. Default: OPENAI_API_KEY."),
    ] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="Sampling temperature of the model.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, metavar="N", help="Most tokens of one model answer.")] = None,
    max_steps: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Most model calls in an episode. Default: as in the task.")
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(min=1.0, metavar="SECONDS", help="Most seconds of an agent's work. Default: as in the task."),
    ] = None,
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

    The same command resumes an interrupted run. With a larger -k it adds episodes to the run. Before the run, one call
    checks the model, the key and the URL. Exit status 0 if every episode has a result, 1 if some have none, 2 if
    nothing could start, 130 when interrupted.
    """
    from clawgym.agents import make_agent
    from clawgym.engines import Sampling
    from clawgym.evaluation.runner import EvalConfig
    from clawgym.sandbox import backend as make_backend
    from clawgym.tasks import sets

    if bool(taskset) == bool(bench):
        raise typer.BadParameter("give one task set: `clawgym tasks list` shows the names", param_hint="TASKSET")
    taskset = taskset or bench
    models = model or [None]
    if len(set(models)) < len(models):
        raise typer.BadParameter("a model is given twice: give each once", param_hint="--model")
    tasks, settings = limited(sets.load(taskset, limit=limit, ids=task), max_steps, timeout)
    sampling = None if temperature is None and max_tokens is None else Sampling(temperature, max_tokens=max_tokens)
    own = named_values(agent_option, "--agent-option")
    if taken := sorted(own.keys() & _OWN_OPTIONS.keys()):
        raise typer.BadParameter(
            f"{taken[0]} is not an option of the agent: {_OWN_OPTIONS[taken[0]]}", param_hint="--agent-option"
        )
    options: dict[str, Any] = {"base_url": base_url, "api_key_env": api_key_env, **own}
    named = {"temperature": temperature, "max-tokens": max_tokens, "max-steps": max_steps, "timeout": timeout}
    about = [*(agent_option or ()), *(f"{name}={value:g}" for name, value in named.items() if value is not None)]
    backend = make_backend(sandbox)
    configs = [
        EvalConfig(
            task_set=tasks,
            agent=make_agent(agent, sampling=sampling, **options, model=name),
            backend=backend,
            out=folder_of(out, name, several=len(models) > 1)
            or default_out(taskset, agent, name, seed, limit, task, about),
            samples=samples,
            seed=seed,
            concurrency=concurrency,
            settings=settings,
        )
        for name in models
    ]
    raise typer.Exit(asyncio.run(_run(configs)))


def limited(tasks: TaskSet, max_steps: int | None, timeout: float | None) -> tuple[TaskSet, dict[str, Any]]:
    """Replace limits of ``tasks``; also returns the settings for the run manifest."""
    asked = {"max_steps": max_steps, "agent_seconds": timeout}
    given = {name: value for name, value in asked.items() if value is not None}
    if not given:
        return tasks, {}
    changed = (dataclasses.replace(task, limits=dataclasses.replace(task.limits, **given)) for task in tasks.tasks)
    return dataclasses.replace(tasks, tasks=tuple(changed)), {"limits": given}


def folder_of(out: Path | None, model: str | None, *, several: bool) -> Path | None:
    """The run folder of one model: ``out``, or a folder below it if there are several models."""
    return out / _slug(model or "") if out is not None and several else out


def default_out(
    taskset: str,
    agent: str,
    model: str | None,
    seed: int,
    limit: int | None,
    tasks: Sequence[str] | None,
    about: Sequence[str] = (),
) -> Path:
    """The default run folder, below ``runs/``. The same options give the same folder; it does not depend on the number
    of samples, which may be raised later."""
    parts = [Path(taskset).name, agent, *about, *([model] if model else []), f"seed{seed}"]
    if limit:
        parts.append(f"first{limit}")
    if tasks:
        parts.append("tasks-" + hashlib.sha256(",".join(tasks).encode()).hexdigest()[:8])
    return Path("runs") / _slug("_".join(parts))


def _slug(text: str) -> str:
    """A file name of at most 150 characters; longer texts are cut and end with a digest."""
    name = re.sub(r"[^\w.@+-]+", "-", text).strip(".-")
    return name if len(name) <= 150 else f"{name[:130]}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


async def _run(configs: Sequence[EvalConfig]) -> int:
    """Run the evaluations and return the exit status: 0 if every episode has a result, 130 when interrupted, else 1."""
    from clawgym.cli._running import stop_on_signals
    from clawgym.console import Console

    console = Console(stderr=True)
    stop = asyncio.Event()
    stop_on_signals(stop, console.say)
    code, open_agents = 0, [config.agent for config in configs]
    try:
        for config in configs:
            await check_model(config)
        await configs[0].backend.probe()
        baselines = await baselines_with_progress(configs[0].task_set, configs[0].backend, console)
        for config in configs:
            if len(configs) > 1:
                console.say(f"run folder: {config.out}")
            code = max(code, await _run_one(dataclasses.replace(config, baselines=baselines), console, stop))
            await open_agents.pop(0).aclose()
            if stop.is_set():
                return 130
    finally:
        for agent in open_agents:
            await agent.aclose()
        await configs[0].backend.aclose()
    if len(configs) > 1:
        _compare([config.out for config in configs])
    return code


async def check_model(config: EvalConfig) -> None:
    """Make one call to the agent's model, unless the run is finished.

    Raises :class:`~clawgym.errors.EngineError` if the model does not answer.
    """
    from clawgym.engines import Checkable

    if isinstance(config.agent, Checkable) and not _finished(config):
        await config.agent.check()


def _finished(config: EvalConfig) -> bool:
    from clawgym.errors import RunFolderError
    from clawgym.records.run_folder import RunFolder

    try:
        done = RunFolder.read(config.out).done
    except RunFolderError:
        return False
    runnable = [task.id for task in config.task_set.tasks if task.unsupported is None]
    return all(f"{task}#{sample}" in done for task in runnable for sample in range(config.samples))


async def _run_one(config: EvalConfig, console: Console, stop: asyncio.Event) -> int:
    from clawgym.cli._running import resume_command
    from clawgym.evaluation.progress import RichProgress
    from clawgym.evaluation.runner import evaluate

    summary = await evaluate(config, progress=RichProgress(console), stop=stop)
    _show(config, summary)
    if summary.complete:
        return 0
    for cause, count in list(summary.infra_causes.items())[:3]:
        console.say(f"infrastructure error, {count} attempts: {cause}")
    if summary.infra_causes:
        console.say(f"Each has an error.log below {config.out / 'episodes'}.")
    console.say(f"{len(summary.missing)} of {summary.planned} episodes have no result. Resume with:")
    console.say(resume_command())
    return 130 if stop.is_set() else 1


def _compare(runs: Sequence[Path]) -> None:
    """Print the ranking, and compare each other run with the first."""
    from clawgym.console import Console
    from clawgym.errors import ComparisonRefused
    from clawgym.evaluation.compare import compare
    from clawgym.evaluation.terminal import comparison_view
    from clawgym.leaderboards import load_entry, rank, to_view

    console = Console()
    console.print(to_view(rank([load_entry(run) for run in runs], "strict")))
    for other in runs[1:]:
        try:
            console.print(comparison_view(compare(runs[0], other)))
        except ComparisonRefused as error:
            console.say(f"{other} against {runs[0]}: not compared: {error}")


async def baselines_with_progress(task_set: TaskSet, backend: Backend, console: Console) -> dict[str, float]:
    """The no-model baselines of ``task_set``; shows a progress bar while unknown ones are measured."""
    from clawgym.console import progress
    from clawgym.evaluation.baselines import measure_baselines

    with progress(console) as shown:
        bar = shown.add_task("no-model baselines", total=None)
        return await measure_baselines(
            task_set, backend, lambda done, total: shown.update(bar, completed=done, total=total)
        )


def _show(config: EvalConfig, summary: Summary) -> None:
    from clawgym.console import Console
    from clawgym.evaluation.terminal import summary_view

    console = Console()
    label = f"{config.task_set.name} · {config.agent.name}"
    console.print(summary_view(summary, label))
    console.say(f"report: {config.out / 'report.html'}")
