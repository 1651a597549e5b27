"""Judges of turns: what a judge is given, and what it answers. The judges themselves are in :mod:`clawgym.rewards`.

Invariant: a vote that could not be read is None, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from clawgym.records.episode import Image

__all__ = ["Judge", "Judgeable", "Judgement", "Message", "NextState", "Setting", "Vote"]

Message = Mapping[str, Any]
Setting = Literal["terminal", "swe", "gui", "toolcall", "chat"]
Vote = Literal[-1, 0, 1] | None
"""None: invalid."""


@dataclass(frozen=True)
class NextState:
    """What followed a turn."""

    turn: int
    """Index of the turn in its episode."""
    messages: tuple[Message, ...] = ()
    """Tool results and user messages, up to the next assistant message."""
    outcome: str | None = None
    """The verifier's result as text; only for the last turn, and only if the caller shows it to the judge."""

    @property
    def images(self) -> tuple[str, ...]:
        """Hex SHA-256 of its images, in order."""
        return tuple(_pictures(self.messages))


@dataclass(frozen=True)
class Judgeable:
    """One turn, as the input of a judge."""

    episode: str
    turn: int
    setting: Setting
    task: str
    """The instruction; may be empty in a chat."""
    history: tuple[Message, ...]
    """All messages before the action, in order."""
    action: Message
    """The assistant's message to judge."""
    after: NextState
    malformed_calls: int = 0
    images: Mapping[str, Image] = field(default_factory=dict)
    """SHA-256 -> image, for the images whose data is available."""

    @property
    def screen_before(self) -> str | None:
        """Hex SHA-256 of the last image before the action."""
        return next(iter(reversed(list(_pictures(self.history)))), None)


@dataclass(frozen=True)
class Judgement:
    """The m votes on one turn, with their provenance."""

    votes: tuple[Vote, ...]
    """(m,)"""
    texts: tuple[str, ...]
    """(m,) the judge's text for each vote; empty without one."""
    judge: str
    """Name of the judge."""
    version: str
    """Hex digest of the judge: model, prompts and settings, or weights."""
    hints: tuple[str, ...] = ()
    """The accepted candidate hints, in the order of their calls (:func:`hint_of`)."""
    hint_texts: tuple[str, ...] = ()
    """The judge's text for each candidate hint, accepted or not."""

    def __post_init__(self) -> None:
        if len(self.votes) != len(self.texts):
            raise ValueError(f"{len(self.votes)} votes with {len(self.texts)} texts: give one text for each vote")
        for vote in self.votes:
            if vote is not None and (isinstance(vote, bool) or vote not in (-1, 0, 1)):
                raise ValueError(f"vote {vote!r} is not one of +1, 0, -1 and None: correct the judge")

    @property
    def score(self) -> float | None:
        """Mean of the valid votes, including zeros, in [-1, 1]; None without a valid vote."""
        valid = [vote for vote in self.votes if vote is not None]
        return math.fsum(valid) / len(valid) if valid else None

    def about(self) -> dict[str, Any]:
        """As JSON data, for :meth:`~clawgym.pool.Pool.set_turn_rewards`."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}

    @classmethod
    def from_about(cls, about: Mapping[str, Any]) -> Judgement:
        """Read the result of :meth:`about`. Raises :class:`ValueError` for anything else."""
        try:
            plain: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in about.items()}
            return cls(**plain)
        except TypeError as error:
            raise ValueError(f"not a judgement ({error}): give what Judgement.about() gave") from None


@runtime_checkable
class Judge(Protocol):
    """Judges turns. A judge of your own is one class, registered by name::

    @clawgym.registry.judges.register("brief")
    class BriefJudge:
        name = "brief"
        version = "1"

        async def judge(self, record: Judgeable) -> Judgement:
            words = len(str(record.action.get("content") or "").split())
            return Judgement((1 if words <= 50 else -1,), (f"{words} words",), self.name, self.version)
    """

    name: str

    @property
    def version(self) -> str:
        """Hex digest of everything that determines its votes; equal versions are interchangeable."""
        ...

    async def judge(self, record: Judgeable) -> Judgement:
        """Judge one turn.

        Raises:
            ClawGymError: the judge failed; the turn stays unscored.
        """
        ...


def _pictures(messages: Sequence[Message]) -> Iterator[str]:
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, Mapping) and part.get("type") == "image" and isinstance(part.get("sha256"), str):
                yield part["sha256"]
