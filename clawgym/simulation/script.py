"""User ``script``: says given lines, whatever the agent says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from clawgym.errors import AgentError
from clawgym.records import UserTurn
from clawgym.registry import users

__all__ = ["ScriptedUser"]


@users.register("script")
class ScriptedUser:
    """Says its lines one after the other, then ends the conversation.

    Args:
        lines: texts, or objects with ``text`` and ``tools``, the withheld tools that are offered from this line on.

    Raises:
        AgentError: a line is neither.
    """

    def __init__(self, lines: list[Any]) -> None:
        self._lines = [_turn(line) for line in lines]

    async def answer(self, message: str, tools: Any = None) -> UserTurn | None:
        """The next line."""
        return self._lines.pop(0) if self._lines else None


def _turn(line: Any) -> UserTurn:
    text, tools = (line.get("text"), line.get("tools", ())) if isinstance(line, Mapping) else (line, ())
    named = isinstance(tools, Sequence) and not isinstance(tools, str) and all(isinstance(name, str) for name in tools)
    if not isinstance(text, str) or not named:
        raise AgentError(f"user 'script': the line {str(line)[:200]!r} is no text and no object with text: correct it")
    return UserTurn(text, tuple(tools))
