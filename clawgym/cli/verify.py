"""``clawgym verify``: grade the stored workspaces of a run again."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clawgym.cli.eval import stop_on_signals

if TYPE_CHECKING:
    from clawgym.console import Console
    from clawgym.evaluation.progress import Ledger
    from clawgym.evaluation.verify import Verification
    from clawgym.records import TaskSet
    from clawgym.records.run_folder import RunFolder

__all__ = ["verify_command"]


def verify_command(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    bench: Annotated[str | None, typer.Option(help="Where its tasks are: a name or a path; that of the run.")] = None,
    backend: Annotated[str | None, typer.Option(help="Sandbox; that of the run by default.")] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Most gradings at once.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Grade the stored workspaces of a run again, without a model, and say what comes out otherwise, and why.

    Ends with 0 when all agrees, 1 when something does not (or nothing could be graded again), 130 when interrupted; the
    same command goes on. What is found is written to verification.json in the folder; the results are not touched.
    """
    from clawgym.records.run_folder import RunFolder

    folder = RunFolder.read(run)
    raise typer.Exit(asyncio.run(_run(folder, tasks_of(folder, bench), backend, concurrency, as_json)))


def tasks_of(run: RunFolder, bench: str | None) -> TaskSet:
    """The tasks of the run as they are now. Raises :class:`TaskSetNotFound` or :class:`TaskError` with what to do."""
    from clawgym.errors import TaskError, TaskSetNotFound
    from clawgym.tasks import sets

    name = bench or str(run.receipt.task_set.get("name") or "")
    try:
        return sets.load(name)
    except (TaskSetNotFound, TaskError) as error:
        if bench:
            raise
        raise TaskSetNotFound(
            f"the tasks of {run.path} ({name or 'unnamed'}) are not found: name them, or the folder they are in, with "
            f"--bench ({error})"
        ) from error


async def _run(run: RunFolder, task_set: TaskSet, backend: str | None, concurrency: int | None, as_json: bool) -> int:
    from clawgym.console import Console
    from clawgym.evaluation.verify import verify
    from clawgym.sandbox import backend as make_backend

    console = Console(stderr=True)
    stop = asyncio.Event()
    stop_on_signals(stop, console.say)
    made = make_backend(backend or str(run.receipt.isolation.get("backend") or "auto"))
    try:
        record = await verify(run, task_set, made, concurrency=concurrency, progress=_Progress(console), stop=stop)
    finally:
        await made.aclose()
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


class _Progress:
    """A bar on a terminal, else a line every tenth; see :class:`~clawgym.evaluation.progress.ProgressView`."""

    def __init__(self, console: Console) -> None:
        from clawgym.console import progress

        self._console = console
        self._bar = progress(console)
        self._task = self._bar.add_task("grading again", total=None)
        self._total = self._done = 0

    def start(self, folder: Ledger, to_run: int) -> None:
        self._total = to_run
        self._bar.update(self._task, total=to_run)
        if self._console.is_terminal:
            self._bar.start()

    def running(self, now: int, limit: int) -> None: ...

    def finished(self, row: Mapping[str, Any]) -> None:
        self._done += 1
        self._bar.advance(self._task)
        if not self._console.is_terminal and self._done % max(1, self._total // 10) == 0:
            self._console.say(f"graded again: {self._done}/{self._total}")

    def stop(self, hopeless: str | None) -> None:
        self._bar.stop()
        if hopeless:
            from clawgym.evaluation.progress import stopped_text

            self._console.say(stopped_text(hopeless), style="bold red")
