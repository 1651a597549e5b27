"""What a judge says of one turn, and how its words become a vote.

Invariant: a vote is what the judge's own last line says, and nothing else: an answer without such a line, or one that
was cut off, is no vote (``None``), never 0.
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
"""``None``: invalid."""

SHORTEST_HINT, LONGEST_HINT = 12, 800
"""Characters of a hint that is taken."""

_VERDICT = re.compile(r"Verdict: (\+1|0|-1)")
_VOTES: dict[str, Vote] = {"+1": 1, "0": 0, "-1": -1}


@dataclass(frozen=True)
class Judgement:
    """The votes on one turn, with everything that tells where they come from."""

    votes: tuple[Vote, ...]
    """(m,)"""
    texts: tuple[str, ...]
    """(m,) what the judge wrote for each; empty where it wrote nothing."""
    judge: str
    """Its name."""
    version: str
    """Hex digest of the judge: model, prompts and settings, or weights."""
    hints: tuple[str, ...] = ()
    """Candidates that were accepted, in the order of their calls (:func:`hint_of`)."""
    hint_texts: tuple[str, ...] = ()
    """What the judge wrote for each candidate, accepted or not."""

    def __post_init__(self) -> None:
        if len(self.votes) != len(self.texts):
            raise ValueError(f"{len(self.votes)} votes with {len(self.texts)} texts: give one text for each vote")
        for vote in self.votes:
            if vote is not None and (isinstance(vote, bool) or vote not in (-1, 0, 1)):
                raise ValueError(f"vote {vote!r} is not one of +1, 0, -1 and None: correct the judge")

    @property
    def score(self) -> float | None:
        """Mean of the valid votes, zeros included, in [-1, 1]; ``None`` where no vote is valid."""
        return process_of(self.votes)

    def about(self) -> dict[str, Any]:
        """All of it as plain data, for :meth:`~clawgym.pool.Pool.set_turn_rewards`."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}

    @classmethod
    def from_about(cls, about: Mapping[str, Any]) -> Judgement:
        """The judgement that :meth:`about` wrote. Raises :class:`ValueError` for anything else."""
        try:
            plain: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in about.items()}
            return cls(**plain)
        except TypeError as error:
            raise ValueError(f"not a judgement ({error}): give what Judgement.about() gave") from None


@runtime_checkable
class Judge(Protocol):
    """Votes on one turn."""

    name: str

    @property
    def version(self) -> str:
        """Hex digest: two judges of one version mean the same."""
        ...

    async def judge(self, asked: Judgeable) -> Judgement:
        """Raises :class:`~clawgym.errors.ClawGymError` where it cannot be had; then the turn stays unscored."""
        ...


def verdict_of(text: str) -> Vote:
    """The vote in the last line of ``text`` that is not empty: exactly ``Verdict: +1``, ``Verdict: 0`` or
    ``Verdict: -1``, blanks around it aside. Anything else is ``None``; never raises."""
    for line in reversed(text.split("\n")):
        if line := line.strip():
            found = _VERDICT.fullmatch(line)
            return _VOTES[found.group(1)] if found else None
    return None


def hint_of(text: str, marker: str) -> str | None:
    """The hint in a judge's answer, or ``None`` where it is not accepted.

    Accepted is one passage between ``<hint MARKER>`` and ``</hint MARKER>``, of :data:`SHORTEST_HINT` to
    :data:`LONGEST_HINT` characters without the blanks around it, in an answer whose last line is ``Verdict: +1``.
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
    """Scores, and where they come from, by turn, as :meth:`~clawgym.pool.Pool.set_turn_rewards` takes them.

    ``by_majority``: the vote that most agree in, for binary RL (:func:`~clawgym.rewards.integrated.majority`), instead
    of their mean, for which ``count_zeros`` is that of :func:`~clawgym.rewards.integrated.process_of`. A turn without a
    valid vote is left out: it is unscored, not 0."""
    given = {
        n: majority(j.votes) if by_majority else process_of(j.votes, count_zeros=count_zeros)
        for n, j in judgements.items()
    }
    scored: Sequence[tuple[int, float]] = [(n, value) for n, value in given.items() if value is not None]
    return dict(scored), {turn: judgements[turn].about() for turn, _ in scored}
