"""Limit how many turns run at the same time, and hold turns while the weights change.

Invariants: at most ``streams`` turns run and at most ``waiting`` wait. Further ones are refused with 429, so memory
does not grow with load. Turns start in the order of arrival. No turn runs while the weights change: running turns
first end on the old weights, and new ones wait for the new weights.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from clawgym.gateway.calls import Refusal

__all__ = ["Gate"]

COME_BACK_SECONDS = 1.0


class Gate:
    """Admits turns on one event loop.

    Args:
        streams: most turns that run at the same time.
        waiting: most turns that wait.
    """

    def __init__(self, *, streams: int, waiting: int) -> None:
        self.streams = streams
        self.waiting = waiting
        self.running = 0
        self._queue: deque[asyncio.Future[None]] = deque()
        self._held = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._updating = asyncio.Lock()

    @property
    def queued(self) -> int:
        """Number of turns that wait."""
        return len(self._queue)

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait until the turn may run. Raises :class:`~clawgym.gateway.calls.Refusal` (429) if too many wait."""
        if self._held or self._queue or self.running >= self.streams:
            await self._wait()
        else:
            self._start()
        try:
            yield
        finally:
            self._end()

    @contextlib.asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """Hold new turns and wait for the running ones; the caller changes the weights inside."""
        async with self._updating:
            self._held = True
            try:
                await self._idle.wait()
                yield
            finally:
                self._held = False
                self._admit()

    def _start(self) -> None:
        self.running += 1
        self._idle.clear()

    def _end(self) -> None:
        self.running -= 1
        if not self.running:
            self._idle.set()
        self._admit()

    def _admit(self) -> None:
        while self._queue and not self._held and self.running < self.streams:
            slot = self._queue.popleft()
            if not slot.done():
                self._start()
                slot.set_result(None)

    async def _wait(self) -> None:
        if len(self._queue) >= self.waiting:
            raise Refusal(
                429,
                f"{self.running} requests are running and {len(self._queue)} are waiting: try again in a second",
                code="rate_limit_exceeded",
                retry_after=COME_BACK_SECONDS,
            )
        slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(slot)
        try:
            await slot
        except asyncio.CancelledError:
            if slot.done() and not slot.cancelled():
                self._end()  # it was admitted at the same moment
            else:
                with contextlib.suppress(ValueError):
                    self._queue.remove(slot)
            raise
