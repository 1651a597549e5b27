"""Parsing votes and hints from a judge's text; the process reward of a turn from its votes.

Invariant: only the last line of the judge's answer is its vote. An answer without such a line, or a truncated one, is
invalid (None), never 0.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from clawgym.records.judge import Judgement, Vote

__all__ = ["LONGEST_HINT", "SHORTEST_HINT", "hint_of", "majority", "process_of", "rewards_of", "verdict_of"]

SHORTEST_HINT, LONGEST_HINT = 12, 800
"""Least and most characters of an accepted hint."""

_VERDICT = re.compile(r"Verdict: (\+1|0|-1)")
_VOTES: dict[str, Vote] = {"+1": 1, "0": 0, "-1": -1}


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


def rewards_of(
    judgements: Mapping[int, Judgement], *, by_majority: bool = False, count_zeros: bool = True
) -> tuple[dict[int, float], dict[int, dict[str, Any]]]:
    """Scores and judgements by turn, as arguments of :meth:`~clawgym.pool.Pool.set_turn_rewards`.

    The score is the mean of the votes (:func:`process_of`), or with ``by_majority`` their
    majority (:func:`majority`), for binary RL. Turns without a valid vote are left out.
    """
    given = {
        n: majority(j.votes) if by_majority else process_of(j.votes, count_zeros=count_zeros)
        for n, j in judgements.items()
    }
    scored: Sequence[tuple[int, float]] = [(n, value) for n, value in given.items() if value is not None]
    return dict(scored), {turn: judgements[turn].about() for turn, _ in scored}


def _checked(votes: Sequence[int | None]) -> Sequence[int | None]:
    for vote in votes:
        if vote is not None and (isinstance(vote, bool) or vote not in (-1, 0, 1)):
            raise ValueError(f"vote {vote!r} is not one of +1, 0, -1 and None: correct the judge")
    return votes
