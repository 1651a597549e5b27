"""Rewards of turns, computed from the outcome of the episode and the judge's votes on each turn.

    R_t = O + (1 / m) * sum_i r_t^(i),   O = 2 * score - 1,   r in {+1, 0, -1}

(OpenClaw-RL, arXiv 2603.10165, the integrated reward), over the m *valid* votes of the turn. Invariants: zeros count as
votes, invalid votes do not. A turn without a valid vote has R_t = O. The parts are stored beside the sum, so that a
trainer can normalise them separately (``clawgym.trainers.algorithms.integrated_advantages``).
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
    """The reward of one turn, with its parts."""

    outcome: float
    """O, in [-1, 1]: the same for all turns of an episode."""
    votes: tuple[int | None, ...]
    """The judge's votes: +1, 0, -1, or None if invalid."""
    process: float | None
    """Mean of the valid votes, in [-1, 1]; None without any."""
    integrated: float
    """R_t, in [-2, 2]: outcome plus process, without penalties."""
    penalties: Mapping[str, float] = field(default_factory=dict)
    """Name -> penalty, 0 or less (``clawgym.rewards.penalties``)."""

    @property
    def total(self) -> float:
        """R_t plus the penalties."""
        return self.integrated + math.fsum(self.penalties.values())


def outcome_of(score: float) -> float:
    """O = 2 * score - 1, in [-1, 1], for a score in [0, 1], which may be partial.

    Raises :class:`ValueError` for other values: an episode without a grade has no outcome and must be left out.
    """
    if not 0 <= score <= 1:
        raise ValueError(f"score {score!r} is not in [0, 1]: leave out an episode that was not graded")
    return 2 * score - 1


def process_of(votes: Sequence[int | None], *, count_zeros: bool = True) -> float | None:
    """Mean of the valid votes, in [-1, 1]; ``None`` where there is none.

    ``count_zeros=False`` leaves zeros out of the mean, as the reference implementation does: then +1, 0, 0 is 1
    instead of 1/3, and a turn with zeros only has no process reward. Raises :class:`ValueError` for invalid votes.
    """
    valid = [vote for vote in _checked(votes) if vote or (count_zeros and vote is not None)]
    return math.fsum(valid) / len(valid) if valid else None


def majority(votes: Sequence[int | None]) -> int | None:
    """The majority of the valid votes, for binary RL only (one reward in {+1, -1} per turn, no outcome).

    A tie is 0, which has no effect on training. Without a valid vote it is None: the turn is unscored and not part of a
    batch. The integrated reward uses the mean instead, which keeps the certainty of the votes.
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
    """R_t, with its parts, of one turn of an episode with the given ``score`` in [0, 1].

    Raises :class:`ValueError` for an invalid score or vote, and for a penalty above 0.
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

    A turn without an entry in ``votes`` was not judged: R_t = O. Raises :class:`ValueError` for votes on a turn that is
    not in ``turns``.
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
