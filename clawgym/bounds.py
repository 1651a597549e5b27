"""Bounds on what comes from outside over HTTP: requests of agents, answers of endpoints.

``docs/gateway.md`` has the table: what each is for, and what becomes of a request or an answer that goes past it. A
message about one names its constant.
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
    "OutOfBounds",
    "read_json",
]

LARGEST_BODY = 32 * 2**20
"""Bytes of one request of an agent: a long history with images. It is never decompressed."""
HELD_BODIES = LARGEST_BODY
"""Bytes of all requests of one session that are under way."""
BODY_SECONDS = 60.0
"""From a request's head to the end of its body."""
LONGEST_REQUEST = 8 * 2**20
"""Characters of text in one request, images aside: more than any model's context window."""
LARGEST_CONTROL_BODY = 256 * 2**20
"""Bytes of one request to the control API, whose sender holds its token."""

LARGEST_ANSWER = 16 * 2**20
"""Bytes of one answer of an endpoint that is not streamed. It is never decompressed."""
HELD_ANSWERS = 64 * 2**20
"""Bytes of all answers of one endpoint that are being read."""
LARGEST_EVENT = 16 * 2**20
"""Bytes of one event of a stream: the first one of a token engine repeats the ids of its prompt."""
LARGEST_STREAM = 256 * 2**20
"""Bytes of one streamed chat completion: a model's longest answer in single tokens, several times."""
LARGEST_ERROR = 2**16
"""Bytes read of an answer that is an error."""
LONGEST_REPLY = 4 * 2**20
"""Characters of one reply of a model: text, reasoning and calls."""
MOST_CALLS = 256
"""Tool calls in one reply of a text endpoint."""
MOST_EVENTS = 1000
"""Events of a token engine's stream beyond the number of tokens that were asked for."""
LARGEST_USAGE = 2**40
"""Tokens that an endpoint may report for one answer."""

LARGEST_JSON = 64 * 2**20
"""Estimated bytes of a decoded JSON document beside its texts."""
DEEPEST_JSON = 200
"""Levels of arrays and objects."""

_ITEM, _OBJECT = 64, 240
"""Bytes that an item or an array, and an object, take at most in CPython, without their contents."""


class OutOfBounds(ValueError):
    """The message says which bound was passed."""


def read_json(data: bytes, loads: Callable[[bytes], Any] = json.loads) -> Any:
    """The value in ``data``, which decodes to no more than the bounds allow.

    Raises :class:`OutOfBounds`, and what else ``loads`` raises: ValueError.
    """
    # Commas and brackets in texts count too: an upper bound, at the price of three searches.
    size = _ITEM * (data.count(b",") + data.count(b"[")) + _OBJECT * data.count(b"{")
    if size > LARGEST_JSON:
        raise OutOfBounds(f"it has more values than fit into {LARGEST_JSON >> 20} MiB (LARGEST_JSON)")
    too_deep = OutOfBounds(f"it is nested more than {DEEPEST_JSON} levels deep (DEEPEST_JSON)")
    try:
        value = loads(data)
    except RecursionError:
        raise too_deep from None
    except ValueError as error:
        if "depth limit" in str(error):  # orjson's word for it
            raise too_deep from None
        raise
    if _is_deep(value):
        raise too_deep
    return value


def _is_deep(value: Any) -> bool:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(DEEPEST_JSON):
        if not level:
            return False
        inside = (item.values() if isinstance(item, dict) else item for item in level)
        level = [child for items in inside for child in items if isinstance(child, dict | list)]
    return bool(level)
