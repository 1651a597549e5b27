"""An engine whose replies come from a policy: each model request waits until the environment gets an action for it.

Invariants: a request is answered at most once. A request that its agent has cancelled leaves the queue. A queue gets
only the requests of its own session.
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

__all__ = ["ModelRequest", "PolicyEngine", "RequestQueue"]


@dataclass(eq=False)
class ModelRequest:
    """One model request of an episode."""

    number: int
    """Index of the request in its episode, from 0."""
    role: Role
    """What the call is for, according to the gateway."""
    body: Mapping[str, Any]
    """The chat-completions request, as engines get it."""
    answer: asyncio.Future[Sequence[Delta]] = field(repr=False)


class RequestQueue:
    """The model requests of one episode."""

    def __init__(self) -> None:
        self.waiting: deque[ModelRequest] = deque()
        """Requests without an answer, in the order of arrival."""
        self.changed = asyncio.Event()
        """Set when a request arrives, and when the episode ends."""
        self.count = 0
        """Number of requests so far."""

    def answer(self, request: ModelRequest, deltas: Sequence[Delta]) -> bool:
        """Answer a request. Returns whether the agent still waited for it."""
        if request not in self.waiting:
            return False
        self.waiting.remove(request)
        request.answer.set_result(deltas)
        return True


class PolicyEngine:
    """A :class:`~clawgym.engines.protocol.TextEngine` whose replies come from the queues' owners, on one event loop."""

    name = "policy"

    def __init__(self, context_window: int) -> None:
        self.context_window = context_window
        self.gateway: Gateway | None = None
        """The gateway that uses this engine; it determines the role of a request."""
        self._queues: dict[str, RequestQueue] = {}

    @contextlib.contextmanager
    def serving(self, session: str, queue: RequestQueue) -> Iterator[None]:
        """Put the requests of ``session`` into ``queue``."""
        self._queues[session] = queue
        try:
            yield
        finally:
            del self._queues[session]

    async def stream(self, body: Mapping[str, Any], *, session: str = "") -> AsyncIterator[Delta]:
        """See :class:`~clawgym.engines.protocol.TextEngine`."""
        queue = self._queues.get(session)
        if queue is None:
            raise EngineError("the episode of this session is over: reset the environment")
        role = await self._role(body, session)
        request = ModelRequest(queue.count, role, body, asyncio.get_running_loop().create_future())
        queue.count += 1
        queue.waiting.append(request)
        queue.changed.set()
        try:
            for delta in await request.answer:
                yield delta
        finally:
            if request in queue.waiting:
                queue.waiting.remove(request)

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
