"""Helpers: make actions that are messages, and read observations of messages."""

from __future__ import annotations

import json
from typing import Any


def says(*calls: tuple[str, dict[str, Any]], content: str | None = None) -> str:
    functions = [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    return json.dumps({"content": content, "tool_calls": functions})


def seen(observation: dict[str, Any]) -> list[str]:
    return [message["content"] for message in json.loads(observation["messages"])]
