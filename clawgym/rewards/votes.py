"""The judge protocol, judgements of turns, and parsing votes from a judge's text.

Invariant: only the last line of the judge's answer is its vote. An answer without such a line, or a truncated one, is
invalid (None), never 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from clawgym.rewards.integrated import majority, process_of
from clawgym.rewards.states import Judgeable

__all__ = ["LONGEST_HINT", "SHORTEST_HINT", "Judge", "Judgement", "Vote", "hint_of", "rewards_of", "verdict_of"]

Vote = Literal[-1, 0, 1] | None
"""None: invalid."""

SHORTEST_HINT, LONGEST_HINT = 12, 800
"""Least and most characters of an accepted hint."""

_VERDICT = re.compile(r"Verdict: (\+1|0|-1)")
_VOTES: dict[str, Vote] = {"+1": 1, "0": 0, "-1": -1}


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
        return process_of(self.votes)

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


def verdict_of(text: str) -> Vote:
    """The vote in the last non-empty line of ``text``: ``Verdict: +1``, ``Verdict: 0`` or ``Verdict: -1``.

    None for anything else. Never raises.
    """
    for line in reversed(text.split("\n")):
        if line := line.strip():
            found = _VERDICT.fullmatch(line)
            return _VOTES[found.group(1)] if found else None
    return None


def hint_of(text: str, marker: str) -> str | None:
    """The hint in a judge's answer; None if it is not accepted.

    A hint is accepted if it is the only passage between ``<hint MARKER>`` and ``</hint MARKER>``, has
    :data:`SHORTEST_HINT` to :data:`LONGEST_HINT` characters, and the last line of the answer is ``Verdict: +1``.
    """
    before, opened, rest = text.partition(f"<hint {marker}>")
    passage, closed, after = rest.partition(f"</hint {marker}>")
    if not opened or not closed or marker in before + passage + after or verdict_of(after) != 1:
        return None
    passage = passage.strip()
    return passage if SHORTEST_HINT <= len(passage) <= LONGEST_HINT else None


def rewards_of(
    judgements: Mapping[int, Judgement], *, by_majority: bool = False, count_zeros: bool = True
) -> tuple[dict[int, float], dict[int, dict[str, Any]]]:
    """Scores and judgements by turn, as arguments of :meth:`~clawgym.pool.Pool.set_turn_rewards`.

    The score is the mean of the votes (:func:`~clawgym.rewards.integrated.process_of`), or with ``by_majority`` their
    majority (:func:`~clawgym.rewards.integrated.majority`), for binary RL. Turns without a valid vote are left out.
    """
    given = {
        n: majority(j.votes) if by_majority else process_of(j.votes, count_zeros=count_zeros)
        for n, j in judgements.items()
    }
    scored: Sequence[tuple[int, float]] = [(n, value) for n, value in given.items() if value is not None]
    return dict(scored), {turn: judgements[turn].about() for turn, _ in scored}
