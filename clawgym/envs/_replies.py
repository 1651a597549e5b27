"""Parse actions into assistant messages. Every text is a valid action.

With the format ``message``, an action is the JSON text of an assistant message in OpenAI's form (``content``,
``tool_calls``, ``reasoning_content``); any other text becomes a message without calls. With the name of a parser
(``clawgym list parsers``), it is text with tool calls as such a model samples it. Ids of calls are assigned here, so
that equal actions give equal histories.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from clawgym.engines.protocol import CallDelta, Delta, Image
from clawgym.gateway.calls import Message, Refusal, canonical_messages
from clawgym.gateway.parsers import ReplyParser
from clawgym.gateway.tool_calls import CallParser
from clawgym.registry import did_you_mean, parsers

__all__ = ["deltas_of", "message_of", "parser_of", "reply_of"]


def parser_of(action_format: str) -> CallParser | None:
    """Return the parser for ``action_format``, or None for ``message``. Raises ValueError for an unknown name."""
    if action_format == "message":
        return None
    known = ("message", *parsers.names())
    if action_format not in known and ":" not in action_format:
        raise ValueError(
            f"action_format={action_format!r}: use one of {', '.join(map(repr, known))}, or package.module:Parser."
            f"{did_you_mean(action_format, known)}"
        )
    return parsers.make(action_format)


def reply_of(
    action: str, parser: CallParser | None, tools: Sequence[Mapping[str, Any]], number: int
) -> tuple[Message, int]:
    """Return the message of ``action``, and the number of its malformed calls, which stay text. Never raises.

    The message answers request ``number``, which offered ``tools``. Without ``parser`` the action is the JSON text of a
    message.
    """
    if parser is None:
        message = message_of(action)
        malformed = int(message is None and action.lstrip().startswith("{"))
        message = message or _text_message(action)
    else:
        reply = ReplyParser(parser, tools)
        reply.push(_text_message(action)["content"])
        reply.finish()
        message, malformed = reply.message, reply.malformed
    for n, call in enumerate(message.get("tool_calls", ())):
        call["id"] = f"call{number:06}{n:03}"
    return message, malformed


def deltas_of(message: Message) -> list[Delta]:
    """Return ``message`` in the form in which an engine streams it."""
    calls = message.get("tool_calls", ())
    pieces = [Delta(reasoning=message.get("reasoning_content", ""), text=message["content"] or "")]
    for n, call in enumerate(calls):
        function = call["function"]
        pieces.append(Delta(calls=(CallDelta(n, call["id"], function["name"], function["arguments"]),)))
    return [*pieces, Delta(finish_reason="tool_calls" if calls else "stop")]


def _text_message(text: str) -> Message:
    return canonical_messages([{"role": "assistant", "content": text}], {})[0]


def message_of(action: str) -> Message | None:
    """Return the message in the JSON text ``action``, without ids of its calls, or ``None`` if it is not a message."""
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
