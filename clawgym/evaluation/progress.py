"""Show the progress of a run: a live panel on a terminal, a line from time to time elsewhere.

Invariant: showing progress never changes the run. Task ids and causes are printed as plain text.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from clawgym import statistics
from clawgym.evaluation.summary import cause, error_origin, errors_text, strict
from clawgym.records import Outcome
from clawgym.visible import visible

if TYPE_CHECKING:
    from rich.console import RenderableType

    from clawgym.console import Console

__all__ = ["NoProgress", "ProgressView", "ResultStore", "RichProgress", "duration", "stopped_text"]


_CAUSE = 200
"""How many characters of the newest infrastructure error are shown."""


class ResultStore(Protocol):
    """Holds the result rows of a run over a task set, such as a :class:`~clawgym.records.run_folder.RunFolder`."""

    @property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        """All rows, one per attempt, in the order in which they were written."""
        ...

    @property
    def latest(self) -> Mapping[str, Mapping[str, Any]]:
        """The last row of each episode, by key."""
        ...

    @property
    def done(self) -> Container[str]:
        """Keys of the episodes that need no further attempt."""
        ...


class ProgressView(Protocol):
    """Receives the progress of a run from :class:`~clawgym.evaluation.schedule.Schedule`."""

    def start(self, store: ResultStore, to_run: int) -> None:
        """The run starts: ``to_run`` episodes are missing, the others are in ``store``."""
        ...

    def running(self, now: int, limit: int) -> None:
        """``now`` episodes are running; at most ``limit`` may."""
        ...

    def finished(self, row: Mapping[str, Any]) -> None:
        """One attempt ended, and its row is stored."""
        ...

    def stop(self, aborted: str | None) -> None:
        """The run ends. ``aborted`` is the cause if it ends early, after too many infrastructure errors in a row."""
        ...


class NoProgress:
    """Shows nothing."""

    def start(self, store: ResultStore, to_run: int) -> None: ...

    def running(self, now: int, limit: int) -> None: ...

    def finished(self, row: Mapping[str, Any]) -> None: ...

    def stop(self, aborted: str | None) -> None: ...


def duration(seconds: float) -> str:
    """Format a duration: ``95`` -> ``1m35s``."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"


def stopped_text(cause: str) -> str:
    """The message for a run that aborted itself; shows the last line of ``cause``."""
    last = (cause.strip().splitlines() or ["unknown"])[-1]
    return (
        f"Stopped: too many infrastructure errors in a row ({last}). Fix the cause, then run the same command again "
        "to resume."
    )


class RichProgress:
    """Shows a live panel on a terminal; elsewhere prints a line for every tenth of the run, or every ``every``
    seconds."""

    def __init__(self, console: Console, *, every: float = 15.0) -> None:
        self._console = console
        self._every = every
        self._live = None
        self._by_task: dict[str, list[float]] = defaultdict(list)
        self._causes: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        """Infrastructure errors by origin."""
        self._newest = ""
        """The last infrastructure error."""
        self._attempts = self._unsupported = self._ran = self._running = self._limit = 0
        self._total = self._to_run = 0
        self._began = self._printed = time.monotonic()

    def start(self, store: ResultStore, to_run: int) -> None:
        for row in store.latest.values():
            if row["outcome"] != Outcome.INFRA:
                self._count(row)
        self._attempts = 0
        self._ran = 0
        self._to_run = to_run
        self._total = to_run + self._done
        self._began = self._printed = time.monotonic()
        if self._done:
            self._console.say(f"Resuming: {self._done} of {self._total} episodes are done.")
        if self._console.is_terminal and to_run:
            from rich.live import Live

            self._live = Live(get_renderable=self._panel, console=self._console, refresh_per_second=4, transient=True)
            self._live.start()

    def running(self, now: int, limit: int) -> None:
        self._running, self._limit = now, limit

    def finished(self, row: Mapping[str, Any]) -> None:
        self._count(row)
        if self._live is None:
            now, step = time.monotonic(), max(1, self._total // 10)
            if self._ran == self._to_run or self._ran % step == 0 or now - self._printed > self._every:
                self._printed = now
                self._console.say(self._line())

    def stop(self, aborted: str | None) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        if aborted:
            self._console.say(stopped_text(aborted), style="bold red")

    @property
    def _done(self) -> int:
        return sum(map(len, self._by_task.values())) + self._unsupported

    def _count(self, row: Mapping[str, Any]) -> None:
        if row["outcome"] == Outcome.UNSUPPORTED:
            self._unsupported += 1
            self._ran += 1
            return
        self._attempts += 1
        if row["outcome"] == Outcome.INFRA:
            self._errors[error_origin(row)] += 1
            self._newest = f"{error_origin(row)}: {row.get('cause') or 'unknown'}"
            return
        self._ran += 1
        self._by_task[row["task_id"]].append(strict(row))
        if strict(row) < 1:
            self._causes[cause(row)] += 1

    def _score(self) -> str:
        estimate = statistics.rate(list(self._by_task.values()))
        if estimate is None:
            return "strict -"
        return f"strict {100 * estimate.value:.1f}% [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"

    def _left(self) -> str:
        if not self._ran:
            return "-"
        return duration((time.monotonic() - self._began) / self._ran * (self._to_run - self._ran))

    def _line(self) -> str:
        parts = [f"{self._done}/{self._total}", self._score(), f"{self._running} running", f"{self._left()} left"]
        if self._errors:
            parts.append(f"{errors_text(self._errors)}, newest: {visible(self._newest[:_CAUSE])}")
        if self._causes:
            parts.append("not solved: " + self._top_causes())
        return "  ".join(parts)

    def _top_causes(self) -> str:
        return ", ".join(f"{count} {visible(why[:40])}" for why, count in self._causes.most_common(4))

    def _panel(self) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        bar = Table.grid(padding=(0, 2))
        bar.add_row(
            ProgressBar(total=max(1, self._total), completed=self._done, width=36),
            Text(f"{self._done}/{self._total}", style="bold"),
            Text(self._score(), style="cyan"),
            Text(f"{self._left()} left", style="dim"),
        )
        facts = f"{self._running} running (at most {self._limit} now)"
        if self._unsupported:
            facts += f" · {self._unsupported} unsupported"
        lines = [bar, Text(facts, style="dim")]
        if self._errors:
            lines.append(Text(f"{errors_text(self._errors)} in {self._attempts} attempts; the newest:", style="red"))
            lines.append(Text(f"  {visible(self._newest[:_CAUSE])}", style="red"))
        if self._causes:
            lines.append(Text(f"not solved: {self._top_causes()}", style="yellow"))
        return Group(*lines)
