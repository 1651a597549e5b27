"""Find the stored turn that a history continues. Pure functions and a tree; nothing is tokenized here.

Agents rewrite the history that they send, so rendering it again would not give the sampled ids. A history continues a
stored turn if it equals the messages and the reply of that turn, up to the rewrites below. Each of them leaves no doubt
which sampled ids are meant:

* ``ids``: tool calls have other ids (results are matched by the position of their call);
* ``spacing``: arguments are serialised differently (equal as JSON), or text is stripped at its ends;
* ``alias``: a call has another tool name, with arguments equal as JSON;
* ``repair``: sampled arguments that were not a JSON object have become one, under the same name;
* ``reasoning``: the reasoning is left out;
* ``context``: the user message with which OpenClaw 2026.9 ends each call, and which later calls do not have, is left
  out. It stays in the stored ids, so the model goes on seeing it, as it sees its reasoning.

Text as one string or in parts counts as the same. So does a user message with the line that OpenClaw (2026.4.1) puts
before a sub-agent's report in the history. Any other difference opens a new branch, as does a history that fits stored
turns with different ids equally well.
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from clawgym.gateway.calls import Message
from clawgym.records import Role

__all__ = [
    "UNFINISHED",
    "Match",
    "Node",
    "Tree",
    "message_keys",
    "same_reply",
    "tools_json",
    "tools_key",
    "with_stored_ids",
]

UNFINISHED = frozenset({"aborted", "error"})
"""Finish reasons of turns that cannot be continued: the agent disconnected, or the engine failed."""

_ORIGIN = re.compile(r"\A\[Inter-session message\][^\n]*\n")
_PASSING = re.compile(r"\A<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>.*<<<END_OPENCLAW_INTERNAL_CONTEXT>>>\s*\Z", re.DOTALL)
_PASSING_KEY = b"passing"
"""Start of the keys of messages that later calls may leave out."""

Key = bytes
"""Digest of a message that is not a reply, invariant under the rewrites above."""


def tools_key(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the hex SHA-256 of the tool definitions (:func:`tools_json`), or '' without tools."""
    return hashlib.sha256(tools_json(tools)).hexdigest() if tools else ""


def tools_json(tools: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the tool definitions as stored: tools and keys in their original order, which templates keep."""
    return orjson.dumps(tools)


def message_keys(messages: Sequence[Message]) -> list[Key]:
    """Return one key per message. Keys of assistant messages are empty: :func:`same_reply` compares those."""
    keys: list[Key] = []
    positions: dict[str, int] = {}
    for message in messages:
        role = message["role"]
        if role == "assistant":
            positions = {call["id"]: n for n, call in enumerate(message.get("tool_calls", ()))}
            keys.append(b"")
            continue
        content = message["content"]
        if role == "user" and isinstance(content, str):
            content = _ORIGIN.sub("", content)
        about: list[Any] = [role, content]
        if role == "tool":
            call_id = message["tool_call_id"]
            about.append(positions.get(call_id, call_id))
        text = json.dumps(about) if len(about) > 2 or not isinstance(content, str) else f"{role}\0{content}"
        passing = role == "user" and isinstance(content, str) and _PASSING.match(content)
        keys.append((_PASSING_KEY if passing else b"") + hashlib.blake2b(text.encode(), digest_size=16).digest())
    return keys


def _trimmed(content: Any) -> Any:
    return content.strip() if isinstance(content, str) else (content or "")


def _object(arguments: str) -> dict[str, Any] | None:
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def same_reply(stored: Mapping[str, Any], replayed: Mapping[str, Any]) -> frozenset[str] | None:
    """Return the rewrites from the stored reply to the replayed one, or ``None`` if they are different replies."""
    if stored == replayed:
        return frozenset()
    rewrites: set[str] = set()
    if (stored["content"] or "") != (replayed["content"] or ""):
        if _trimmed(stored["content"]) != _trimmed(replayed["content"]):
            return None
        rewrites.add("spacing")
    thought, shown = stored.get("reasoning_content", ""), replayed.get("reasoning_content", "")
    if thought != shown:
        if shown and shown.strip() != thought.strip():
            return None
        rewrites.add("spacing" if shown else "reasoning")
    mine, theirs = stored.get("tool_calls", ()), replayed.get("tool_calls", ())
    if len(mine) != len(theirs):
        return None
    for sent, shown_call in zip(mine, theirs, strict=True):
        found = _same_call(sent, shown_call)
        if found is None:
            return None
        rewrites |= found
    return frozenset(rewrites)


def _same_call(sent: Mapping[str, Any], shown: Mapping[str, Any]) -> set[str] | None:
    rewrites = {"ids"} if sent["id"] != shown["id"] else set()
    mine, theirs = sent["function"], shown["function"]
    same_name = mine["name"] == theirs["name"]
    if mine["arguments"] == theirs["arguments"]:
        return rewrites if same_name else rewrites | {"alias"}
    meant = _object(mine["arguments"])
    if meant is None:
        return rewrites | {"repair"} if same_name and _object(theirs["arguments"]) is not None else None
    if not _equal_json(meant, _object(theirs["arguments"])):
        return None
    return rewrites | {"spacing"} | (set() if same_name else {"alias"})


def _equal_json(one: Any, other: Any) -> bool:
    """Whether two values are equal as JSON: true is not 1, and numbers are doubles (RFC 8259, section 6)."""
    stack = [(one, other)]
    while stack:
        one, other = stack.pop()
        if isinstance(one, dict) and isinstance(other, dict):
            if one.keys() != other.keys():
                return False
            stack += [(value, other[key]) for key, value in one.items()]
        elif isinstance(one, list) and isinstance(other, list):
            if len(one) != len(other):
                return False
            stack += zip(one, other, strict=True)
        elif not _equal_plain(one, other):
            return False
    return True


def _equal_plain(one: Any, other: Any) -> bool:
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, int | float) and isinstance(other, int | float):
        try:
            return float(one) == float(other)
        except OverflowError:
            return one == other
    return one == other


def with_stored_ids(messages: Sequence[Message], sent: Mapping[str, Any], shown: Mapping[str, Any]) -> list[Message]:
    """Return ``messages`` after a reply, with the results of its calls under the stored ids."""
    pairs = zip(sent.get("tool_calls", ()), shown.get("tool_calls", ()), strict=True)
    ours = {theirs["id"]: mine["id"] for mine, theirs in pairs}
    out: list[Message] = []
    for message in messages:
        if message["role"] == "assistant":
            ours = {}
        if message["role"] == "tool" and message["tool_call_id"] in ours:
            message = {**message, "tool_call_id": ours[message["tool_call_id"]]}
        out.append(message)
    return out


@dataclass(eq=False, slots=True)
class Node:
    """One finished turn."""

    index: int
    parent: Node | None
    keys: tuple[Key, ...]
    """Keys of the messages that are new in this turn."""
    given: tuple[Message | None, ...]
    """For each of ``keys``, the message if it is an assistant's that was not sampled here, else None."""
    reply: Mapping[str, Any]
    tools: str
    role: Role
    ids: array[int]
    """Context and sampled ids of this turn, without those of its parent; empty if unknown."""
    sampled: int
    """Number of sampled ids, at the end of ``ids``."""
    system: str = ""
    """In a root: its system messages."""
    opening: str = ""
    """In a root: its first user message."""
    evidence: tuple[str, ...] = ()
    """Beginnings of the new user messages and tool results (:func:`~clawgym.gateway.roles.evidence_of`)."""
    incomplete: str | None = None
    """The flaw of a turn that was stored without its ids, and of all turns that continue it."""
    children: list[Node] = field(default_factory=list)

    def path(self) -> Iterator[Node]:
        """Yield this node and its ancestors, up to the root."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    def all_ids(self) -> array[int]:
        """Return all ids from the first prompt to the end of this turn's sampled ids."""
        whole = array("i")
        for node in reversed(list(self.path())):
            whole += node.ids
        return whole


@dataclass(frozen=True, slots=True)
class Match:
    """The turn that a history continues. ``node`` is ``None`` for a new branch."""

    node: Node | None
    used: int
    """Number of messages that the node and its ancestors cover, including its reply."""
    rewrites: frozenset[str] = frozenset()
    """The rewrites of the covered messages."""
    ambiguous: bool = False
    """Whether several turns with different ids match, so that none is continued."""


class Tree:
    """The turns of one session."""

    def __init__(self) -> None:
        self.roots: list[Node] = []

    def add(self, node: Node) -> None:
        """Add a finished turn, whose parent (if any) is in the tree."""
        (self.roots if node.parent is None else node.parent.children).append(node)

    def nodes(self) -> Iterator[Node]:
        """Yield all turns, in no particular order."""
        stack = list(self.roots)
        while stack:
            node = stack.pop()
            yield node
            stack += node.children

    def match(self, messages: Sequence[Message], keys: Sequence[Key], tools: str, *, by_ids: bool) -> Match:
        """Return the deepest turn that ``messages`` continue; with ``by_ids`` only turns with known ids."""
        best = [Match(None, 0)]
        stack = [(self.roots, best[0])]
        while stack:
            nodes, before = stack.pop()
            for node in nodes:
                if node.tools != tools or (by_ids and not node.ids):
                    continue
                found = _continues(node, before, messages, keys)
                if found is None:
                    continue
                if found.used > best[0].used:
                    best = [found]
                elif found.used == best[0].used:
                    best.append(found)
                stack.append((node.children, found))
        if len(best) == 1:
            return best[0]
        # A repeated request may get the same reply: turns with the same ids are not ambiguous.
        last = max(best, key=lambda match: match.node.index if match.node else -1)
        ids = [match.node.all_ids() for match in best if match.node]
        return last if all(one == ids[0] for one in ids) else Match(None, 0, ambiguous=True)


def _continues(node: Node, before: Match, messages: Sequence[Message], keys: Sequence[Key]) -> Match | None:
    for left_out in (False, True):
        kept = [n for n, key in enumerate(node.keys) if not (left_out and key.startswith(_PASSING_KEY))]
        start, reply_at = before.used, before.used + len(kept)
        if len(messages) <= reply_at or messages[reply_at]["role"] != "assistant":
            continue
        if list(keys[start:reply_at]) != [node.keys[n] for n in kept]:
            continue
        given = [node.given[n] for n in kept]
        if any(one is not None and one != messages[start + offset] for offset, one in enumerate(given)):
            continue
        rewrites = same_reply(node.reply, messages[reply_at])
        if rewrites is not None:
            if left_out:
                rewrites |= {"context"}
            return Match(node, reply_at + 1, before.rewrites | rewrites)
    return None
