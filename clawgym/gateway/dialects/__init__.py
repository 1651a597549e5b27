"""The wire formats that agents speak: translations to :class:`~clawgym.gateway.calls.ChatCall` and back."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, Protocol

from clawgym.engines.protocol import Delta
from clawgym.gateway.calls import ChatCall
from clawgym.gateway.dialects.errors import Failure

__all__ = ["Dialect"]


class Dialect(Protocol):
    """One endpoint that asks the model something. Holds no state."""

    path: str
    """Below ``/s/<session>/v1/``."""
    comment: bytes
    """What keeps a silent stream alive."""

    def call(self, body: Mapping[str, Any], role: str | None) -> ChatCall:
        """The call in a request body. Raises :class:`~clawgym.gateway.calls.Refusal`."""
        ...

    async def whole(self, deltas: AsyncIterator[Delta], call: ChatCall, body: Mapping[str, Any]) -> dict[str, Any]:
        """The whole answer as one body."""
        ...

    def events(self, deltas: AsyncIterator[Delta], call: ChatCall, body: Mapping[str, Any]) -> AsyncGenerator[bytes]:
        """The answer as whole server-sent events, each delta as soon as it comes."""
        ...

    def error(self, failure: Failure) -> dict[str, Any]:
        """The body of an error."""
        ...

    def error_event(self, failure: Failure) -> bytes:
        """An error in the middle of a stream."""
        ...
