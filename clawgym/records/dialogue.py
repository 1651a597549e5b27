"""Dialogues: what an agent is told at first, and a user who answers it during the episode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = ["Dialogue", "DialogueUser", "UserTurn"]


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A conversation in place of a single instruction. A reply of the agent without tool calls is a message to the
    user. Nothing else is offered to the agent than the task's tools: there is no ``submit``, and no system prompt but
    that of :attr:`opening`."""

    opening: tuple[tuple[str, str], ...]
    """Role (``system``, ``user``, ``assistant``) and text of the first messages. If the last is not the user's, the
    user speaks next."""
    user: str = ""
    """Its name in :data:`clawgym.registry.users`. Empty: nobody answers, and the agent's first reply ends the
    episode."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the user; plain JSON."""
    functions: tuple[Mapping[str, Any], ...] = ()
    """OpenAI function schemas of tools whose calls are recorded and not run. For tasks without tool servers."""
    withheld: tuple[str, ...] = ()
    """Tools that are not offered until a turn of the user names them."""
    private: str = ""
    """Tools of the servers whose names begin so are the user's, who calls them by the rest of the name; the agent
    cannot call them. Empty: the user has no tools."""

    @property
    def as_json(self) -> list[Any]:
        """JSON values, for the content hash."""
        given = [list(turn) for turn in self.opening], self.user, dict(self.options)
        own = [self.private] if self.private else []
        return [*given, [dict(function) for function in self.functions], list(self.withheld), *own]


@dataclass(frozen=True, slots=True)
class UserTurn:
    """What a user says to the agent."""

    text: str
    tools: tuple[str, ...] = ()
    """Withheld tools that are offered from now on."""


class DialogueUser(Protocol):
    """The other side of a :class:`Dialogue`. One instance for each episode."""

    async def answer(self, message: str, tools: Any = None) -> UserTurn | None:
        """What the user says to a message of the agent; None ends the conversation.

        ``tools``: the user's own (:class:`clawgym.tools.Tools`), if the task has any.

        Raises :class:`~clawgym.errors.EngineError` if a model that speaks for the user cannot be reached.
        """
        ...
