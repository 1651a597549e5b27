"""Rewards of turns, made of the outcome of the episode and of what judges say of each turn.

    R_t = O + (1 / m) * sum_i r_t^(i),   O = 2 * score - 1,   r in {+1, 0, -1}

(OpenClaw-RL, arXiv 2603.10165, the integrated reward), over the m *valid* votes of the turn. Invariants: a zero is a
vote and is counted; an invalid vote is no vote; a turn without a valid vote has R_t = O, never less; the parts stay
beside the sum, so that a trainer can normalise them apart (``clawgym.trainers.algorithms.integrated_advantages``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["TurnReward", "majority", "outcome_of", "process_of", "turn_reward", "turn_rewards"]

_VOTES = (-1, 0, 1)


@dataclass(frozen=True, slots=True)
class TurnReward:
    """The reward of one turn, and what it is made of."""

    outcome: float
    """O, in [-1, 1]: the same for all turns of an episode."""
    votes: tuple[int | None, ...]
    """As the judge gave them: +1, 0, -1, or ``None`` for one that could not be read."""
    process: float | None
    """Mean of the valid votes, in [-1, 1]; ``None`` where there is none."""
    integrated: float
    """R_t, in [-2, 2]: outcome and process, without penalties."""
    penalties: Mapping[str, float] = field(default_factory=dict)
    """Name -> what it takes off, 0 or less (``clawgym.rewards.penalties``)."""

    @property
    def total(self) -> float:
        """R_t with the penalties."""
        return self.integrated + math.fsum(self.penalties.values())


def outcome_of(score: float) -> float:
    """O = 2 * score - 1, in [-1, 1], of a score in [0, 1]; a fraction of the checks stays a fraction.

    Raises :class:`ValueError` for what is no score: an episode that was not graded has no outcome, and is left out.
    """
    if not 0 <= score <= 1:
        raise ValueError(f"score {score!r} is not in [0, 1]: leave out an episode that was not graded")
    return 2 * score - 1


def process_of(votes: Sequence[int | None], *, count_zeros: bool = True) -> float | None:
    """Mean of the valid votes, in [-1, 1]; ``None`` where there is none.

    ``count_zeros=False`` leaves zeros out of the mean, as the reference implementation does: then +1, 0, 0 is 1
    instead of 1/3, and a turn of which all votes are 0 has none. Raises :class:`ValueError` for a vote that is none
    of +1, 0, -1 and ``None``.
    """
    valid = [vote for vote in _checked(votes) if vote or (count_zeros and vote is not None)]
    return math.fsum(valid) / len(valid) if valid else None


def majority(votes: Sequence[int | None]) -> int | None:
    """The vote that most valid votes agree in, for binary RL (one reward in {+1, -1} per turn, no outcome) only.

    A tie for the first place is 0: the judge does not know, and a reward of 0 pushes nowhere. Without a valid vote
    ``None``: the turn is unscored and is no part of a batch. An integrated reward takes the mean instead, which keeps
    how sure the votes are.
    """
    counts = Counter(vote for vote in _checked(votes) if vote is not None).most_common(2)
    if not counts:
        return None
    return 0 if len(counts) > 1 and counts[0][1] == counts[1][1] else counts[0][0]


def turn_reward(
    score: float,
    votes: Sequence[int | None] = (),
    *,
    count_zeros: bool = True,
    penalties: Mapping[str, float] | None = None,
) -> TurnReward:
    """R_t of one turn of an episode of ``score`` (in [0, 1]), with its parts.

    Raises :class:`ValueError` as :func:`outcome_of` and :func:`process_of` do, and for a penalty above 0.
    """
    for name, value in (penalties or {}).items():
        if not value <= 0:
            raise ValueError(f"penalty {name!r} is {value!r}: give what it takes off, 0 or less")
    outcome, process = outcome_of(score), process_of(votes, count_zeros=count_zeros)
    return TurnReward(outcome, tuple(votes), process, outcome + (process or 0.0), dict(penalties or {}))


def turn_rewards(
    score: float,
    turns: Iterable[int],
    votes: Mapping[int, Sequence[int | None]],
    *,
    count_zeros: bool = True,
    penalties: Mapping[str, float] | None = None,
) -> dict[int, TurnReward]:
    """:func:`turn_reward` of each of ``turns``, by its index in the episode.

    A turn that ``votes`` does not name was not judged: R_t = O. Raises :class:`ValueError` for votes on a turn that is
    not among ``turns``: they would be lost, or be another turn's.
    """
    turns = list(turns)
    if strange := sorted(set(votes) - set(turns)):
        raise ValueError(f"votes on turn {strange[0]}, which is not one of the episode's: give votes by turn index")
    return {
        turn: turn_reward(score, votes.get(turn, ()), count_zeros=count_zeros, penalties=penalties) for turn in turns
    }


def _checked(votes: Sequence[int | None]) -> Sequence[int | None]:
    for vote in votes:
        if vote is not None and (isinstance(vote, bool) or vote not in _VOTES):
            raise ValueError(f"vote {vote!r} is not one of +1, 0, -1 and None: correct the judge")
    return votes
