"""Lists of tool calls: the solutions of tasks with tools."""

from __future__ import annotations

import json

from clawgym.errors import TaskError
from clawgym.records import ToolCall

__all__ = ["read_calls"]


def read_calls(text: bytes, where: str) -> list[ToolCall]:
    """Parse a JSON list of ``{"name", "arguments"}``. Raises :class:`TaskError`, which names ``where``."""
    try:
        items = json.loads(text)
        if not isinstance(items, list):
            raise TypeError("it is no list")
        calls = [ToolCall(f"call_{n}", item["name"], item.get("arguments", {})) for n, item in enumerate(items, 1)]
        if not all(isinstance(call.name, str) and isinstance(call.arguments, dict) for call in calls):
            raise TypeError("a name is no text, or arguments are no object")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise TaskError(f'{where}: is no JSON list of calls {{"name", "arguments"}} ({error!r}): correct it') from error
    return calls
