"""A gateway session as an engine in this process, without HTTP.

Invariant: the recorded turns are the same as for the same requests over HTTP.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from clawgym.engines.chat import Problem, parse_completion
from clawgym.engines.protocol import Completion, Sampling
from clawgym.errors import EngineError
from clawgym.gateway.calls import Refusal
from clawgym.gateway.dialects.chat import ChatDialect
from clawgym.gateway.request import SessionCredentials
from clawgym.gateway.server import Gateway

__all__ = ["SessionEngine"]


class SessionEngine:
    """An :class:`~clawgym.engines.protocol.Engine` for agents that run in this process, such as the tool loop."""

    name = "gateway"

    def __init__(self, gateway: Gateway, opened: SessionCredentials) -> None:
        self._gateway = gateway
        self._opened = opened
        self._dialect = ChatDialect()

    async def complete(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = (), sampling: Sampling
    ) -> Completion:
        """See :class:`~clawgym.engines.protocol.Engine`.

        Raises:
            EngineError: also if the gateway refuses the request, with the status that an HTTP client would get.
        """
        given = {field.name: getattr(sampling, field.name) for field in fields(sampling)}
        body: dict[str, Any] = {name: value for name, value in given.items() if value not in (None, ())}
        body |= {"messages": list(messages), "model": self._gateway.model}
        if tools:
            body["tools"] = list(tools)
        if "stop" in body:
            body["stop"] = list(body["stop"])
        try:
            call = self._dialect.call(body, None)
            session = await self._gateway.sessions.find(self._opened.id, self._opened.secret)
            with session.handled():
                async with contextlib.aclosing(self._gateway.core.answer(session, call)) as deltas:
                    whole = await self._dialect.whole(deltas, call, body)
        except Refusal as error:
            raise EngineError(str(error), status=error.status) from error
        found = parse_completion(whole)
        assert not isinstance(found, Problem)  # the dialect's own output is valid
        return found[0]

    def identity(self) -> dict[str, Any]:
        """Return the identity of the engine behind the gateway."""
        return dict(self._gateway.engine.identity())

    async def aclose(self) -> None:
        """Do nothing: the caller that opened the session closes it."""
