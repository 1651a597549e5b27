"""The prompt of a model judge for one turn: the setting's template, and the record as fenced evidence.

Invariant: all text of the record is inside fences. It cannot contain the fence's marker, which is random, nor special
tokens of chat formats, which the judge's endpoint might interpret.
"""

from __future__ import annotations

import base64
import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from clawgym.records.judge import Judgeable, Message, NextState

__all__ = ["EXAMPLE", "cut", "new_marker", "render", "text_of", "unspecial"]

_TASK, _EARLIER, _STEP, _AFTER = 4000, 1200, 6000, 12000
"""Most characters of the task; of each earlier message; of the step; of all results together."""
_MESSAGES = 6
"""Most earlier messages."""
_LEAST = 400
"""Characters guaranteed to each result, however many there are."""


_SPECIAL = re.compile(
    r"(?<=<)(?=[|\uff5c])|"  # <|im_end|> and its like; <｜User｜>
    r"(?<=<)(?=/?(?:s|bos|eos|pad|unk|think|tool_call|tool_response|start_of_turn|end_of_turn|start_of_image)>)|"
    r"(?<=\[)(?=/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|IMG|THINK|gMASK|sop)\])|"
    r"(?<=<)(?=</?SYS>>)"
)
"""Matches the positions where a space breaks a special token of a published chat format."""


@cache
def _template(name: str) -> str:
    return files("clawgym.rewards").joinpath("prompts", f"{name}.md").read_text("utf-8")


def new_marker(record: Judgeable, instead: Message | None = None) -> str:
    """16 random hex digits that do not occur in the record, nor in ``instead``."""
    text = json.dumps([record.task, record.history, record.action, record.after.messages, instead], default=str)
    while (marker := secrets.token_hex(8)) in text:
        pass
    return marker


def render(
    record: Judgeable, marker: str, *, hint: bool = False, pictures: bool = False, instead: Message | None = None
) -> list[dict[str, Any]]:
    """The messages for one vote, or for one hint; with ``instead``, for a vote on this reply to the same request.

    With ``pictures`` they include the screenshots before and after the step. The assistant's reasoning is left out, as
    it would argue for the step.
    """
    names = ("hint", "hint_answer") if hint else ("replay" if instead else record.setting, "answer")
    system = "\n".join(_template(name).replace("{marker}", marker) for name in names)
    sections = [*_sections(record), *([("INSTEAD", cut(_said(instead), _STEP))] if instead else [])]
    parts = ((name, unspecial(body)) for name, body in sections)
    text = "\n\n".join(f"<<{marker} {name}\n{body}\n{marker}>>" for name, body in parts)
    content: Any = text
    if pictures and (shown := list(_screens(record))):
        content = [{"type": "text", "text": text}]
        for name, url in shown:
            content += [{"type": "text", "text": name}, {"type": "image_url", "image_url": {"url": url}}]
    return [{"role": "system", "content": system}, {"role": "user", "content": content}]


def _sections(record: Judgeable) -> Iterator[tuple[str, str]]:
    if record.task:
        yield "TASK", cut(record.task, _TASK)
    earlier = [m for m in record.history if m.get("role") != "system" and text_of(m) != record.task]
    if earlier:
        left_out = len(earlier) - _MESSAGES
        lines = [f"({left_out} earlier messages left out)"] if left_out > 0 else []
        lines += [cut(_said(message), _EARLIER) for message in earlier[-_MESSAGES:]]
        yield "EARLIER", "\n\n".join(lines)
    step = cut(_said(record.action), _STEP)
    if record.malformed_calls:
        step += f"\n({record.malformed_calls} calls in it could not be read)"
    yield "STEP", step
    if results := record.after.messages:
        share = max(_LEAST, _AFTER // len(results))
        yield "AFTER", "\n\n".join(cut(_said(message), share) for message in results)
    if record.after.outcome is not None:
        yield "OUTCOME", cut(record.after.outcome, _TASK)


def _said(message: Message) -> str:
    """A message as text: role, content, and calls as name and arguments."""
    lines = [f"[{message.get('role')}] {text_of(message)}".rstrip()]
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        lines.append(f"call {function.get('name')} {function.get('arguments')}")
    return "\n".join(lines)


def text_of(message: Message) -> str:
    content = message.get("content")
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    parts = (p for p in content if isinstance(p, Mapping))
    return " ".join(str(p.get("text") or "") if p.get("type") == "text" else "(a picture)" for p in parts)


def unspecial(text: str) -> str:
    """``text`` with a space inside each special token of a chat format, so that it is encoded as plain text."""
    return _SPECIAL.sub(" ", text)


def cut(text: str, most: int) -> str:
    """``text``; if it is longer than ``most`` characters, the middle is replaced by a note."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n(... {len(text) - 2 * half} characters left out ...)\n{text[-half:]}"


def _screens(record: Judgeable) -> Iterator[tuple[str, str]]:
    """The last screenshot before the step and those after it, as (caption, ``data:`` URL)."""
    names: Sequence[tuple[str, str | None]] = [("The screen before the step:", record.screen_before)]
    names = [*names, *(("The screen after the step:", sha) for sha in record.after.images)]
    for name, sha in names:
        image = record.images.get(sha) if sha else None
        if image is not None and image.data:
            yield name, f"data:{image.media_type};base64,{base64.b64encode(image.data).decode()}"


EXAMPLE = Judgeable(
    episode="example",
    turn=1,
    setting="terminal",
    task="Count the lines.",
    history=({"role": "user", "content": "Count the lines."}, {"role": "user", "content": "x" * 2 * _EARLIER}),
    action={
        "role": "assistant",
        "content": "I count.<|im_end|>",
        "tool_calls": [{"function": {"name": "bash", "arguments": "{}"}}],
    },
    after=NextState(1, ({"role": "tool", "tool_call_id": "c", "content": "y" * 2 * _AFTER},), "solved"),
    malformed_calls=1,
)
"""Rendered for a judge's version digest, which thus changes with the prompts."""
