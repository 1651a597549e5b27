"""What a model call is for. Only what is shown by the session's own records gets a role; the rest is ``unknown``.

An unmodified agent does not say which of its calls are its own work, a sub-agent's, or a summary of its history. The
evidence used here is in the words: what a call was given that the session had said before.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from clawgym.gateway.calls import Message
from clawgym.gateway.stitch import Match, Node, Tree
from clawgym.records import Role

__all__ = ["opening_of", "role_of", "system_of"]

TELLING = 24
"""Characters that a text must have to be evidence: shorter ones turn up by chance."""


def role_of(tree: Tree, match: Match, messages: Sequence[Message], tools: str, declared: str | None) -> Role:
    """The role of a call that continues ``match``.

    What an agent declares can only take away: whoever holds a session's key could declare anything, so where its word
    and the evidence differ, the role is unknown.
    """
    shown = _shown(tree, match, messages, tools)
    return shown if declared in (None, shown) else "unknown"


def _shown(tree: Tree, match: Match, messages: Sequence[Message], tools: str) -> Role:
    """The role that the session's records show.

    That of the turn it continues; the first call's is main. A call that starts anew is main if it is the same agent
    (system messages, tools) with the same first request, or with a summary that a compaction of this session wrote; a
    sub-agent's if its first request was an argument of a tool call here; a compaction if it has no tools and retells
    the first request and something that was said or done since.
    """
    if match.node is not None:
        return match.node.role
    if not tree.roots:
        return "main"
    first = next((root for root in tree.roots if root.role == "main"), None)
    if first is None:
        return "unknown"
    text = "\n".join(_text(message) for message in messages)
    opening = opening_of(messages)
    if first.tools == tools and first.system == system_of(messages):
        summaries = (node.reply["content"] for node in tree.nodes() if node.role == "compaction")
        return "main" if opening == first.opening or any(_found(said, text) for said in summaries) else "unknown"
    if any(_found(opening, argument) for node in tree.nodes() for argument in _arguments(node)):
        return "subagent"
    if not tools and _found(first.opening, text) and any(_retold(node, text) for node in tree.nodes()):
        return "compaction"
    return "unknown"


def system_of(messages: Sequence[Message]) -> str:
    """The system messages."""
    return "\n".join(_text(message) for message in messages if message["role"] == "system")


def opening_of(messages: Sequence[Message]) -> str:
    """The first user message."""
    return next((_text(message) for message in messages if message["role"] == "user"), "")


def _text(message: Message) -> str:
    content = message["content"]
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


def _found(said: str | None, text: str) -> bool:
    said = (said or "").strip()
    return len(said) >= TELLING and said in text


def _retold(node: Node, text: str) -> bool:
    return _found(node.reply["content"], text) or any(_found(argument, text) for argument in _arguments(node))


def _arguments(node: Node) -> Iterator[str]:
    """Every string in the arguments of a turn's calls."""
    open_: list[Any] = []
    for call in node.reply.get("tool_calls", ()):
        try:
            open_.append(json.loads(call["function"]["arguments"]))
        except (ValueError, RecursionError):
            continue
    while open_:
        value = open_.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            open_ += value.values()
        elif isinstance(value, list):
            open_ += value
