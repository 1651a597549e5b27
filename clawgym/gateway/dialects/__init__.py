"""The wire formats that agents speak: translations to :class:`~clawgym.gateway.calls.ChatCall` and back.

>>> from clawgym.gateway.dialects.chat import ChatDialect
>>> class Prompt(ChatDialect):
...     path = "prompt"  # POST /v1/prompt: {"prompt": ...} to {"text": ...}
...
...     def call(self, body, role):
...         return super().call({"messages": [{"role": "user", "content": body.get("prompt")}]}, role)
...
...     async def whole(self, deltas, call, body):
...         return {"text": "".join([delta.text async for delta in deltas])}

docs/registry.md says how it gets a name. A gateway serves all dialects that are known, or those it is given.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, Protocol

from clawgym.engines.protocol import Delta
from clawgym.gateway.calls import ChatCall
from clawgym.gateway.dialects.errors import ApiFailure

__all__ = ["Dialect"]


class Dialect(Protocol):
    """One endpoint that asks the model something. Holds no state, and is made without options.

    Request bodies come from agents and may hold anything: check each field that is read
    (:func:`~clawgym.gateway.calls.request_field`) and refuse with :class:`~clawgym.gateway.calls.Refusal`.
    """

    path: str
    """Below ``/s/<session>/v1/``; no other dialect has the same."""
    count_path: str | None
    """Where the same bodies are sent to count the tokens of their prompt, below the same; None for nowhere."""
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

    def error(self, failure: ApiFailure) -> dict[str, Any]:
        """The body of an error."""
        ...

    def error_event(self, failure: ApiFailure) -> bytes:
        """An error in the middle of a stream."""
        ...
