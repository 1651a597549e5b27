"""When may a turn start? Room for it, and no change of weights in the middle.

Invariants: never more than ``streams`` turns run, never more than ``waiting`` wait (the next is told to come back:
memory does not grow with load), and they start in the order they came; while weights change no turn runs, those that
ran have ended on the old ones, and those that came meanwhile wait.
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
    """Of one event loop."""

    def __init__(self, *, streams: int, waiting: int) -> None:
        self.streams = streams
        self.waiting = waiting
        self.running = 0
        self._line: deque[asyncio.Future[None]] = deque()
        self._held = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._updating = asyncio.Lock()

    @property
    def queued(self) -> int:
        """How many wait."""
        return len(self._line)

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for room. Raises :class:`~clawgym.gateway.calls.Refusal` (429) where too many wait already."""
        if self._held or self._line or self.running >= self.streams:
            await self._wait()
        else:
            self._start()
        try:
            yield
        finally:
            self._end()

    @contextlib.asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """Let no turn start, wait for those that run, then let the caller change the weights."""
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
        while self._line and not self._held and self.running < self.streams:
            place = self._line.popleft()
            if not place.done():
                self._start()
                place.set_result(None)

    async def _wait(self) -> None:
        if len(self._line) >= self.waiting:
            raise Refusal(
                429,
                f"{self.running} requests are running and {len(self._line)} are waiting: come back in a second",
                code="rate_limit_exceeded",
                retry_after=COME_BACK_SECONDS,
            )
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self._end()  # admitted in the moment it left
            else:
                with contextlib.suppress(ValueError):
                    self._line.remove(place)
            raise
