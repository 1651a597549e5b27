"""``clawgym runs``: compare run folders, and grade them again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clawgym.cli._options import Concurrency, JsonFlag, RunPath

if TYPE_CHECKING:
    from clawgym.evaluation.verification import Verification
    from clawgym.records import TaskSet
    from clawgym.records.run_folder import RunFolder

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Compare run folders, grade them again, and trace them.")


@app.command("compare")
def compare_command(
    first: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder to compare with.")],
    second: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder that may be better or worse.")],
    as_json: JsonFlag = False,
) -> None:
    """Compare two runs over the same tasks, paired by task.

    Exit status 0 if the runs could be compared, also if they do not differ significantly. Exit status 2 if the
    comparison is refused: more than 2% infrastructure errors in a run, fewer than six tasks in common, or results that
    contradict their run manifest.
    """
    from clawgym.console import Console
    from clawgym.evaluation.compare import compare
    from clawgym.evaluation.terminal import comparison_view

    comparison = compare(first, second)
    if as_json:
        Console().json(comparison.to_dict())
    else:
        Console().print(comparison_view(comparison))


@app.command("verify")
def verify_command(
    run: RunPath,
    taskset: Annotated[
        str | None,
        typer.Option(metavar="TASKSET", help="The task set of the run: a name or a path. Default: as in the run."),
    ] = None,
    sandbox: Annotated[
        str | None, typer.Option("--sandbox", metavar="NAME", help="Sandbox backend. Default: as in the run.")
    ] = None,
    concurrency: Concurrency = None,
    as_json: JsonFlag = False,
) -> None:
    """Grade the stored workspaces of a run again, without a model, and report each difference with its reason.

    Exit status 0 if all results were reproduced, 1 if one was not or nothing could be graded again, 130 when
    interrupted; the same command resumes. Writes verification.json into the folder; the results are not changed.
    """
    from clawgym.records.run_folder import RunFolder

    folder = RunFolder.read(run)
    raise typer.Exit(asyncio.run(_verify(folder, tasks_of(folder, taskset), sandbox, concurrency, as_json)))


def tasks_of(run: RunFolder, taskset: str | None) -> TaskSet:
    """Load the task set of a run, as it is now. Raises :class:`TaskSetNotFound` or :class:`TaskError`."""
    from clawgym.errors import TaskError, TaskSetNotFound
    from clawgym.tasks import sets

    name = taskset or str(run.manifest.task_set.get("name") or "")
    if not taskset and name.startswith("hf://"):
        name = f"{name}@{run.manifest.task_set.get('version')}"
    try:
        return sets.load(name)
    except (TaskSetNotFound, TaskError) as error:
        if taskset:
            raise
        raise TaskSetNotFound(
            f"the task set of {run.path} ({name or 'unnamed'}) was not found: give its name or folder with --taskset "
            f"({error})"
        ) from error


async def _verify(run: RunFolder, tasks: TaskSet, sandbox: str | None, concurrency: int | None, as_json: bool) -> int:
    from clawgym.cli._running import TaskProgress, stop_on_signals
    from clawgym.console import Console
    from clawgym.evaluation.regrade import regrade
    from clawgym.sandbox import backend as make_backend

    console = Console(stderr=True)
    stop = asyncio.Event()
    stop_on_signals(stop, console.say)
    backend = make_backend(sandbox or str(run.manifest.isolation.get("backend") or "auto"))
    try:
        progress = TaskProgress(console, "grading again", "episodes")
        record = await regrade(run, tasks, backend, concurrency=concurrency, progress=progress, stop=stop)
    finally:
        await backend.aclose()
    _show(record, as_json)
    return 0 if record.agrees else 130 if stop.is_set() else 1


def _show(record: Verification, as_json: bool) -> None:
    from clawgym.console import Console
    from clawgym.evaluation.terminal import verification_lines

    out = Console()
    if as_json:
        out.json(record.to_dict())
        return
    for line in verification_lines(record):
        out.say(line)


@app.command("trace")
def trace_command(
    run: RunPath,
    collector: Annotated[
        str, typer.Option(metavar="URL", help="A collector of OpenTelemetry that takes OTLP over HTTP.")
    ] = "http://127.0.0.1:4318",
) -> None:
    """Send the episodes of a run to an OpenTelemetry collector: sandbox, model calls, tool calls, grading.

    Texts of messages and tools are not sent. Needs the packages opentelemetry-sdk and
    opentelemetry-exporter-otlp-proto-http.
    """
    from clawgym.console import Console
    from clawgym.interop.otel import trace_run

    Console().say(f"{trace_run(run, endpoint=collector)} episodes sent to {collector}")
