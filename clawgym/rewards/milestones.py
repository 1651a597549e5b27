"""Process rewards from the task's own verifier: how much of it passes after a turn, and not before.

Phi(s) is the mean score of the verifier's plain checks (:mod:`clawgym.rollout.milestones`). The process reward of
a turn is Phi(s') - Phi(s).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

__all__ = ["MILESTONES", "Credit", "milestone_rewards"]

Credit = Literal["turn", "return-to-go"]
MILESTONES = "milestones"
"""The name, in the pool, of the change of Phi by each turn, whatever the credit of the process rewards is."""


def milestone_rewards(
    progress: Sequence[float | None], *, credit: Credit = "turn", potential: bool = False
) -> dict[int, float]:
    """The process reward of each turn, by its index; turns whose progress is not known are left out.

    Args:
        progress: Phi before the first turn, and after each turn; None where it could not be measured.
        credit: ``turn``: Phi(s') - Phi(s) of the turn itself. ``return-to-go``: the sum of this and of all later turns.
        potential: count Phi of the end as 0. The rewards of an episode then sum to -Phi(s_0), whatever was done, so
            they do not change which policy is optimal: potential-based shaping without discount (Ng et al., "Policy
            invariance under reward transformations", ICML 1999, theorem 1).
    """
    values = list(progress)
    if potential and values:
        values[-1] = 0.0
    steps = {
        turn: after - before
        for turn, (before, after) in enumerate(pairwise(values))
        if before is not None and after is not None
    }
    if credit == "turn":
        return steps
    found: dict[int, float] = {}
    total = 0.0
    for turn in sorted(steps, reverse=True):
        total += steps[turn]
        found[turn] = total
    return dict(sorted(found.items()))
