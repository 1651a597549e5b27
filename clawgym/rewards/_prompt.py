"""What a model is shown of one turn: the setting's template, and the record as fenced evidence.

Invariant: nothing of the record stands outside a fence; no text of the record holds the fence's marker, which nobody
who wrote it could know, or a special token of a chat format, which the judge's endpoint might read as one.
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

from clawgym.rewards.states import Judgeable, Message, NextState

__all__ = ["EXAMPLE", "cut", "new_marker", "render", "unspecial"]

_TASK, _EARLIER, _STEP, _AFTER = 4000, 1200, 6000, 12000
"""Most characters of each; of each earlier message; of all results together, which share them."""
_MESSAGES = 6
"""Earlier messages that are shown."""
_LEAST = 400
"""Characters that each of many results has at least."""


_SPECIAL = re.compile(
    r"(?<=<)(?=[|\uff5c])|"  # <|im_end|> and its like; <｜User｜>
    r"(?<=<)(?=/?(?:s|bos|eos|pad|unk|think|tool_call|tool_response|start_of_turn|end_of_turn|start_of_image)>)|"
    r"(?<=\[)(?=/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|IMG|THINK|gMASK|sop)\])|"
    r"(?<=<)(?=</?SYS>>)"
)
"""Where a space breaks a special token of a published chat format."""


@cache
def _template(name: str) -> str:
    return files("clawgym.rewards").joinpath("prompts", f"{name}.md").read_text("utf-8")


def new_marker(asked: Judgeable) -> str:
    """16 hex digits at random that are nowhere in the record."""
    record = json.dumps([asked.task, asked.history, asked.action, asked.after.messages], default=str)
    while (marker := secrets.token_hex(8)) in record:
        pass
    return marker


def render(asked: Judgeable, marker: str, *, hint: bool = False, pictures: bool = False) -> list[dict[str, Any]]:
    """The messages for one vote, or for one hint; with ``pictures``, the screens before and after go with them.

    The assistant's reasoning is not shown: it would plead for the step."""
    names = ("hint", "hint_answer") if hint else (asked.setting, "answer")
    system = "\n".join(_template(name).replace("{marker}", marker) for name in names)
    parts = ((name, unspecial(body)) for name, body in _sections(asked))
    text = "\n\n".join(f"<<{marker} {name}\n{body}\n{marker}>>" for name, body in parts)
    content: Any = text
    if pictures and (shown := list(_screens(asked))):
        content = [{"type": "text", "text": text}]
        for name, url in shown:
            content += [{"type": "text", "text": name}, {"type": "image_url", "image_url": {"url": url}}]
    return [{"role": "system", "content": system}, {"role": "user", "content": content}]


def _sections(asked: Judgeable) -> Iterator[tuple[str, str]]:
    if asked.task:
        yield "TASK", cut(asked.task, _TASK)
    earlier = [m for m in asked.history if m.get("role") != "system" and _text(m) != asked.task]
    if earlier:
        left_out = len(earlier) - _MESSAGES
        lines = [f"({left_out} earlier messages left out)"] if left_out > 0 else []
        lines += [cut(_said(message), _EARLIER) for message in earlier[-_MESSAGES:]]
        yield "EARLIER", "\n\n".join(lines)
    step = cut(_said(asked.action), _STEP)
    if asked.malformed_calls:
        step += f"\n({asked.malformed_calls} calls in it could not be read)"
    yield "STEP", step
    if results := asked.after.messages:
        share = max(_LEAST, _AFTER // len(results))
        yield "AFTER", "\n\n".join(cut(_said(message), share) for message in results)
    if asked.after.outcome is not None:
        yield "OUTCOME", cut(asked.after.outcome, _TASK)


def _said(message: Message) -> str:
    """Who says what, with calls as name and arguments."""
    lines = [f"[{message.get('role')}] {_text(message)}".rstrip()]
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        lines.append(f"call {function.get('name')} {function.get('arguments')}")
    return "\n".join(lines)


def _text(message: Message) -> str:
    content = message.get("content")
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    parts = (p for p in content if isinstance(p, Mapping))
    return " ".join(str(p.get("text") or "") if p.get("type") == "text" else "(a picture)" for p in parts)


def unspecial(text: str) -> str:
    """``text`` with a space in each special token of a chat format."""
    return _SPECIAL.sub(" ", text)


def cut(text: str, most: int) -> str:
    """Both ends of a long text."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n(... {len(text) - 2 * half} characters left out ...)\n{text[-half:]}"


def _screens(asked: Judgeable) -> Iterator[tuple[str, str]]:
    """The last picture before the step, and those after it, as ``data:`` URLs."""
    names: Sequence[tuple[str, str | None]] = [("The screen before the step:", asked.screen_before)]
    names = [*names, *(("The screen after the step:", sha) for sha in asked.after.images)]
    for name, sha in names:
        image = asked.images.get(sha) if sha else None
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
"""Rendered for a judge's digest: it changes when what a judge is shown changes."""
