"""A model that is somebody's policy: each request waits here, one after another, until an answer is put in.

Invariants: a request is answered once or not at all; one that its agent has given up leaves the line; who sits at one
session sees the requests of no other.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from clawgym.engines.protocol import Delta
from clawgym.errors import EngineError
from clawgym.gateway.dialects.chat import ChatDialect
from clawgym.gateway.server import Gateway
from clawgym.records import Role

__all__ = ["Asked", "Seat", "Turnstile"]


@dataclass(eq=False)
class Asked:
    """One model request of an episode."""

    number: int
    """From 0, in the order they came."""
    role: Role
    """What the gateway takes it for."""
    body: Mapping[str, Any]
    """A chat-completions request, as engines get it."""
    answer: asyncio.Future[Sequence[Delta]] = field(repr=False)


class Seat:
    """Where the requests of one episode arrive."""

    def __init__(self) -> None:
        self.line: deque[Asked] = deque()
        """Those that wait."""
        self.changed = asyncio.Event()
        """Set when a request has come, and by whoever else wants to be looked at."""
        self.count = 0
        """Requests so far."""

    def answer(self, asked: Asked, deltas: Sequence[Delta]) -> bool:
        """Let the agent go on; whether it still waited."""
        if asked not in self.line:
            return False
        self.line.remove(asked)
        asked.answer.set_result(deltas)
        return True


class Turnstile:
    """A :class:`~clawgym.engines.protocol.TextEngine` of one event loop."""

    name = "policy"

    def __init__(self, context_window: int) -> None:
        self.context_window = context_window
        self.gateway: Gateway | None = None
        """The one whose engine this is: it says what a request is for."""
        self._seats: dict[str, Seat] = {}

    @contextlib.contextmanager
    def taken(self, session: str, seat: Seat) -> Iterator[None]:
        """The requests of ``session`` come to ``seat``."""
        self._seats[session] = seat
        try:
            yield
        finally:
            del self._seats[session]

    async def stream(self, body: Mapping[str, Any], *, session: str = "") -> AsyncIterator[Delta]:
        """See :class:`~clawgym.engines.protocol.TextEngine`."""
        seat = self._seats.get(session)
        if seat is None:
            raise EngineError("nobody answers for this session: its episode is over")
        role = await self._role(body, session)
        asked = Asked(seat.count, role, body, asyncio.get_running_loop().create_future())
        seat.count += 1
        seat.line.append(asked)
        seat.changed.set()
        try:
            for delta in await asked.answer:
                yield delta
        finally:
            if asked in seat.line:
                seat.line.remove(asked)

    async def _role(self, body: Mapping[str, Any], session: str) -> Role:
        known = None if self.gateway is None else await self.gateway.sessions.get(session)
        if self.gateway is None or known is None:
            return "unknown"
        return self.gateway.core.role(known, ChatDialect().call(body, None))

    def identity(self) -> dict[str, Any]:
        """See :class:`~clawgym.engines.protocol.TextEngine`."""
        return {"name": self.name, "context_window": self.context_window}

    async def aclose(self) -> None:
        """See :class:`~clawgym.engines.protocol.TextEngine`."""
