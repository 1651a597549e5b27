"""Parse the untrusted chunks of a streamed chat completion.

Invariant: no chunk raises, except when the reply becomes too long, and no returned string contains a lone surrogate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clawgym.engines.chat import ReplyCounter, count_of, storable
from clawgym.engines.protocol import CallDelta, Delta
from clawgym.records import Usage

__all__ = ["Chunks"]


class Chunks:
    """The state of one stream."""

    def __init__(self) -> None:
        self.finish_reason: str | None = None
        self.usage: Usage | None = None
        """The reported usage, from the last chunk or the one with the finish reason."""
        self.any = False
        """Whether any piece of the answer arrived."""
        self._reply = ReplyCounter()

    def take(self, chunk: Mapping[str, Any]) -> Delta | None:
        """Parse ``chunk``, whose fields may be anything. Returns its piece of the answer; None without one.

        Raises :class:`~clawgym.errors.BudgetExceeded` if the reply becomes too long.
        """
        self.usage = _usage(chunk.get("usage")) or self.usage
        choices = chunk.get("choices")
        choice = _object(choices[0]) if isinstance(choices, list) and choices else {}
        delta = _object(choice.get("delta"))
        reason = choice.get("finish_reason")
        if isinstance(reason, str) and reason:
            self.finish_reason = "tool_calls" if reason == "function_call" else reason
        text = _text(delta, "content") + _text(delta, "refusal")
        reasoning = _text(delta, "reasoning_content") or _text(delta, "reasoning")
        raw = delta.get("tool_calls")
        calls = tuple(_call(_object(item), n) for n, item in enumerate(raw if isinstance(raw, list) else ()))
        if not (text or reasoning or calls):
            return None
        self.any = True
        call_size = sum(len(call.id or "") + len(call.name or "") + len(call.arguments) for call in calls)
        self._reply.add(len(text) + len(reasoning) + call_size, (call.index for call in calls))
        return Delta(text, reasoning, calls)


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(owner: Mapping[str, Any], name: str) -> str:
    value = owner.get(name)
    return storable(value) if isinstance(value, str) else ""


def _call(raw: Mapping[str, Any], position: int) -> CallDelta:
    index = raw.get("index")  # some endpoints leave it out
    function = _object(raw.get("function"))
    index = index if isinstance(index, int) and index >= 0 else position
    return CallDelta(index, _text(raw, "id") or None, _text(function, "name") or None, _text(function, "arguments"))


def _usage(raw: Any) -> Usage | None:
    raw = _object(raw)
    prompt, completion = count_of(raw.get("prompt_tokens")), count_of(raw.get("completion_tokens"))
    if prompt is None or completion is None:
        return None
    return Usage(prompt, completion, count_of(_object(raw.get("prompt_tokens_details")).get("cached_tokens")) or 0)
