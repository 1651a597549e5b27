"""What stands between ``<tool_call>`` and ``</tool_call>``, in the two styles that models are trained on.

A scanner finds the end of a body while it comes, in one pass over its characters whatever the pieces; a reader makes a
call of a whole body. Both raise :class:`MalformedBody`.

* ``hermes``: ``{"name": ..., "arguments": {...}}``; a marker inside a JSON string is text of that string.
* ``qwen3-coder``: ``<function=name>``, then ``<parameter=key>``, a line end, the value, a line end, ``</parameter>``
  for each, then ``</function>``. The style has no escape, so a value that holds one of its markers is malformed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Protocol

__all__ = ["CLOSE", "OPEN", "JsonScanner", "MalformedBody", "MarkupScanner", "Scanner", "read_json", "read_markup"]

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_MAX_DEPTH = 128
"""Of brackets in arguments: more is noise, and breaks the parsers of agents."""
_MAX_NAME = 256


class MalformedBody(ValueError):
    """Not a call."""


class Scanner(Protocol):
    def feed(self, text: str) -> int | None:
        """Where in ``text`` the call ended (after its ``</tool_call>``), or ``None`` if it goes on."""
        ...


_SPACE = re.compile(r"[ \t\r\n]*")
_PLAIN = re.compile(r"[ \t\r\n,:0-9+\-.Etrufalsen]*")
_STRING = re.compile(r'[^"\\]*')


class JsonScanner:
    """Follows one JSON object up to its closing marker."""

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
    """Name and arguments of a body in the Hermes style; the arguments as they were written."""
    start = _end(_SPACE, body, 0)
    try:
        values = _members(body, start)
        name = json.loads(body[slice(*values["name"])])
        arguments = body[slice(*values["arguments"])]
        parsed = json.loads(arguments, parse_constant=_refuse)
        if "\\u" in body:
            json.dumps([name, parsed], ensure_ascii=False).encode()  # lone surrogates are no text
    except (ValueError, KeyError, IndexError, RecursionError) as error:
        raise MalformedBody from error
    if not isinstance(name, str) or not name or not isinstance(parsed, dict):
        raise MalformedBody
    return name, arguments


def _refuse(constant: str) -> None:
    raise MalformedBody(constant)


def _members(body: str, pos: int) -> dict[str, tuple[int, int]]:
    """Where the values of the JSON object at ``pos`` begin and end, by key. Raises ValueError or IndexError."""
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
_FUNCTION_BEGUN = re.compile(rf"<function=[^<>\s]{{0,{_MAX_NAME}}}\Z")
_PARAMETER_BEGUN = re.compile(rf"<parameter=[^<>\n]{{0,{_MAX_NAME}}}\Z")
_END_FUNCTION, _END_VALUE = "</function>", "</parameter>"
_MARK = re.compile(r"</parameter>|</function>|</tool_call>|<parameter=|<function=|<tool_call>")
_MARKS = ("</parameter>", "</function>", "</tool_call>", "<parameter=", "<function=", "<tool_call>")


class MarkupScanner:
    """Follows one function and its parameters up to the closing marker; each character is looked at once or, in an
    unfinished marker, twice."""

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
        return _unfinished(work, pos, _FUNCTION_BEGUN, "<function=")

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
        return _unfinished(work, pos, _PARAMETER_BEGUN, _END_FUNCTION)

    def _value(self, work: str, pos: int) -> int | None:
        match = _MARK.search(work, pos)
        if match is None:
            self._rest = len(work) - _begun(work, pos)
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
    """``None`` if ``work`` from ``pos`` may still become ``plain`` or match ``named``; else malformed."""
    if not plain.startswith(work[pos : pos + len(CLOSE) + 1]) and not (named and named.match(work, pos)):
        raise MalformedBody


def _begun(work: str, pos: int) -> int:
    """How many characters at the end of ``work`` may be the beginning of a marker."""
    at = work.rfind("<", max(pos, len(work) - len(_END_VALUE)))
    return len(work) - at if at >= 0 and any(mark.startswith(work[at:]) for mark in _MARKS) else 0


def read_markup(body: str, parameters: Mapping[str, Any]) -> tuple[str, str]:
    """Name and arguments of a body in the Qwen3-coder style. ``parameters`` maps a function's name to its JSON schema,
    by which values are converted; the arguments come as JSON."""
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


def _kinds(schema: Any) -> set[str]:
    """The JSON types that ``schema`` names; empty where it names none."""
    if not isinstance(schema, Mapping):
        return set()
    kinds = schema.get("type", [])
    found = {kinds} if isinstance(kinds, str) else {k for k in kinds if isinstance(k, str)}
    for union in ("anyOf", "oneOf"):
        for option in schema.get(union) or ():
            found |= _kinds(option)
    return found


def _converted(value: str, schema: Any) -> Any:
    """``value`` as one of the types of ``schema``; as it is where it fits none, so that the tool says what is wrong."""
    kinds = _kinds(schema)
    lowered = value.strip().lower()
    if "null" in kinds and lowered in ("null", "none"):
        return None
    if "boolean" in kinds and lowered in ("true", "false"):
        return lowered == "true"
    if not kinds & {"integer", "number", "object", "array"}:
        return value
    try:
        parsed = json.loads(value, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return value
    return parsed if _kind(parsed) & kinds else value


def _kind(value: Any) -> set[str]:
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
