"""The loop of every long run over a task set: what is missing from its ledger is attempted, at the machine's pace.

Invariants: the order of starting is fixed; stopping at any moment loses at most the attempts in flight, and the
same call goes on from there; an infrastructure error is retried, and many in a row of the host or the endpoint end the
run.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from clawgym.evaluation.pacing import Pace
from clawgym.evaluation.progress import Ledger, ProgressView
from clawgym.records import Fault, Outcome, Task
from clawgym.sandbox.machine import Machine

__all__ = ["ATTEMPTS", "Schedule", "finished_writing"]

ATTEMPTS = 3
"""Tries per job while it ends ``infra``."""
_HOPELESS = 12
"""So many attempts in a row that end by an error of the host or the endpoint, and as many as three rounds, stop the
run: something is down."""

Row = Mapping[str, Any]


class JobFunction(Protocol):
    """One try at one job; ``attempt`` counts from 0, those of earlier runs included."""

    async def __call__(self, task: Task, sample: int, attempt: int) -> Row:
        """Returns its row, which is in the folder by then."""
        ...


class Schedule:
    """The jobs of one run: every task once, then every task's second sample, ..."""

    def __init__(
        self,
        folder: Ledger,
        tasks: Sequence[Task],
        attempt: JobFunction,
        progress: ProgressView,
        *,
        samples: int = 1,
        concurrency: int | None = None,
        machine: Machine | None = None,
        retry_seconds: float = 1.0,
    ) -> None:
        self._folder = folder
        self._tasks = tasks
        self._attempt = attempt
        self._progress = progress
        self._samples = samples
        self._retry_seconds = retry_seconds
        self._pace = Pace(max((task.limits.memory_mb for task in tasks), default=1), concurrency, machine)
        self._earlier = Counter(row["key"] for row in folder.rows)
        self._infra_in_a_row = 0
        self._hopeless: str | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Run what is missing. Setting ``stop`` cancels what is in flight; so does cancelling this call."""
        pending = deque(self._missing())
        running: set[asyncio.Task[None]] = set()
        stopped = asyncio.create_task(stop.wait())
        self._progress.start(self._folder, len(pending))
        try:
            while (pending or running) and not stop.is_set():
                if self._hopeless:
                    pending.clear()
                while pending and len(running) < self._pace.limit:
                    running.add(asyncio.create_task(self._job(*pending.popleft())))
                self._progress.running(len(running), self._pace.limit)
                if not running:
                    break
                finished, _ = await asyncio.wait({*running, stopped}, return_when=asyncio.FIRST_COMPLETED)
                for task in finished - {stopped}:
                    running.discard(task)
                    task.result()
        finally:
            stopped.cancel()
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            self._progress.stop(self._hopeless)

    def _missing(self) -> Iterator[tuple[Task, int]]:
        done = self._folder.done
        for sample in range(self._samples):
            for task in self._tasks:
                if task.unsupported is None and f"{task.id}#{sample}" not in done:
                    yield task, sample

    async def _job(self, task: Task, sample: int) -> None:
        earlier = self._earlier[f"{task.id}#{sample}"]
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(self._retry_seconds * 4 ** (attempt - 1))
            round_ = self._pace.round
            row = await self._attempt(task, sample, earlier + attempt)
            self._progress.finished(row)
            if row["outcome"] != Outcome.INFRA:
                self._infra_in_a_row = 0
                self._pace.succeeded()
                return
            if row.get("fault") == Fault.TASK:
                continue  # that task itself is broken: nothing is down, however many such tasks there are
            self._pace.failed(round_)
            self._infra_in_a_row += 1
            if self._infra_in_a_row >= max(_HOPELESS, ATTEMPTS * self._pace.limit):
                self._hopeless = f"{row.get('fault') or 'unknown'}: {row.get('cause') or 'unknown'}"
            if self._hopeless:
                return


async def finished_writing(writing: asyncio.Future[Any]) -> Row:
    """The row of a write that, once begun, is carried to its end also when the run is being stopped."""
    try:
        return await asyncio.shield(writing)
    except asyncio.CancelledError:
        await writing
        raise
