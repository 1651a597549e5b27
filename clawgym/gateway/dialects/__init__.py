"""Wire formats of agents, and their translation to :class:`~clawgym.gateway.calls.ChatCall` and back.

>>> from clawgym.gateway.dialects.chat import ChatDialect
>>> class Prompt(ChatDialect):
...     path = "prompt"  # POST /v1/prompt: {"prompt": ...} to {"text": ...}
...
...     def call(self, body, role):
...         return super().call({"messages": [{"role": "user", "content": body.get("prompt")}]}, role)
...
...     async def whole(self, deltas, call, body):
...         return {"text": "".join([delta.text async for delta in deltas])}

docs/reference/registry.md shows how to register it. A gateway serves all registered dialects, or those in
``dialects=``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, Protocol

from clawgym.engines.protocol import Delta
from clawgym.gateway.calls import ChatCall
from clawgym.gateway.dialects.errors import ApiFailure

__all__ = ["Dialect"]


class Dialect(Protocol):
    """The wire format of one endpoint for model calls. It has no state and is made without arguments.

    Request bodies come from agents and may contain anything: check each field that is read
    (:func:`~clawgym.gateway.calls.request_field`) and refuse with :class:`~clawgym.gateway.calls.Refusal`. The module
    has an example.
    """

    path: str
    """Path of the endpoint below ``/s/<session>/v1/``; unique among dialects."""
    stream_path: str | None
    """Path of an endpoint that takes the same bodies and always streams, or None: the field ``stream`` of a body then
    says whether its response is streamed."""
    count_path: str | None
    """Path of an endpoint that counts the prompt tokens of the same bodies, or None."""
    comment: bytes
    """Sent in regular intervals to keep a stream alive."""

    def call(self, body: Mapping[str, Any], role: str | None) -> ChatCall:
        """Parse a request body. ``role`` is the header ``x-clawgym-role``.

        Raises :class:`~clawgym.gateway.calls.Refusal` for an invalid or unsupported request.
        """
        ...

    async def whole(self, deltas: AsyncIterator[Delta], call: ChatCall, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the response as one JSON body."""
        ...

    def events(self, deltas: AsyncIterator[Delta], call: ChatCall, body: Mapping[str, Any]) -> AsyncGenerator[bytes]:
        """Yield the response as complete server-sent events, for each delta as soon as it arrives."""
        ...

    def error(self, failure: ApiFailure) -> dict[str, Any]:
        """Return the body of an error response."""
        ...

    def error_event(self, failure: ApiFailure) -> bytes:
        """Return the event for an error in the middle of a stream."""
        ...
