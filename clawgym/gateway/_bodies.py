"""Parse the body of a tool call, between ``<tool_call>`` and ``</tool_call>``, in the two usual formats.

A scanner finds the end of a body while it is streamed, in one pass over its characters, however they are split. A
reader parses a whole body. Both raise :class:`MalformedBody`.

* ``hermes``: ``{"name": ..., "arguments": {...}}``. A marker inside a JSON string is part of that string.
* ``qwen3-coder``: ``<function=name>``, then for each parameter ``<parameter=key>``, a newline, the value, a newline,
  ``</parameter>``; then ``</function>``. The format has no escapes, so a value that contains a marker is malformed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Protocol

__all__ = ["CLOSE", "OPEN", "JsonScanner", "MalformedBody", "MarkupScanner", "Scanner", "read_json", "read_markup"]

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_MAX_DEPTH = 128
"""Deepest nesting of brackets in arguments: deeper nesting is noise, and breaks the parsers of agents."""
_MAX_NAME = 256


class MalformedBody(ValueError):
    """The body is not a valid call."""


class Scanner(Protocol):
    """Finds the end of one call in streamed text."""

    def feed(self, text: str) -> int | None:
        """Return the index in ``text`` after the call's end marker, or ``None`` if the call continues.

        May raise ValueError, LookupError or TypeError if the call is malformed.
        """
        ...


_SPACE = re.compile(r"[ \t\r\n]*")
_PLAIN = re.compile(r"[ \t\r\n,:0-9+\-.Etrufalsen]*")
_STRING = re.compile(r'[^"\\]*')


class JsonScanner:
    """Finds the end marker after one JSON object."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = self._closed = False
        self._tail = ""

    def feed(self, text: str) -> int | None:
        """See :class:`Scanner`."""
        pos, end = 0, len(text)
        while pos < end:
            if self._closed:
                return self._close(text, pos)
            if self._escaped:
                self._escaped = False
                pos += 1
            elif self._in_string:
                pos = _end(_STRING, text, pos)
                if pos < end:
                    self._in_string, self._escaped = text[pos] == "\\", text[pos] == "\\"
                    pos += 1
            else:
                pos = _end(_PLAIN if self._depth else _SPACE, text, pos)
                if pos < end:
                    self._bracket(text[pos])
                    pos += 1
        return None

    def _bracket(self, char: str) -> None:
        if char == "{" or (char == "[" and self._depth):
            self._depth += 1
            if self._depth > _MAX_DEPTH:
                raise MalformedBody
        elif char in "}]" and self._depth:
            self._depth -= 1
            self._closed = not self._depth
        elif char == '"' and self._depth:
            self._in_string = True
        else:
            raise MalformedBody

    def _close(self, text: str, pos: int) -> int | None:
        if not self._tail:
            pos = _end(_SPACE, text, pos)
        taken = text[pos : pos + len(CLOSE) - len(self._tail)]
        self._tail += taken
        if not CLOSE.startswith(self._tail):
            raise MalformedBody
        return pos + len(taken) if self._tail == CLOSE else None


def read_json(body: str) -> tuple[str, str]:
    """Return name and arguments of a body in the Hermes format; the arguments exactly as sampled."""
    start = _end(_SPACE, body, 0)
    try:
        values = _members(body, start)
        name = json.loads(body[slice(*values["name"])])
        arguments = body[slice(*values["arguments"])]
        parsed = json.loads(arguments, parse_constant=_refuse)
        if "\\u" in body:
            json.dumps([name, parsed], ensure_ascii=False).encode()  # raises for lone surrogates
    except (ValueError, KeyError, IndexError, RecursionError) as error:
        raise MalformedBody from error
    if not isinstance(name, str) or not name or not isinstance(parsed, dict):
        raise MalformedBody
    return name, arguments


def _refuse(constant: str) -> None:
    raise MalformedBody(constant)


def _members(body: str, pos: int) -> dict[str, tuple[int, int]]:
    """Return key -> (start, end) of the values of the JSON object at ``pos``. Raises ValueError or IndexError."""
    decode = json.JSONDecoder(parse_constant=_refuse).raw_decode
    places: dict[str, tuple[int, int]] = {}
    mark = "{"
    while True:
        _expect(body, pos, mark)
        pos = _end(_SPACE, body, pos + 1)
        _expect(body, pos, '"')
        key, pos = decode(body, pos)
        pos = _end(_SPACE, body, pos)
        _expect(body, pos, ":")
        start = _end(_SPACE, body, pos + 1)
        _, pos = decode(body, start)
        places[key] = (start, pos)
        pos = _end(_SPACE, body, pos)
        mark = ","
        if body[pos] == "}":
            if body[pos + 1 :].strip():
                raise MalformedBody
            return places


def _expect(body: str, pos: int, char: str) -> None:
    if body[pos] != char:
        raise MalformedBody


def _end(pattern: re.Pattern[str], text: str, pos: int) -> int:
    match = pattern.match(text, pos)
    return match.end() if match else pos


_FUNCTION = re.compile(rf"<function=([^<>\s]{{1,{_MAX_NAME}}})>")
_PARAMETER = re.compile(rf"<parameter=([^<>\n]{{1,{_MAX_NAME}}})>")
_PARTIAL_FUNCTION = re.compile(rf"<function=[^<>\s]{{0,{_MAX_NAME}}}\Z")
_PARTIAL_PARAMETER = re.compile(rf"<parameter=[^<>\n]{{0,{_MAX_NAME}}}\Z")
_END_FUNCTION, _END_VALUE = "</function>", "</parameter>"
_MARK = re.compile(r"</parameter>|</function>|</tool_call>|<parameter=|<function=|<tool_call>")
_MARKS = ("</parameter>", "</function>", "</tool_call>", "<parameter=", "<function=", "<tool_call>")


class MarkupScanner:
    """Finds the end marker after one function with its parameters.

    Each character is read once or, in an incomplete marker, twice.
    """

    def __init__(self) -> None:
        self._step = self._function
        self._tail = ""

    def feed(self, text: str) -> int | None:
        """See :class:`Scanner`."""
        work = self._tail + text
        before = len(self._tail)
        pos = 0
        while self._step != self._ended:
            at = self._step(work, pos)
            if at is None:
                self._tail = work[self._rest :]
                return None
            pos = at
        return pos - before

    def _ended(self, work: str, pos: int) -> int | None:
        return pos

    def _function(self, work: str, pos: int) -> int | None:
        pos = self._rest = _end(_SPACE, work, pos)
        if match := _FUNCTION.match(work, pos):
            self._step = self._next
            return match.end()
        return _unfinished(work, pos, _PARTIAL_FUNCTION, "<function=")

    def _next(self, work: str, pos: int) -> int | None:
        pos = self._rest = _end(_SPACE, work, pos)
        if match := _PARAMETER.match(work, pos):
            self._step = self._value
            return match.end()
        if work.startswith(_END_FUNCTION, pos):
            self._step = self._closing
            return pos + len(_END_FUNCTION)
        if "<parameter=".startswith(work[pos:]):
            return None
        return _unfinished(work, pos, _PARTIAL_PARAMETER, _END_FUNCTION)

    def _value(self, work: str, pos: int) -> int | None:
        match = _MARK.search(work, pos)
        if match is None:
            self._rest = len(work) - _partial_marker(work, pos)
            return None
        if match.group() != _END_VALUE:
            raise MalformedBody
        self._step = self._next
        return match.end()

    def _closing(self, work: str, pos: int) -> int | None:
        pos = self._rest = _end(_SPACE, work, pos)
        if work.startswith(CLOSE, pos):
            self._step = self._ended
            return pos + len(CLOSE)
        return _unfinished(work, pos, None, CLOSE)


def _unfinished(work: str, pos: int, named: re.Pattern[str] | None, plain: str) -> None:
    """Return ``None`` if ``work`` from ``pos`` may still become ``plain`` or match ``named``; else raise."""
    if not plain.startswith(work[pos : pos + len(CLOSE) + 1]) and not (named and named.match(work, pos)):
        raise MalformedBody


def _partial_marker(work: str, pos: int) -> int:
    """Return how many characters at the end of ``work`` may be the beginning of a marker."""
    at = work.rfind("<", max(pos, len(work) - len(_END_VALUE)))
    return len(work) - at if at >= 0 and any(mark.startswith(work[at:]) for mark in _MARKS) else 0


def read_markup(body: str, parameters: Mapping[str, Any]) -> tuple[str, str]:
    """Return name and arguments (JSON text) of a body in the Qwen3-coder format.

    ``parameters`` maps the names of functions to their JSON schemas, by which the values are converted.
    """
    head = _FUNCTION.match(body, _end(_SPACE, body, 0))
    if head is None:
        raise MalformedBody
    name, pos = head.group(1), head.end()
    schema = parameters.get(name)
    values: dict[str, Any] = {}
    while match := _PARAMETER.match(body, _end(_SPACE, body, pos)):
        stop = body.index(_END_VALUE, match.end())
        value = body[match.end() : stop].removeprefix("\n").removesuffix("\n")
        values[match.group(1)] = _converted(value, _schema_of(schema, match.group(1)))
        pos = stop + len(_END_VALUE)
    try:
        text = json.dumps(values, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, RecursionError) as error:
        raise MalformedBody from error
    return name, text


def _schema_of(schema: Any, name: str) -> Any:
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties.get(name) if isinstance(properties, Mapping) else None


def _types(schema: Any) -> set[str]:
    """Return the JSON types that ``schema`` names; empty if it names none."""
    if not isinstance(schema, Mapping):
        return set()
    types = schema.get("type", [])
    found = {types} if isinstance(types, str) else {k for k in types if isinstance(k, str)}
    for union in ("anyOf", "oneOf"):
        for option in schema.get(union) or ():
            found |= _types(option)
    return found


def _converted(value: str, schema: Any) -> Any:
    """Convert ``value`` to a type of ``schema``, or return it unchanged if it fits none: the tool reports the error."""
    types = _types(schema)
    lowered = value.strip().lower()
    if "null" in types and lowered in ("null", "none"):
        return None
    if "boolean" in types and lowered in ("true", "false"):
        return lowered == "true"
    if not types & {"integer", "number", "object", "array"}:
        return value
    try:
        parsed = json.loads(value, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return value
    return parsed if _types_of(parsed) & types else value


def _types_of(value: Any) -> set[str]:
    match value:
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number"}
        case dict():
            return {"object"}
        case list():
            return {"array"}
    return set()
