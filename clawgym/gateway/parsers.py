"""The text of a reply to reasoning, content and tool calls, as it comes.

Invariants: the message does not depend on how the text was cut into pieces; text and reasoning are passed on at once,
but for what may be the beginning of a marker and for spaces that a marker may follow; a call is passed on when it has
closed and is valid, never before, because agents repair and execute halves; a call that is malformed or unfinished is
text, exactly as it was sampled, and is counted.

Spaces next to a marker belong to the marker: reasoning and content come without them, and the content of a reply that
only calls is ``None``. Between two texts with a call in the middle they stay. ``<think>`` opens reasoning only as the
first thing of a reply; markers inside reasoning are reasoning.
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
"""Characters that are looked at together: what is read again must not be copied whole each time."""
_FRAGMENT = 16384
"""Characters of arguments in one delta."""
_MALFORMED = (ValueError, LookupError, TypeError, RecursionError)
"""What a parser raises for what is no call."""


class ReplyParser:
    """Reads one reply. Without ``tools`` or ``call_parser``, calls are text."""

    def __init__(
        self, call_parser: CallParser | None, tools: Sequence[Mapping[str, Any]] = (), *, reasoning: bool = False
    ) -> None:
        self._call_parser = call_parser if tools else None
        self._open, self._close = (call_parser.open, call_parser.close) if call_parser and tools else ("", "")
        self._tools = tools
        self._state = self._in_reasoning if reasoning else self._at_start
        self._work: deque[str] = deque()
        """Text that was not looked at yet."""
        self._carry = ""
        """Text that cannot be decided yet."""
        self._space: list[str] = []
        """Spaces that wait for what follows them."""
        self._at_marker = reasoning
        """Whether a marker came since the last text."""
        self._text: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._raw: list[str] = []
        self._out: list[Delta] = []
        self.malformed = 0
        """Calls that were malformed or unfinished."""

    def push(self, text: str) -> list[Delta]:
        """What ``text`` adds to the message."""
        self._work.extend(text[at : at + _CHUNK] for at in range(0, len(text), _CHUNK))
        return self._run()

    def finish(self) -> list[Delta]:
        """What was held back: the reply ends here, for whatever reason."""
        while self._state == self._in_call:
            self._give_up("")  # only here is it certain that the call does not close
            self._out = self._run()
        rest, self._carry = self._carry, ""
        if self._state == self._in_reasoning:
            self._think(rest)
        else:
            self._say(rest)
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
        """The text, without reasoning and calls."""
        return "".join(self._text) or None

    @property
    def reasoning(self) -> str | None:
        return "".join(self._thoughts) or None

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Complete calls, as in a chat message: ``id``, ``type``, and ``function`` with ``name`` and ``arguments``
        (JSON text)."""
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

    # Each state takes some text and returns the rest; what it cannot decide yet goes to the carry.

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
            whole = len(text) - _begun(text, _END_THINK)
            self._think(text[:whole])
            self._carry = text[whole:]
            return ""
        self._think(text[:end])
        self._space.clear()
        self._mark()
        self._state = self._in_text
        return text[end + len(_END_THINK) :]

    def _in_text(self, text: str) -> str:
        if self._call_parser is None:
            self._say(text)
            return ""
        start = text.find(self._open)
        if start < 0:
            whole = len(text) - _begun(text, self._open)
            self._say(text[:whole])
            self._carry = text[whole:]
            return ""
        self._say(text[:start])
        self._raw = [self._open]
        self._scanner = self._call_parser.scanner()
        self._state = self._in_call
        return text[start + len(self._open) :]

    def _in_call(self, text: str) -> str:
        try:
            end = self._scanner.feed(text)
        except _MALFORMED:
            return self._give_up(text)
        self._raw.append(text[:end])
        if end is None:
            return ""
        try:
            assert self._call_parser is not None
            body = "".join(self._raw)[len(self._open) : -len(self._close)]
            name, arguments = self._call_parser.read(body, self._tools)
        except _MALFORMED:
            return self._give_up(text[end:])
        self._state = self._in_text
        self._mark()
        self._call(name, arguments)
        return text[end:]

    def _in_broken(self, text: str) -> str:
        """The rest of a malformed call whose end has not come yet."""
        end = text.find(self._close)
        if end < 0:
            whole = len(text) - _begun(text, self._close)
            self._say(text[:whole])
            self._carry = text[whole:]
            return ""
        self._say(text[: end + len(self._close)])
        self._state = self._in_text
        return text[end + len(self._close) :]

    def _give_up(self, rest: str) -> str:
        """Read the call again as text; ``rest`` follows it."""
        self.malformed += 1
        self._work.extendleft(reversed((*self._raw, rest)))
        self._state = self._in_broken
        return ""

    def _mark(self) -> None:
        self._at_marker = True
        if not self._text:
            self._space.clear()

    def _say(self, text: str) -> None:
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

    def _think(self, text: str) -> None:
        body = text.strip()
        if not body:
            self._space.append(text)
            return
        start = text.index(body)
        said = "".join(self._space) + text[:start] + body if self._thoughts else body
        self._space[:] = [text[start + len(body) :]]
        self._thoughts.append(said)
        self._out.append(Delta(reasoning=said))

    def _call(self, name: str, arguments: str) -> None:
        # Letters and digits only: some agents strip the rest, and results would no longer match.
        call_id = f"call{secrets.token_hex(12)}"
        index = len(self._calls)
        self._calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})
        self._out.append(Delta(calls=(CallDelta(index, call_id, name),)))
        for at in range(0, len(arguments), _FRAGMENT):
            self._out.append(Delta(calls=(CallDelta(index, arguments=arguments[at : at + _FRAGMENT]),)))


def _begun(text: str, marker: str) -> int:
    """How many characters at the end of ``text`` may be the beginning of ``marker``."""
    at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while at >= 0 and not marker.startswith(text[at:]):
        at = text.find(marker[0], at + 1)
    return len(text) - at if at >= 0 else 0


class StopStrings:
    """Cuts a text before the stop string that is complete first; holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [(stop, _borders(stop)) for stop in dict.fromkeys(stops) if stop]
        self._matched = [0] * len(self._stops)
        self._held = ""
        self.met: str | None = None
        """The stop string that was met."""

    def push(self, text: str) -> tuple[str, bool]:
        """The text that is certain, and whether a stop string was met; nothing comes after it."""
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
        """What was held back."""
        held, self._held = self._held, ""
        return held


def _borders(text: str) -> list[int]:
    """For each prefix, the length of the longest proper prefix that also ends it (Knuth, Morris and Pratt, 1977)."""
    borders = [0] * len(text)
    for end in range(1, len(text)):
        matched = borders[end - 1]
        while matched and text[matched] != text[end]:
            matched = borders[matched - 1]
        borders[end] = matched + (text[matched] == text[end])
    return borders
