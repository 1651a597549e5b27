"""What a policy says, as the assistant message that an agent gets. Whatever it says is some message.

``message``: JSON text of an assistant message in OpenAI's form (``content``, ``tool_calls``, ``reasoning_content``);
anything else is said as it stands, as text without calls. ``hermes`` and ``qwen3-coder``: the text as a model of that
call style samples it, read by the parser that the gateway reads models with. Ids of calls are made here, so that the
same actions give the same histories.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from clawgym.engines.protocol import CallDelta, Delta, Image
from clawgym.gateway.calls import Message, Refusal, canonical_messages
from clawgym.gateway.parsers import ReplyParser

__all__ = ["ActionFormat", "deltas_of", "message_of", "reply_of"]

ActionFormat = Literal["message", "hermes", "qwen3-coder"]


def reply_of(action: str, form: ActionFormat, tools: Sequence[Mapping[str, Any]], number: int) -> tuple[Message, int]:
    """The message of ``action`` in answer to request ``number``, which offered ``tools``; and how many calls in it
    were malformed, and stay text. Never raises."""
    if form == "message":
        message = message_of(action)
        malformed = int(message is None and action.lstrip().startswith("{"))
        message = message or _said(action)
    else:
        parser = ReplyParser(form, tools)
        parser.push(_said(action)["content"])
        parser.finish()
        message, malformed = parser.message, parser.malformed
    for n, call in enumerate(message.get("tool_calls", ())):
        call["id"] = f"call{number:06}{n:03}"
    return message, malformed


def deltas_of(message: Message) -> list[Delta]:
    """``message`` as an engine streams it."""
    calls = message.get("tool_calls", ())
    pieces = [Delta(reasoning=message.get("reasoning_content", ""), text=message["content"] or "")]
    for n, call in enumerate(calls):
        function = call["function"]
        pieces.append(Delta(calls=(CallDelta(n, call["id"], function["name"], function["arguments"]),)))
    return [*pieces, Delta(finish_reason="tool_calls" if calls else "stop")]


def _said(text: str) -> Message:
    return canonical_messages([{"role": "assistant", "content": text}], {})[0]


def message_of(action: str) -> Message | None:
    """The message in JSON text, without ids of its calls; ``None`` where it is none."""
    images: dict[str, Image] = {}
    try:
        raw = json.loads(action)
        if not isinstance(raw, dict) or not raw.keys() & {"content", "tool_calls"}:
            return None
        if raw.get("role", "assistant") != "assistant":
            return None
        message = canonical_messages([{**raw, "role": "assistant"}], images)[0]
    except (ValueError, RecursionError, Refusal):
        return None
    return None if images else message
