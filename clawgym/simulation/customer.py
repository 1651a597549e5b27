"""User ``customer``: a model that plays a customer by a prompt, or a script in its place."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from clawgym.engines.openai import OpenAIEngine
from clawgym.engines.protocol import Engine, Sampling
from clawgym.errors import AgentError
from clawgym.records import ToolCall, UserTurn
from clawgym.registry import users

__all__ = ["BASE_URL", "KEY", "MODEL", "SCRIPT", "Customer"]

MODEL, BASE_URL, KEY = "CLAWGYM_USER_MODEL", "CLAWGYM_USER_BASE_URL", "CLAWGYM_USER_API_KEY"
"""Environment variables: the model that speaks for customers, its endpoint and its key. The latter two default to
``OPENAI_BASE_URL`` and ``OPENAI_API_KEY``, which are used together or not at all."""
SCRIPT = "script"
"""The value of :data:`MODEL` with which the script speaks: for tests and reference solutions, not for scores."""
_MOST_CALLS = 20
"""Most replies with tool calls before the customer says something."""


@users.register("customer")
class Customer:
    """A customer with a goal; the model and its endpoint are set by CLAWGYM_USER_MODEL and CLAWGYM_USER_BASE_URL.

    Args:
        prompt: the system prompt of the model.
        stops: words that end the conversation when the customer says them.
        script: what is said in place of a model: objects with ``text`` and ``calls``, which are made first.

    Raises:
        AgentError: CLAWGYM_USER_MODEL is not set.
    """

    def __init__(self, prompt: str, stops: list[str], script: list[dict[str, Any]]) -> None:
        self._model = os.environ.get(MODEL, "")
        if not self._model:
            raise AgentError(
                f"the customer of this task needs a model: set {MODEL} (and {BASE_URL}, {KEY} where it is not at "
                f"OpenAI), or {MODEL}={SCRIPT} to try tasks without one"
            )
        self._stops, self._script = tuple(stops), list(script)
        self._messages: list[dict[str, Any]] = [{"role": "system", "content": prompt}]

    @staticmethod
    def speaker() -> str:
        """The model that speaks, for run manifests."""
        return os.environ.get(MODEL, "")

    async def answer(self, message: str, tools: Any = None) -> UserTurn | None:
        """What the model or the script says next, after the calls it makes."""
        text = await (self._scripted(tools) if self._model == SCRIPT else self._asked(message, tools))
        return None if text is None or any(stop in text for stop in self._stops) else UserTurn(text)

    async def _scripted(self, tools: Any) -> str | None:
        if not self._script:
            return None
        line = self._script.pop(0)
        for number, call in enumerate(line.get("calls", ())):
            await tools.call_all([ToolCall(f"user_{number}", call["name"], call["arguments"])])
        return str(line["text"])

    async def _asked(self, message: str, tools: Any) -> str:
        self._messages.append({"role": "user", "content": message})
        engine = self._engine()
        try:
            for _ in range(_MOST_CALLS):
                schemas = () if tools is None else tools.schemas
                completion = await engine.complete(self._messages, tools=schemas, sampling=Sampling(temperature=0.0))
                if tools is None or not completion.tool_calls:
                    break
                results = await tools.call_all(completion.tool_calls)
                self._messages.append(_called(completion.tool_calls))
                for call, seen in zip(completion.tool_calls, results, strict=True):
                    self._messages.append({"role": "tool", "tool_call_id": call.id, "content": seen.content})
            else:
                return self._stops[0] if self._stops else ""
        finally:
            await engine.aclose()
        self._messages.append({"role": "assistant", "content": completion.text})
        return completion.text

    def _engine(self) -> Engine:
        url = os.environ.get(BASE_URL) or None
        # A key of another endpoint is not sent to this one: "none" where it was given without a key.
        return OpenAIEngine(self._model, base_url=url, api_key=os.environ.get(KEY) or ("none" if url else None))


def _called(calls: Sequence[ToolCall]) -> dict[str, Any]:
    made = [
        {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": json.dumps(dict(c.arguments))}}
        for c in calls
    ]
    return {"role": "assistant", "content": None, "tool_calls": made}
