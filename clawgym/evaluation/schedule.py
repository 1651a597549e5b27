"""Run the missing episodes of a task set concurrently, with retries; used by evaluation, audit and regrading.

Invariants:

- Episodes start in a fixed order.
- Stopping at any moment loses at most the attempts in flight. The same call resumes.
- Infrastructure errors are retried. Many in a row from the host or the endpoint end the run.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from clawgym.evaluation.concurrency import ConcurrencyLimit
from clawgym.evaluation.progress import ProgressView, ResultStore
from clawgym.records import Fault, Outcome, Task
from clawgym.sandbox.machine import Machine

__all__ = ["MAX_ATTEMPTS", "AttemptFunction", "Schedule", "finished_writing"]

MAX_ATTEMPTS = 3
"""Attempts at one episode, as long as it ends by an infrastructure error."""
_ABORT_AFTER = 12
"""The run aborts after this many consecutive infrastructure errors of the host or the endpoint, but not before three
times as many as may run at once: the host or the endpoint is down."""

Row = Mapping[str, Any]


class AttemptFunction(Protocol):
    """Makes one attempt at one episode."""

    async def __call__(self, task: Task, sample: int, attempt: int) -> Row:
        """Run the attempt, store its row and return it. ``attempt`` counts from 0, including earlier calls."""
        ...


class Schedule:
    """The episodes of one run: the first sample of every task, then the second sample of every task, and so on."""

    def __init__(
        self,
        store: ResultStore,
        tasks: Sequence[Task],
        attempt: AttemptFunction,
        progress: ProgressView,
        *,
        samples: int = 1,
        concurrency: int | None = None,
        machine: Machine | None = None,
        retry_seconds: float = 1.0,
    ) -> None:
        self._store = store
        self._tasks = tasks
        self._attempt = attempt
        self._progress = progress
        self._samples = samples
        self._retry_seconds = retry_seconds
        memory_mb = max((task.limits.memory_mb for task in tasks), default=1)
        self._concurrency = ConcurrencyLimit(memory_mb, concurrency, machine)
        self._earlier = Counter(row["key"] for row in store.rows)
        self._consecutive_errors = 0
        self._aborted: str | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Run the missing episodes. Setting ``stop`` cancels those in flight; so does cancelling this call."""
        pending = deque(self._missing())
        running: set[asyncio.Task[None]] = set()
        stopped = asyncio.create_task(stop.wait())
        self._progress.start(self._store, len(pending))
        try:
            while (pending or running) and not stop.is_set():
                if self._aborted:
                    pending.clear()
                while pending and len(running) < self._concurrency.limit:
                    running.add(asyncio.create_task(self._run_episode(*pending.popleft())))
                self._progress.running(len(running), self._concurrency.limit)
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
            self._progress.stop(self._aborted)

    def _missing(self) -> Iterator[tuple[Task, int]]:
        done = self._store.done
        for sample in range(self._samples):
            for task in self._tasks:
                if task.unsupported is None and f"{task.id}#{sample}" not in done:
                    yield task, sample

    async def _run_episode(self, task: Task, sample: int) -> None:
        earlier = self._earlier[f"{task.id}#{sample}"]
        for attempt in range(MAX_ATTEMPTS):
            if attempt:
                await asyncio.sleep(self._retry_seconds * 4 ** (attempt - 1))
            round_ = self._concurrency.round
            row = await self._attempt(task, sample, earlier + attempt)
            self._progress.finished(row)
            if row["outcome"] != Outcome.INFRA:
                self._consecutive_errors = 0
                self._concurrency.succeeded()
                return
            if row.get("fault") == Fault.TASK:
                continue  # only this task is broken, so it does not count towards the abort
            self._concurrency.failed(round_)
            self._consecutive_errors += 1
            if self._consecutive_errors >= max(_ABORT_AFTER, MAX_ATTEMPTS * self._concurrency.limit):
                self._aborted = f"{row.get('fault') or 'unknown'}: {row.get('cause') or 'unknown'}"
            if self._aborted:
                return


async def finished_writing(writing: asyncio.Future[Any]) -> Row:
    """Wait for a write and return its row. A write that has begun is completed even if this call is cancelled."""
    try:
        return await asyncio.shield(writing)
    except asyncio.CancelledError:
        await writing
        raise
