"""Find problems of a chat template by rendering small conversations with it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from clawgym.gateway.calls import Refusal
from clawgym.gateway.parsers import ReplyParser
from clawgym.gateway.template import Template
from clawgym.registry import parsers

__all__ = ["parser_of_calls", "sees_images", "template_problems"]

_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
_SYSTEM: dict[str, Any] = {"role": "system", "content": "word0"}
_ASK: dict[str, Any] = {"role": "user", "content": "word1"}
_THOUGHT: dict[str, Any] = {"role": "assistant", "content": "word2", "reasoning_content": "thought2"}
_ASK_AGAIN: dict[str, Any] = {"role": "user", "content": "word3"}
_CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call00004", "type": "function", "function": {"name": "look", "arguments": {"at": "word4"}}}],
}
_RESULT: dict[str, Any] = {"role": "tool", "tool_call_id": "call00004", "content": "word5"}


def template_problems(template: Template) -> list[str]:
    """Return the problems of ``template`` in words, the worst first; empty if it supports all that agents need."""
    problems: list[str] = []
    for what, messages in (
        ("refuses a plain question", [_ASK]),
        ("refuses system messages", [_SYSTEM, _ASK]),
        ("refuses two user messages in a row", [_ASK, _ASK_AGAIN]),
        ("refuses replies", [_ASK, _THOUGHT, _ASK_AGAIN]),
        ("refuses calls and their results", [_ASK, _CALL, _RESULT]),
    ):
        try:
            text = template(messages, [_TOOL])
        except Refusal as refusal:
            problems.append(f"{what}: {refusal}")
            continue
        problems += [f"drops {name}" for name in _dropped(messages, text)]
    problems += _unstable(template)
    return list(dict.fromkeys(problems))


def _dropped(messages: Sequence[Mapping[str, Any]], text: str) -> list[str]:
    """Return the kinds of content of ``messages`` that are missing in ``text``."""
    dropped = [f"{m['role']} messages" for m in messages if m["content"] and m["content"] not in text]
    if "look" not in text:
        dropped.append("tool definitions")
    if _CALL in messages and "word4" not in text:
        dropped.append("tool calls")
    return dropped


def _unstable(template: Template) -> list[str]:
    """Return problems of a template that renders earlier messages differently when messages are added."""
    found: list[str] = []
    for what, before, after in (
        ("a user message", [_ASK, _THOUGHT], [_ASK_AGAIN]),
        ("a tool's result", [_ASK, _CALL], [_RESULT]),
    ):
        try:
            start = template(before[:-1], [_TOOL])
            short = template(before, [_TOOL], generation=False)
            long = template([*before, *after], [_TOOL])
        except Refusal:
            continue
        if "thought2" in short and "thought2" not in long:
            found.append("drops the reasoning of earlier turns; a continued conversation keeps it")
            short = start
        if not long.startswith(short) or not long.startswith(start):
            found.append(f"changes the conversation before {what}; a continued conversation keeps it unchanged")
    return found


def parser_of_calls(template: Template) -> str | None:
    """Return the name of the first parser that reads a call written by the template, or None if there is none."""
    try:
        text = template([_ASK, _CALL], ())
    except Refusal:
        return None
    for name, calls in parsers.things():
        parser = ReplyParser(calls(), [_TOOL])
        parser.push(text)
        parser.finish()
        if [json.loads(call["function"]["arguments"]) for call in parser.calls] == [{"at": "word4"}]:
            return name
    return None


def sees_images(template: Template) -> bool:
    """Whether the template supports image parts, and does not print them as text."""
    try:
        parts = [{"type": "image"}, {"type": "text", "text": "word1"}]
        shown = template([{"role": "user", "content": parts}], ())
        plain = template([_ASK], ())
    except Refusal:
        return False
    return "word1" in shown and shown != plain and "'type'" not in shown and '"type"' not in shown
