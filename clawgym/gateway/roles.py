"""What a model call is for. Only what is shown by the session's own records gets a role; the rest is ``unknown``.

An unmodified agent does not say which of its calls are its own work, a sub-agent's, or a summary of its history. The
evidence used here is in the words: what a call was given that the session had said or been shown before. The rules
know no agent; they were tried with what OpenClaw 2026.4.1 really sends (docs/gateway.md, tests/gateway).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clawgym.gateway.calls import Message, text_of
from clawgym.gateway.stitch import Match, Node, Tree
from clawgym.records import Role

__all__ = ["opening_of", "role_of", "system_of", "told_by"]

TELLING = 24
"""Characters that a text must have to be evidence: shorter ones turn up by chance."""
REACH = 200
"""Characters of a text that are looked for: agents cut long ones at their end."""
AGENTS = ("main", "subagent")
"""Roles of conversations; a compaction is one call."""


def role_of(tree: Tree, match: Match, messages: Sequence[Message], tools: str, declared: str | None) -> Role:
    """The role of a call that continues ``match``.

    What an agent declares can only take away: whoever holds a session's key could declare anything, so where its word
    and the evidence differ, the role is unknown.
    """
    shown = _shown(tree, match, messages, tools)
    return shown if declared in (None, shown) else "unknown"


def _shown(tree: Tree, match: Match, messages: Sequence[Message], tools: str) -> Role:
    """The role that the session's records show.

    That of the turn it continues; the first call's is main. A call that starts anew has the role of the conversation
    that it goes on with (:func:`_goes_on`); a sub-agent's if a call here handed its first request out
    (:func:`_handed_out`); where these differ it is unknown. A compaction is a call without tools that retells
    (:func:`_sums_up`).
    """
    if match.node is not None:
        return match.node.role
    if not tree.roots:
        return "main"
    if not any(root.role == "main" for root in tree.roots):
        return "unknown"
    new = _New.of(messages, tools)
    shown: set[Role] = {root.role for root in tree.roots if root.role in AGENTS and _goes_on(tree, root, new)}
    if _handed_out(tree, new):
        shown.add("subagent")
    if shown:
        return shown.pop() if len(shown) == 1 else "unknown"
    return "compaction" if _sums_up(tree, new) else "unknown"


@dataclass(frozen=True, slots=True)
class _New:
    """A call that continues no turn."""

    tools: str
    system: str
    opening: str
    told: str
    """All system and user messages."""
    replayed: frozenset[tuple[str, ...]]
    """What its assistant messages say."""
    begins: bool
    """Nobody has answered or used a tool in it yet."""

    @staticmethod
    def of(messages: Sequence[Message], tools: str) -> _New:
        told = [m for m in messages if m["role"] in ("system", "user")]
        replies = frozenset(_saying(m) for m in messages if m["role"] == "assistant")
        return _New(
            tools,
            system_of(messages),
            opening_of(messages),
            "\n".join(text_of(m) for m in told),
            replies - {("",)},
            len(told) == len(messages),
        )


def _goes_on(tree: Tree, root: Node, new: _New) -> bool:
    """Whether ``new`` is the conversation of ``root``, with its history rewritten.

    The same agent (system messages, tools) with the same first request, with a summary that a compaction of this
    session wrote, or with replies that this conversation said. Under other system messages or other tools both are
    needed: such a beginning, and replies of this conversation.
    """
    same_agent = root.system == new.system and root.tools == new.tools
    summaries = (node.reply["content"] for node in tree.nodes() if node.role == "compaction")
    alike = bool(new.opening) and new.opening == root.opening
    alike = alike or any(_found(summary, new.told) for summary in summaries)
    if same_agent and alike:
        return True
    if not new.replayed or not (same_agent or (alike and new.tools)):
        return False
    kept = new.replayed & {_saying(node.reply) for node in _below(root)}
    return bool(kept) if alike else any(sum(map(len, said)) >= TELLING for said in kept)


def _handed_out(tree: Tree, new: _New) -> bool:
    """Whether ``new`` begins with a job that a call here gave away: its first request is within an argument of the
    call, or has the whole argument at its end or its beginning."""
    if not new.begins:
        return False
    opening = new.opening.strip()
    for node in tree.nodes():
        for argument in _arguments(node) if node.role in AGENTS else ():
            job = argument.strip()
            if min(len(job), len(opening)) >= TELLING and (
                opening in job or opening.endswith(job) or opening.startswith(job)
            ):
                return True
    return False


def _sums_up(tree: Tree, new: _New) -> bool:
    """Whether ``new`` asks for a summary: without tools, it retells what was said here and what was given. Where the
    same system messages have asked for one before, either is enough: long histories are summed up in parts."""
    if new.tools or not new.begins:
        return False
    known = [node for node in tree.nodes() if node.role != "unknown"]
    said = any(_retold(node, new.told) for node in known)
    given = any(_found(told, new.told) for node in known if node.role in AGENTS for told in node.told)
    if new.system and any(root.role == "compaction" and root.system == new.system for root in tree.roots):
        return said or given
    return said and given


def system_of(messages: Iterable[Message]) -> str:
    """The system messages."""
    return "\n".join(text_of(message) for message in messages if message["role"] == "system")


def opening_of(messages: Iterable[Message]) -> str:
    """The first user message."""
    return next((text_of(message) for message in messages if message["role"] == "user"), "")


def told_by(messages: Iterable[Message]) -> tuple[str, ...]:
    """How the user's messages and the tools' results begin, as far as that is evidence."""
    texts = (text_of(message).strip() for message in messages if message["role"] in ("user", "tool"))
    return tuple(text[:REACH] for text in texts if len(text) >= TELLING)


def _found(said: str | None, text: str) -> bool:
    said = (said or "").strip()
    return len(said) >= TELLING and said[:REACH] in text


def _retold(node: Node, text: str) -> bool:
    if _found(node.reply["content"], text):
        return True
    quoted = ((argument, json.dumps(argument, ensure_ascii=False)[1:-1]) for argument in _arguments(node))
    return any(_found(argument, text) or _found(in_json, text) for argument, in_json in quoted)


def _saying(reply: Mapping[str, Any]) -> tuple[str, ...]:
    """The text and the arguments of a reply, the same however an agent replays them (:mod:`clawgym.gateway.stitch`)."""
    calls = (call["function"]["arguments"] for call in reply.get("tool_calls", ()))
    return (text_of(reply).strip(), *map(_in_order, calls))


def _in_order(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def _below(root: Node) -> Iterator[Node]:
    open_ = [root]
    while open_:
        node = open_.pop()
        yield node
        open_ += node.children


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
