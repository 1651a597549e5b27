"""Find what a chat template rewrites when a conversation goes on.

A service never renders a stored history again (:mod:`clawgym.gateway.render`): the next prompt is the stored ids and
the new messages. The template's own rendering should be the same ids. Where it is not, the model sees prompts in
service that its template would not make.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from clawgym.gateway.calls import Message, Refusal
from clawgym.gateway.render import Renderer
from clawgym.gateway.template import Template, for_template

__all__ = ["CONVERSATION", "TOOL", "HistoryRewrite", "history_rewrites", "inserts_date", "shows_tools"]

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "list_files",
        "description": "List the files of a folder.",
        "parameters": {"type": "object", "properties": {"folder": {"type": "string"}}, "required": ["folder"]},
    },
}
_SYSTEM: Message = {"role": "system", "content": "Answer in one sentence."}
_CALL: Message = {
    "role": "assistant",
    "content": "",
    "reasoning_content": "I need the names first.",
    "tool_calls": [
        {
            "id": "call00001",
            "type": "function",
            "function": {"name": "list_files", "arguments": '{"folder": "reports"}'},
        }
    ],
}
_RESULT: Message = {"role": "tool", "tool_call_id": "call00001", "content": "march.csv april.csv"}
CONVERSATION: tuple[Message, ...] = (
    {"role": "user", "content": "Which reports are there?"},
    {"role": "assistant", "content": "There are two reports.", "reasoning_content": "They ask for the reports."},
    {"role": "user", "content": "Is the one of March complete?"},
    {"role": "assistant", "content": "Yes, it has 31 days.", "reasoning_content": "I count its days."},
    {"role": "user", "content": "And the one of April?"},
)
"""A conversation of several turns, with reasoning."""
_WITH_CALLS = (CONVERSATION[0], _CALL, _RESULT, *CONVERSATION[1:])
_THOUGHT = re.compile(r"<think>(?:.*?</think>|\s*$)|</think>|\s+", re.DOTALL)
"""Reasoning, and white space, which changes with it."""
_OPENING = "the opening of the reply"
_EXCERPT = 40
"""Most characters of an excerpt."""


@dataclass(frozen=True, slots=True)
class HistoryRewrite:
    """A part of a conversation that is rendered differently once more messages follow."""

    conversation: str
    """In which conversation it was seen."""
    part: str
    """The rewritten part, such as ``user message 1``."""
    before: str
    """An excerpt of the shorter conversation, from the first difference on; empty if only later messages differ."""
    after: str
    """The same place in the longer one."""
    reasoning: bool
    """Whether only the reasoning of earlier replies, or the opening of a reply, is rewritten or dropped."""


def history_rewrites(renderer: Renderer) -> list[HistoryRewrite]:
    """The first rewrite in each of six conversations: with and without a system message, tools, and tool results.

    Conversations that the template refuses are left out (:meth:`Renderer.check` names them), and tool results if it
    shows no tools."""
    found: list[HistoryRewrite] = []
    kinds = [("plain", CONVERSATION, ()), ("with tools", CONVERSATION, (TOOL,))]
    if shows_tools(renderer.template):
        kinds.append(("with tool results", _WITH_CALLS, (TOOL,)))
    for (name, turns, tools), system in product(kinds, (False, True)):
        messages = ((_SYSTEM,) if system else ()) + turns
        name += " and a system message" if system else ""
        first = next(_rewrites(renderer, name, messages, tools), None)
        if first is None:
            continue
        bare = [{k: v for k, v in message.items() if k != "reasoning_content"} for message in messages]
        without = next(_rewrites(renderer, name, bare, tools), None)
        found.append(replace(first, reasoning=True) if without is None or without.reasoning else without)
    return found


def shows_tools(template: Template) -> bool:
    """Whether the template shows the definitions of tools to the model."""
    try:
        return "list_files" in template([dict(CONVERSATION[0])], [TOOL])
    except Refusal:
        return False


def inserts_date(template: Template) -> bool:
    """Whether a rendering depends on the current date."""
    shown: set[str] = set()
    for day in ("first day", "second day"):
        dated = Template(template.source, {**template.variables, "strftime_now": lambda _format, day=day: day})
        try:
            shown |= {dated([dict(CONVERSATION[0])], tools) for tools in ((), (TOOL,))}
        except Refusal:
            continue
    return any("first day" in text for text in shown)


def _rewrites(
    renderer: Renderer, name: str, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
) -> Iterator[HistoryRewrite]:
    """Compare the rendering before each reply with that up to the next one."""
    replies = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    for n, end in zip(replies, [*replies[1:], len(messages)], strict=True):
        before, longer, added = messages[:n], messages[:end], messages[n + 1 : end]
        try:
            start, whole = renderer.prompt(before, tools), renderer.prompt(longer, tools)
            tail = renderer.increment((), added, tools)
            short = renderer.template([for_template(m) for m in before], tools)
            long = renderer.template([for_template(m) for m in longer], tools)
        except Refusal:
            continue
        if whole[: len(start)] != start:
            at = next((i for i, (a, b) in enumerate(zip(short, long, strict=False)) if a != b), len(short))
            opens = at >= len(_alone(renderer, before, tools) or short)
            mild = opens or _THOUGHT.sub("", long).startswith(_THOUGHT.sub("", short))
            part = _OPENING if opens else _part(before, short, at)
            yield HistoryRewrite(name, part, _cut(short, at), _cut(long, at), mild)
        elif whole[len(whole) - len(tail) :] != tail:
            at = long.find(str(added[0]["content"])) if added else 0
            yield HistoryRewrite(name, "what follows a reply", "", _cut(long, max(0, at - _EXCERPT // 2)), False)
        else:
            thought = messages[n].get("reasoning_content", "")
            if thought not in long and thought in _alone(renderer, longer[: n + 1], tools):
                yield HistoryRewrite(name, _title(messages, n), thought, "", True)


def _alone(renderer: Renderer, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> str:
    """The text of a conversation without the opening of a reply; empty if the template refuses it."""
    try:
        return renderer.template([for_template(m) for m in messages], tools, generation=False)
    except Refusal:
        return ""


def _part(messages: Sequence[Message], text: str, at: int) -> str:
    """The message of which ``text[at]`` is a part; its header belongs to it."""
    end = 0
    for n, message in enumerate(messages):
        content = message["content"] or message.get("reasoning_content") or "list_files"
        place = text.find(content, end)
        end = place + len(content) if place >= 0 else end
        if at < end:
            return _title(messages, n)
    return f"the end of {_title(messages, len(messages) - 1)}"


def _title(messages: Sequence[Message], n: int) -> str:
    role = messages[n]["role"]
    count = sum(message["role"] == role for message in messages[: n + 1])
    return {"assistant": f"reply {count}", "system": "the system message", "tool": f"tool result {count}"}.get(
        role, f"{role} message {count}"
    )


def _cut(text: str, at: int) -> str:
    return text[at : at + _EXCERPT]
