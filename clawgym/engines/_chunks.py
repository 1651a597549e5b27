"""Reading the chunks of a streamed chat completion without trusting them.

Invariant: no chunk raises, and no string that comes out holds a lone surrogate.
"""

from __future__ import annotations

from typing import Any

from clawgym.engines._chat import count_of, storable
from clawgym.engines.protocol import CallDelta, Delta
from clawgym.records import Usage

__all__ = ["Chunks"]


class Chunks:
    """What one stream has brought so far."""

    def __init__(self) -> None:
        self.finish_reason: str | None = None
        self.usage: Usage | None = None
        """As reported, in the last chunk or with the finish reason."""
        self.any = False
        """Whether a piece of the answer came."""

    def take(self, chunk: Any) -> Delta | None:
        """The piece in ``chunk`` (an object of the client, whose fields may be anything); None without one."""
        self.usage = _usage(getattr(chunk, "usage", None)) or self.usage
        choices = getattr(chunk, "choices", None)
        choice = choices[0] if isinstance(choices, list) and choices else None
        delta = getattr(choice, "delta", None)
        reason = getattr(choice, "finish_reason", None)
        if isinstance(reason, str) and reason:
            self.finish_reason = "tool_calls" if reason == "function_call" else reason
        text = _text(delta, "content") + _text(delta, "refusal")
        reasoning = _text(delta, "reasoning_content") or _text(delta, "reasoning")
        raw = getattr(delta, "tool_calls", None)
        calls = tuple(_call(item, n) for n, item in enumerate(raw if isinstance(raw, list) else ()))
        if not (text or reasoning or calls):
            return None
        self.any = True
        return Delta(text, reasoning, calls)


def _text(owner: Any, name: str) -> str:
    value = getattr(owner, name, None)
    return storable(value) if isinstance(value, str) else ""


def _call(raw: Any, position: int) -> CallDelta:
    index = getattr(raw, "index", None)  # some endpoints leave it out
    function = getattr(raw, "function", None)
    index = index if isinstance(index, int) and index >= 0 else position
    return CallDelta(index, _text(raw, "id") or None, _text(function, "name") or None, _text(function, "arguments"))


def _usage(raw: Any) -> Usage | None:
    details = getattr(raw, "prompt_tokens_details", None)
    prompt, completion = (
        count_of(getattr(raw, "prompt_tokens", None)),
        count_of(getattr(raw, "completion_tokens", None)),
    )
    if prompt is None or completion is None:
        return None
    return Usage(prompt, completion, count_of(getattr(details, "cached_tokens", None)) or 0)
