"""Shared by commands with long runs: Ctrl-C, the command that resumes, and progress over tasks."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clawgym.console import Console
    from clawgym.evaluation.progress import ResultStore

__all__ = ["TaskProgress", "resume_command", "stop_on_signals"]


def resume_command() -> str:
    """The command line of this process: running it again resumes."""
    return "  clawgym " + shlex.join(sys.argv[1:])


def stop_on_signals(stop: asyncio.Event, say: Callable[[str], None]) -> None:
    """The first Ctrl-C (or SIGTERM) sets ``stop``; a second exits at once."""
    loop = asyncio.get_running_loop()

    def ask() -> None:
        if stop.is_set():  # the sandboxes end with this process
            os._exit(130)
        say("Stopping: closing the sandboxes (press Ctrl-C again to exit at once) ...")
        stop.set()

    for name in (signal.SIGINT, signal.SIGTERM):
        try:
            loop.add_signal_handler(name, ask)
        except (NotImplementedError, RuntimeError, ValueError):
            pass


class TaskProgress:
    """A progress bar on a terminal; elsewhere a line for every tenth of the work.

    Implements :class:`~clawgym.evaluation.progress.ProgressView`.

    Args:
        doing: description shown with the bar, such as ``auditing``.
        unit: plural name of what is counted, such as ``tasks``.
    """

    def __init__(self, console: Console, doing: str, unit: str = "tasks") -> None:
        from clawgym.console import progress

        self._console = console
        self._bar = progress(console)
        self._doing, self._unit = doing, unit
        self._task = self._bar.add_task(doing, total=None)
        self._done = self._total = self._infra = 0
        self._began = time.monotonic()

    def start(self, store: ResultStore, to_run: int) -> None:
        self._done = sum(key in store.done for key in store.latest)
        self._total = self._done + to_run
        if self._done:
            self._console.say(f"Resuming: {self._done} of {self._total} {self._unit} are done.")
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
            errors = f", {self._infra} infrastructure errors" if self._infra else ""
            seconds = time.monotonic() - self._began
            self._console.say(f"{self._doing}: {self._done}/{self._total} {self._unit}, {seconds:.0f} s{errors}")

    def stop(self, aborted: str | None) -> None:
        self._bar.stop()
        if aborted:
            from clawgym.evaluation.progress import stopped_text

            self._console.say(stopped_text(aborted), style="bold red")
