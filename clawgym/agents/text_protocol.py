"""The plain-text protocol, for models without tool calls: one ```bash block per reply; ``<submit/>`` ends the episode.

Invariant: :func:`parse_reply` is a pure function, accepts any text without raising, and returns a command exactly as
it is written in the reply.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["HOW_TO", "Command", "MalformedCall", "Submit", "parse_reply"]

HOW_TO = """\
Answer every message in exactly one of two ways.
To run a command, write one fenced block, and nothing that looks like a second one:
```bash
ls -la
```
(If the command itself holds lines of three backticks, fence the block with four.)
To finish, once the task is done, write this marker on a line of its own, without a block:
<submit/>"""

_FENCE = re.compile(r" {0,3}(`{3,})([^`\n]*)")
_SUBMIT = re.compile(r"[ \t]*<submit[ \t]*/>[ \t]*")
_THOUGHT = re.compile(r"\A(?:\s*<think>.*?</think>|(?:(?!<think>).)*?^[ \t]*</think>[ \t]*$)", re.DOTALL | re.MULTILINE)
_BASH = ("bash", "sh", "shell")


@dataclass(frozen=True, slots=True)
class Command:
    """A command for bash."""

    text: str


@dataclass(frozen=True, slots=True)
class Submit:
    """The submit marker. ``message`` is the rest of the reply."""

    message: str


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """Neither of the two. ``why`` is the error message for the model; ``prose``: there was no attempt at a block."""

    why: str
    prose: bool = False


def parse_reply(reply: str) -> Command | Submit | MalformedCall:
    """Parse one reply. A leading ``<think>`` passage and blocks of other languages are ignored."""
    text = _THOUGHT.sub("", reply.replace("\r\n", "\n"), count=1)
    commands: list[str] = []
    prose: list[str] = []
    submits = 0
    lines = text.split("\n")
    at = 0
    while at < len(lines):
        opening = _FENCE.fullmatch(lines[at])
        if opening is None:
            if _SUBMIT.fullmatch(lines[at]):
                submits += 1
            else:
                prose.append(lines[at])
            at += 1
            continue
        fence, language = opening[1], opening[2].strip(" \t")
        end = next((n for n in range(at + 1, len(lines)) if _closes(lines[n], len(fence))), None)
        if end is None:
            return MalformedCall(f"the block opened with {fence}{language} is never closed")
        if language.lower() in _BASH:
            commands.append("\n".join(lines[at + 1 : end]))
        at = end + 1
    if submits and commands:
        return MalformedCall("there is a command and the submit marker: do one of the two")
    if submits:
        return Submit("\n".join(prose).strip())
    if len(commands) > 1:
        return MalformedCall(f"there are {len(commands)} bash blocks: write exactly one")
    if not commands:
        return MalformedCall("there is no bash block and no submit marker", prose=bool(text.strip()))
    if not commands[0].strip():
        return MalformedCall("the bash block is empty")
    return Command(commands[0])


def _closes(line: str, length: int) -> bool:
    stripped = line.strip(" \t")
    return len(stripped) >= length and set(stripped) == {"`"} and len(line) - len(line.lstrip(" ")) <= 3
