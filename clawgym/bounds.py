"""Bounds on data that arrives over HTTP: requests of agents, responses of endpoints.

The table in ``docs/reference/gateway-api.md`` says what each bound is for, and what happens beyond it. Error messages
name the constant.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

__all__ = [
    "BODY_SECONDS",
    "DEEPEST_JSON",
    "HELD_ANSWERS",
    "HELD_BODIES",
    "LARGEST_ANSWER",
    "LARGEST_BODY",
    "LARGEST_CONTROL_BODY",
    "LARGEST_ERROR",
    "LARGEST_EVENT",
    "LARGEST_JSON",
    "LARGEST_STREAM",
    "LARGEST_USAGE",
    "LONGEST_REPLY",
    "LONGEST_REQUEST",
    "MOST_CALLS",
    "MOST_EVENTS",
    "MOST_TOOL_CALLS",
    "MOST_WAITING_CALLS",
    "OutOfBounds",
    "RECORDED_CALLS",
    "read_json",
]

LARGEST_BODY = 32 * 2**20
"""Most bytes of one request of an agent: a long history with images. Requests are never decompressed."""
HELD_BODIES = LARGEST_BODY
"""Most bytes of all requests in flight of one session."""
BODY_SECONDS = 60.0
"""Most seconds from a request's headers to the end of its body."""
LONGEST_REQUEST = 8 * 2**20
"""Most characters of text in one request, without images: more than any model's context window."""
MOST_TOOL_CALLS = 2048
"""Most calls of the task's tools that a program sends in one episode."""
MOST_WAITING_CALLS = 64
"""Most of them that wait or run at the same time."""
RECORDED_CALLS = 64 * 2**20
"""Most bytes of their arguments and results together; the call that exceeds it is the last one."""
LARGEST_CONTROL_BODY = 256 * 2**20
"""Most bytes of one request to the control API, whose callers have its token."""

LARGEST_ANSWER = 16 * 2**20
"""Most bytes of one response of an endpoint without streaming. Responses are never decompressed."""
HELD_ANSWERS = 64 * 2**20
"""Most bytes of all responses of one endpoint that are being read."""
LARGEST_EVENT = 16 * 2**20
"""Most bytes of one event of a stream: a token engine's first event repeats the prompt's token ids."""
LARGEST_STREAM = 256 * 2**20
"""Most bytes of one streamed chat completion: several times the longest answer in single-token events."""
LARGEST_ERROR = 2**16
"""Most bytes read of an error response."""
LONGEST_REPLY = 4 * 2**20
"""Most characters of one reply of a model: text, reasoning and calls."""
MOST_CALLS = 256
"""Most tool calls in one reply of a text endpoint."""
MOST_EVENTS = 1000
"""Most events of a token engine's stream beyond the number of requested tokens."""
LARGEST_USAGE = 2**40
"""Most tokens that an endpoint may report for one response."""

LARGEST_JSON = 64 * 2**20
"""Most estimated bytes of a decoded JSON document, without its strings."""
DEEPEST_JSON = 200
"""Most nested arrays and objects."""

_ITEM, _OBJECT = 64, 240
"""Upper bounds for the bytes of an item or array, and of an object, in CPython, without their contents."""


class OutOfBounds(ValueError):
    """A bound was exceeded; the message names it."""


def read_json(data: bytes, loads: Callable[[bytes], Any] = json.loads) -> Any:
    """Decode the JSON document ``data`` within the bounds.

    Raises :class:`OutOfBounds` beyond them, and the ValueError of ``loads`` for invalid JSON.
    """
    if len(data) <= 2 * DEEPEST_JSON:
        return loads(data)
    # Brackets and commas in strings are counted too: these are upper bounds. Short documents need not be counted.
    if len(data) > LARGEST_JSON // _OBJECT:
        size = _ITEM * (data.count(b",") + data.count(b"[")) + _OBJECT * data.count(b"{")
        if size > LARGEST_JSON:
            raise OutOfBounds(f"it has more values than fit into {LARGEST_JSON >> 20} MiB (LARGEST_JSON)")
    try:
        value = loads(data)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        if "depth limit" in str(error):  # orjson's message
            raise _too_deep() from None
        raise
    if data.count(b"[") + data.count(b"{") > DEEPEST_JSON and _is_deep(value):
        raise _too_deep()
    return value


def _too_deep() -> OutOfBounds:
    return OutOfBounds(f"it is nested more than {DEEPEST_JSON} levels deep (DEEPEST_JSON)")


def _is_deep(value: Any) -> bool:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(DEEPEST_JSON):
        if not level:
            return False
        inside = (item.values() if isinstance(item, dict) else item for item in level)
        level = [child for items in inside for child in items if isinstance(child, dict | list)]
    return bool(level)
