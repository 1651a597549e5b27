"""Asynchronous writes to a pool: one thread writes, and each commit includes everything queued meanwhile.

Invariant: ``append`` returns only when its turn is on disk. An invalid turn does not affect others.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from clawgym.errors import PoolError
from clawgym.pool._store import DatabaseFailure
from clawgym.pool.pool import Pool
from clawgym.records import Image, Turn

__all__ = ["PoolWriter"]

_R = TypeVar("_R")
_WAITING = 256
"""Most requests in the queue; further callers wait, so memory stays bounded."""


@dataclass
class _Job:
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[Any]
    turn: tuple[str, int, Turn] | None = None
    images: Sequence[Image] = ()
    work: Callable[[], Any] | None = None
    result: Any = None
    error: BaseException | None = field(default=None)

    def tell(self) -> None:
        """Wake the caller, which may have been cancelled."""

        def settle() -> None:
            if not self.done.done():
                if self.error is not None:
                    self.done.set_exception(self.error)
                else:
                    self.done.set_result(self.result)

        try:
            self.loop.call_soon_threadsafe(settle)
        except RuntimeError:  # the event loop is closed
            pass


class PoolWriter:
    """Appends turns without blocking the event loop. One per pool and loop; :meth:`aclose` writes the queue."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._room = asyncio.Semaphore(_WAITING)
        self._closed = False
        self._thread = threading.Thread(target=self._write, name="clawgym-pool", daemon=True)
        self._thread.start()

    async def append(self, episode: str, index: int, turn: Turn, images: Sequence[Image] = ()) -> None:
        """Store a turn and its images; returns when they are committed. Raises the errors of :meth:`Pool.append`.

        Cancelling the caller does not undo it.
        """
        await self._ask(turn=(episode, index, turn), images=tuple(images))

    async def run(self, function: Callable[..., _R], *args: Any, **kwargs: Any) -> _R:
        """Run ``function(*args, **kwargs)`` on the writer's thread, after all earlier requests."""
        return await self._ask(work=lambda: function(*args, **kwargs))

    async def aclose(self) -> None:
        """Write the queue and end the thread. The pool stays open."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)

    async def _ask(self, **what: Any) -> Any:
        async with self._room:
            if self._closed:
                raise PoolError(f"{self._pool.name}: this writer is closed: make a new one")
            loop = asyncio.get_running_loop()
            job = _Job(loop, loop.create_future(), **what)
            self._jobs.put(job)
            return await job.done

    def _write(self) -> None:
        while True:
            waiting = [self._jobs.get()]
            while waiting[-1] is not None and len(waiting) < _WAITING:
                try:
                    waiting.append(self._jobs.get_nowait())
                except queue.Empty:
                    break
            turns: list[_Job] = []
            for job in waiting:
                if job is not None and job.turn is not None:
                    turns.append(job)
                    continue
                self._commit(turns)
                turns = []
                if job is None:
                    return
                _attempt(job, job.work)
            self._commit(turns)

    def _commit(self, jobs: list[_Job]) -> None:
        if not jobs:
            return

        def write(some: list[_Job]) -> None:
            shown = {image.sha256: image for job in some for image in job.images}
            self._pool.append([job.turn for job in some if job.turn is not None], images=shown.values())

        try:
            write(jobs)
        except DatabaseFailure as error:  # it would be the same for each request
            for job in jobs:
                job.error = error
                job.tell()
        except Exception:
            for job in jobs:  # the transaction was rolled back: now each by itself
                _attempt(job, lambda job=job: write([job]))
        else:
            for job in jobs:
                job.tell()


def _attempt(job: _Job, work: Callable[[], Any] | None) -> None:
    assert work is not None
    try:
        job.result = work()
    except BaseException as error:
        job.error = error
    job.tell()
