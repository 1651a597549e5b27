"""Parsing votes and hints from a judge's text, and the scores of judgements.

Invariant: only the last line of the judge's answer is its vote. An answer without such a line, or a truncated one, is
invalid (None), never 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from clawgym.records.judge import Judgement, Vote
from clawgym.rewards.integrated import majority, process_of

__all__ = ["LONGEST_HINT", "SHORTEST_HINT", "hint_of", "rewards_of", "verdict_of"]

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
