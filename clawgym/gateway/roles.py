"""Determine what a model call is for: the main agent, a sub-agent or a compaction. Uncertain calls are ``unknown``.

An unmodified agent does not say which of its calls are its own work, a sub-agent's, or a summary of its history. The
rules here use only the session's records: texts of a call that occurred before in the session. They are not specific to
an agent, and were tested with the requests of OpenClaw 2026.4.1 (docs/concepts/exact-tokens.md, tests/gateway).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clawgym.gateway.calls import Message, text_of
from clawgym.gateway.stitch import Match, Node, Tree
from clawgym.records import Role

__all__ = ["belongs", "evidence_of", "opening_of", "role_of", "system_of"]

MIN_EVIDENCE = 24
"""Fewest characters of a text that counts as evidence: shorter ones occur by chance."""
MAX_EVIDENCE = 200
"""Most characters of a text that are searched for: agents truncate long texts."""
AGENTS = ("main", "subagent")
"""Roles of conversations; a compaction is a single call."""


def role_of(tree: Tree, match: Match, messages: Sequence[Message], tools: str, declared: str | None) -> Role:
    """Return the role of a call that continues ``match``.

    The role that an agent declares can only downgrade a call to ``unknown``, if it differs from the evidence: any
    program with the session's key could declare anything.
    """
    shown = _evident_role(tree, match, messages, tools)
    return shown if declared in (None, shown) else "unknown"


def belongs(tree: Tree, match: Match, messages: Sequence[Message], tools: str) -> bool:
    """Whether a call comes from the conversation of this session, for callers that have several sessions.

    A call that continues no turn does if it is a sub-agent's or a compaction, if it has a rewritten history with
    replies of this session or with a summary of it, or if it quotes the session, as requests for a title do. A call
    that only begins like this conversation may be the first of another one.
    """
    if match.node is not None or not tree.roots:
        return match.node is not None
    role = _evident_role(tree, match, messages, tools)
    if role == "main":
        return _replays(tree, messages) or _summary_occurs(tree, _input_text(messages))
    if role == "unknown" and all(message["role"] != "assistant" for message in messages):
        return all(_quoted(tree, _input_text(messages)))
    return role != "unknown"


def _evident_role(tree: Tree, match: Match, messages: Sequence[Message], tools: str) -> Role:
    """Return the role according to the session's records.

    A call that continues a turn has the role of the turn; the first call is ``main``. A call that starts a new branch
    has the role of the conversation that it continues (:func:`_continues_conversation`), or is a sub-agent's if an
    earlier call delegated its first request (:func:`_is_delegated`); if these differ it is unknown. A call without
    tools that repeats the history is a compaction (:func:`_is_compaction`).
    """
    if match.node is not None:
        return match.node.role
    if not tree.roots:
        return "main"
    if not any(root.role == "main" for root in tree.roots):
        return "unknown"
    new = _NewCall.of(messages, tools)
    shown: set[Role] = {
        root.role for root in tree.roots if root.role in AGENTS and _continues_conversation(tree, root, new)
    }
    if _is_delegated(tree, new):
        shown.add("subagent")
    if shown:
        return shown.pop() if len(shown) == 1 else "unknown"
    return "compaction" if _is_compaction(tree, new) else "unknown"


@dataclass(frozen=True, slots=True)
class _NewCall:
    """A call that does not continue a turn."""

    tools: str
    system: str
    opening: str
    text: str
    """The text of all system and user messages."""
    replayed: frozenset[tuple[str, ...]]
    """Its assistant messages, normalized."""
    begins: bool
    """Whether it has only system and user messages."""

    @staticmethod
    def of(messages: Sequence[Message], tools: str) -> _NewCall:
        replies = frozenset(_normalized(m) for m in messages if m["role"] == "assistant")
        return _NewCall(
            tools,
            system_of(messages),
            opening_of(messages),
            _input_text(messages),
            replies - {("",)},
            all(m["role"] in ("system", "user") for m in messages),
        )


def _input_text(messages: Sequence[Message]) -> str:
    return "\n".join(text_of(message) for message in messages if message["role"] in ("system", "user"))


def _continues_conversation(tree: Tree, root: Node, new: _NewCall) -> bool:
    """Whether ``new`` is the conversation of ``root`` with a rewritten history.

    This holds for the same agent (system messages and tools) with the same first request, with a summary from a
    compaction of this session, or with replies of this conversation. With other system messages or tools, both such a
    beginning and replies of this conversation are required.
    """
    same_agent = root.system == new.system and root.tools == new.tools
    alike = bool(new.opening) and new.opening == root.opening
    alike = alike or _summary_occurs(tree, new.text)
    if same_agent and alike:
        return True
    if not new.replayed or not (same_agent or (alike and new.tools)):
        return False
    kept = new.replayed & {_normalized(node.reply) for node in _descendants(root)}
    return bool(kept) if alike else any(sum(map(len, said)) >= MIN_EVIDENCE for said in kept)


def _summary_occurs(tree: Tree, text: str) -> bool:
    return any(_occurs_in(node.reply["content"], text) for node in tree.nodes() if node.role == "compaction")


def _replays(tree: Tree, messages: Sequence[Message]) -> bool:
    """Whether a reply of this session is in the history, apart from case, spacing and punctuation."""
    said = {_letters(message) for message in messages if message["role"] == "assistant"} - {""}
    return any(_letters(node.reply) in said for node in tree.nodes())


def _letters(reply: Mapping[str, Any]) -> str:
    return "".join(c for part in _normalized(reply) for c in part.casefold() if c.isalnum())


def _quoted(tree: Tree, text: str) -> tuple[bool, bool]:
    """Whether a text repeats replies, and inputs, of this session."""
    known = [node for node in tree.nodes() if node.role != "unknown"]
    said = any(_reply_occurs_in(node, text) for node in known)
    given = any(_occurs_in(part, text) for node in known if node.role in AGENTS for part in node.evidence)
    return said, given


def _is_delegated(tree: Tree, new: _NewCall) -> bool:
    """Whether ``new`` begins with a request from an argument of an earlier tool call.

    Its first user message is part of the argument, or begins or ends with the whole argument.
    """
    if not new.begins:
        return False
    opening = new.opening.strip()
    for node in tree.nodes():
        for argument in _arguments(node) if node.role in AGENTS else ():
            job = argument.strip()
            if min(len(job), len(opening)) >= MIN_EVIDENCE and (
                opening in job or opening.endswith(job) or opening.startswith(job)
            ):
                return True
    return False


def _is_compaction(tree: Tree, new: _NewCall) -> bool:
    """Whether ``new`` asks for a summary: it has no tools, and repeats both replies and inputs of this session.

    If a compaction with the same system messages came before, either is enough: long histories are summarized in parts.
    """
    if new.tools or not new.begins:
        return False
    said, given = _quoted(tree, new.text)
    if new.system and any(root.role == "compaction" and root.system == new.system for root in tree.roots):
        return said or given
    return said and given


def system_of(messages: Iterable[Message]) -> str:
    """Return the text of the system messages."""
    return "\n".join(text_of(message) for message in messages if message["role"] == "system")


def opening_of(messages: Iterable[Message]) -> str:
    """Return the text of the first user message."""
    return next((text_of(message) for message in messages if message["role"] == "user"), "")


def evidence_of(messages: Iterable[Message]) -> tuple[str, ...]:
    """Return the beginnings of user messages and tool results that are long enough to be evidence."""
    texts = (text_of(message).strip() for message in messages if message["role"] in ("user", "tool"))
    return tuple(text[:MAX_EVIDENCE] for text in texts if len(text) >= MIN_EVIDENCE)


def _occurs_in(said: str | None, text: str) -> bool:
    said = (said or "").strip()
    return len(said) >= MIN_EVIDENCE and said[:MAX_EVIDENCE] in text


def _reply_occurs_in(node: Node, text: str) -> bool:
    if _occurs_in(node.reply["content"], text):
        return True
    quoted = ((argument, json.dumps(argument, ensure_ascii=False)[1:-1]) for argument in _arguments(node))
    return any(_occurs_in(argument, text) or _occurs_in(in_json, text) for argument, in_json in quoted)


def _normalized(reply: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the text and arguments of a reply in a form that does not change when an agent replays them."""
    calls = (call["function"]["arguments"] for call in reply.get("tool_calls", ()))
    return (text_of(reply).strip(), *map(_in_order, calls))


def _in_order(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def _descendants(root: Node) -> Iterator[Node]:
    stack = [root]
    while stack:
        node = stack.pop()
        yield node
        stack += node.children


def _arguments(node: Node) -> Iterator[str]:
    """Yield every string in the arguments of a turn's calls."""
    stack: list[Any] = []
    for call in node.reply.get("tool_calls", ()):
        try:
            stack.append(json.loads(call["function"]["arguments"]))
        except (ValueError, RecursionError):
            continue
    while stack:
        value = stack.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            stack += value.values()
        elif isinstance(value, list):
            stack += value
