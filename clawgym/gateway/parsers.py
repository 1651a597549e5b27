"""Parse the streamed text of a reply into reasoning, content and tool calls.

Invariants:

- The message does not depend on how the text was split.
- Text and reasoning are passed on at once, except what may be the beginning of a marker, and spaces that a marker may
  follow.
- A call is passed on only when it is complete and valid, because agents repair and run incomplete calls.
- A malformed or incomplete call stays text, exactly as sampled, and is counted.

Spaces next to a marker belong to the marker: reasoning and content do not include them, and the content of a reply with
only calls is ``None``. Spaces between two texts with a call in between are kept. ``<think>`` opens reasoning only at
the start of a reply. Markers inside reasoning are part of the reasoning.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from clawgym.engines.protocol import CallDelta, Delta
from clawgym.gateway.tool_calls import CallParser

__all__ = ["ReplyParser", "StopStrings"]

_THINK, _END_THINK = "<think>", "</think>"
_CHUNK = 4096
"""Characters that are parsed at a time, so that text which is read again is not copied as a whole."""
_ARGUMENTS_CHUNK = 16384
"""Most characters of arguments in one delta."""
_MALFORMED = (ValueError, LookupError, TypeError, RecursionError)
"""What a parser raises for a malformed call."""


class ReplyParser:
    """Parses one reply.

    Args:
        call_parser: the parser of the model's tool calls; with None, calls are text.
        tools: the tools of the request; without tools, calls are text.
        reasoning: whether the prompt has opened the reasoning, so that the reply begins inside it.
    """

    def __init__(
        self, call_parser: CallParser | None, tools: Sequence[Mapping[str, Any]] = (), *, reasoning: bool = False
    ) -> None:
        self._call_parser = call_parser if tools else None
        self._open, self._close = (call_parser.open, call_parser.close) if call_parser and tools else ("", "")
        self._tools = tools
        self._state = self._in_reasoning if reasoning else self._at_start
        self._work: deque[str] = deque()
        """Text that is not parsed yet."""
        self._carry = ""
        """Text that cannot be classified yet."""
        self._space: list[str] = []
        """Spaces that are held until the next text or marker."""
        self._at_marker = reasoning
        """Whether there was a marker since the last text."""
        self._text: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._raw: list[str] = []
        self._out: list[Delta] = []
        self.malformed = 0
        """Number of malformed or incomplete calls."""

    def push(self, text: str) -> list[Delta]:
        """Parse ``text`` and return what it adds to the message."""
        self._work.extend(text[at : at + _CHUNK] for at in range(0, len(text), _CHUNK))
        return self._run()

    def finish(self) -> list[Delta]:
        """End the reply and return what was held back."""
        while self._state == self._in_call:
            self._reject_call("")  # the call is incomplete
            self._out = self._run()
        rest, self._carry = self._carry, ""
        if self._state == self._in_reasoning:
            self._add_reasoning(rest)
        else:
            self._add_text(rest)
        if not self._at_marker:
            self._emit_text("".join(self._space))
        out, self._out = self._out, []
        return out

    def _run(self) -> list[Delta]:
        while self._work:
            text, self._carry = self._carry + self._work.popleft(), ""
            while text:
                text = self._state(text)
        out, self._out = self._out, []
        return out

    @property
    def content(self) -> str | None:
        """The text without reasoning and calls, or None."""
        return "".join(self._text) or None

    @property
    def reasoning(self) -> str | None:
        """The reasoning, or None."""
        return "".join(self._thoughts) or None

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The complete calls in chat form: ``id``, ``type``, ``function`` (``name``, ``arguments`` as JSON text)."""
        return self._calls

    @property
    def message(self) -> dict[str, Any]:
        """The assistant message in canonical chat form."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self._thoughts:
            message["reasoning_content"] = self.reasoning
        if self._calls:
            message["tool_calls"] = list(self._calls)
        return message

    # Each state parses some text and returns the rest. Text that it cannot classify yet goes to ``_carry``.

    def _at_start(self, text: str) -> str:
        body = text.lstrip()
        self._space.append(text[: len(text) - len(body)])
        if body.startswith(_THINK):
            self._mark()
            self._state = self._in_reasoning
            return body[len(_THINK) :]
        if _THINK.startswith(body):
            self._carry = body
            return ""
        self._state = self._in_text
        return body

    def _in_reasoning(self, text: str) -> str:
        end = text.find(_END_THINK)
        if end < 0:
            whole = len(text) - _partial_marker(text, _END_THINK)
            self._add_reasoning(text[:whole])
            self._carry = text[whole:]
            return ""
        self._add_reasoning(text[:end])
        self._space.clear()
        self._mark()
        self._state = self._in_text
        return text[end + len(_END_THINK) :]

    def _in_text(self, text: str) -> str:
        if self._call_parser is None:
            self._add_text(text)
            return ""
        start = text.find(self._open)
        if start < 0:
            whole = len(text) - _partial_marker(text, self._open)
            self._add_text(text[:whole])
            self._carry = text[whole:]
            return ""
        self._add_text(text[:start])
        self._raw = [self._open]
        self._scanner = self._call_parser.scanner()
        self._state = self._in_call
        return text[start + len(self._open) :]

    def _in_call(self, text: str) -> str:
        try:
            end = self._scanner.feed(text)
        except _MALFORMED:
            return self._reject_call(text)
        self._raw.append(text[:end])
        if end is None:
            return ""
        try:
            assert self._call_parser is not None
            body = "".join(self._raw)[len(self._open) : -len(self._close)]
            name, arguments = self._call_parser.read(body, self._tools)
        except _MALFORMED:
            return self._reject_call(text[end:])
        self._state = self._in_text
        self._mark()
        self._add_call(name, arguments)
        return text[end:]

    def _in_broken(self, text: str) -> str:
        """The rest of a malformed call, up to its end marker."""
        end = text.find(self._close)
        if end < 0:
            whole = len(text) - _partial_marker(text, self._close)
            self._add_text(text[:whole])
            self._carry = text[whole:]
            return ""
        self._add_text(text[: end + len(self._close)])
        self._state = self._in_text
        return text[end + len(self._close) :]

    def _reject_call(self, rest: str) -> str:
        """Parse the call again as text; ``rest`` follows it."""
        self.malformed += 1
        self._work.extendleft(reversed((*self._raw, rest)))
        self._state = self._in_broken
        return ""

    def _mark(self) -> None:
        self._at_marker = True
        if not self._text:
            self._space.clear()

    def _add_text(self, text: str) -> None:
        body = text.strip()
        if not body:
            self._space.append(text)
            return
        start = text.index(body)
        space = "".join(self._space) + text[:start]
        self._emit_text(body if self._at_marker and not self._text else space + body)
        self._space[:] = [text[start + len(body) :]]
        self._at_marker = False

    def _emit_text(self, text: str) -> None:
        if text:
            self._text.append(text)
            self._out.append(Delta(text=text))

    def _add_reasoning(self, text: str) -> None:
        body = text.strip()
        if not body:
            self._space.append(text)
            return
        start = text.index(body)
        said = "".join(self._space) + text[:start] + body if self._thoughts else body
        self._space[:] = [text[start + len(body) :]]
        self._thoughts.append(said)
        self._out.append(Delta(reasoning=said))

    def _add_call(self, name: str, arguments: str) -> None:
        # Only letters and digits: some agents strip other characters, and results would not match.
        call_id = f"call{secrets.token_hex(12)}"
        index = len(self._calls)
        self._calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})
        self._out.append(Delta(calls=(CallDelta(index, call_id, name),)))
        for at in range(0, len(arguments), _ARGUMENTS_CHUNK):
            self._out.append(Delta(calls=(CallDelta(index, arguments=arguments[at : at + _ARGUMENTS_CHUNK]),)))


def _partial_marker(text: str, marker: str) -> int:
    """Return how many characters at the end of ``text`` may be the beginning of ``marker``."""
    at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while at >= 0 and not marker.startswith(text[at:]):
        at = text.find(marker[0], at + 1)
    return len(text) - at if at >= 0 else 0


class StopStrings:
    """Cuts streamed text before the first complete stop string; holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [(stop, _borders(stop)) for stop in dict.fromkeys(stops) if stop]
        self._matched = [0] * len(self._stops)
        self._held = ""
        self.met: str | None = None
        """The stop string that was found, or None."""

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text that is certain, and whether a stop string was found; all later text is dropped."""
        if self.met is not None:
            return "", True
        if not self._stops:
            return text, False
        held = len(self._held)
        text = self._held + text
        for end in range(held, len(text)):
            char = text[end]
            found = 0
            for n, (stop, borders) in enumerate(self._stops):
                matched = self._matched[n]
                while matched and stop[matched] != char:
                    matched = borders[matched - 1]
                matched += stop[matched] == char
                if matched == len(stop):
                    found = max(found, matched)
                    matched = borders[matched - 1]
                self._matched[n] = matched
            if found:
                self._held = ""
                self.met = text[end + 1 - found : end + 1]
                return text[: end + 1 - found], True
        sure = len(text) - max(self._matched)
        self._held = text[sure:]
        return text[:sure], False

    def finish(self) -> str:
        """Return the text that was held back."""
        held, self._held = self._held, ""
        return held


def _borders(text: str) -> list[int]:
    """Return for each prefix the length of its longest border (Knuth, Morris and Pratt, 1977)."""
    borders = [0] * len(text)
    for end in range(1, len(text)):
        matched = borders[end - 1]
        while matched and text[matched] != text[end]:
            matched = borders[matched - 1]
        borders[end] = matched + (text[matched] == text[end])
    return borders
