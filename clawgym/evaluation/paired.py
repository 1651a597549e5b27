"""Differences between two runs over the same tasks: interval, test, and what could have been detected.

Invariants: one number per task (the difference of the two means over its samples), so samples of one task stay
together; the sign of the numbers says which run is ahead and swapping the runs swaps the signs and nothing else;
resampling is seeded. Formulas and sources are in ``docs/evaluation.md``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np

from clawgym.statistics import CONFIDENCE, bootstrap, student_t

__all__ = ["ALPHA", "POWER", "Difference", "detectable", "difference", "detectable_for_one", "sign_flip"]

ALPHA = 1 - CONFIDENCE
POWER = 0.8
_FLIPS = 20_000
_LEAST = 1e-9
"""What is nearer to 0 is rounding."""
_EXACT = 14
"""Up to so many tasks that differ, every combination of signs is counted."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The mean difference of one score over the tasks of two runs, second less first."""

    value: float
    low: float
    high: float
    p: float
    """Of :func:`sign_flip`."""
    tasks: int
    ahead: int
    """Tasks in which the second run is better."""
    behind: int
    detectable: float
    """The smallest true difference that this many tasks find in 80% of comparisons; :func:`detectable`."""
    method: str
    """How the interval was made: ``bootstrap`` or ``agresti-min``."""
    test: str
    """``mcnemar-exact``, ``sign-flip-exact`` or ``sign-flip``."""

    @property
    def told_apart(self) -> bool:
        """Whether the interval leaves out 0 and the test agrees; only then are two runs called different."""
        return not self.low <= 0 <= self.high and self.p < ALPHA


def difference(by_task: Sequence[float]) -> Difference:
    """The difference over at least two tasks; ``by_task`` holds one number in [-1, 1] for each, second less first."""
    n = len(by_task)
    if n < 2:
        raise ValueError(f"no difference over {n} task: give two or more")
    by_task = [0.0 if abs(d) < _LEAST else d for d in by_task]
    value = fmean(by_task)
    if max(by_task) - min(by_task) < 1e-12:
        low, high = _agresti_min(value, n)
        method = "agresti-min"
    else:
        low, high = _mirrored(by_task)
        method = "bootstrap"
    p, test = sign_flip(by_task)
    return Difference(
        value,
        max(-1.0, min(low, value)),
        min(1.0, max(high, value)),
        p,
        n,
        sum(d > 0 for d in by_task),
        sum(d < 0 for d in by_task),
        detectable(stdev(by_task), n, all(d in (-1, 0, 1) for d in by_task)),
        method,
        test,
    )


def _mirrored(by_task: Sequence[float]) -> tuple[float, float]:
    """:func:`bootstrap`, drawn alike for the values and for their negatives."""
    there, back = sorted(by_task), sorted(-d for d in by_task)
    if there >= back:
        return bootstrap(there)
    low, high = bootstrap(back)
    return -high, -low


def _agresti_min(value: float, n: int) -> tuple[float, float]:
    """Agresti and Min (2005): Wald's interval with half a pair added to each of the four cells.

    For differences that are all equal, where resampling would give no width.
    """
    total = n + 2
    centre = n * value / total
    error = math.sqrt(max(0.0, (n * value * value + 1) / total - centre * centre) / total)
    half = student_t((1 + CONFIDENCE) / 2, n + 1) * error
    return centre - half, centre + half


def sign_flip(by_task: Sequence[float]) -> tuple[float, str]:
    """The two-sided p-value of no difference, and the name of the test.

    If the two runs were the same, each task's difference would have had either sign with the same chance: p is the
    share of the sign patterns whose mean is as far from 0. Differences of one size make it McNemar's exact test
    (binomial over the tasks that differ). Otherwise all patterns are counted for up to 14 tasks that differ, else
    20,000 are drawn, the observed one among them (Phipson and Smyth 2010), which never gives 0.
    """
    by_task = [d for d in by_task if abs(d) >= _LEAST]
    sizes = np.sort(np.abs(by_task))
    m = len(sizes)
    if m == 0 or sizes[-1] - sizes[0] < _LEAST:
        fewer = min(sum(d > 0 for d in by_task), sum(d < 0 for d in by_task))
        return min(1.0, 2 * sum(math.comb(m, i) for i in range(fewer + 1)) / 2**m), "mcnemar-exact"
    seen = abs(math.fsum(by_task)) - _LEAST
    if m <= _EXACT:
        signs = 1 - 2 * (np.arange(2**m)[:, None] >> np.arange(m) & 1)
        return float(np.mean(np.abs(signs @ sizes) >= seen)), "sign-flip-exact"
    generator = np.random.default_rng(20_240_229)
    step = max(1, 2_000_000 // m)
    as_far = 0
    for start in range(0, _FLIPS - 1, step):
        signs = 1 - 2 * generator.integers(0, 2, size=(min(step, _FLIPS - 1 - start), m), dtype=np.int8)
        as_far += int(np.sum(np.abs(signs @ sizes) >= seen))
    return (1 + as_far) / _FLIPS, "sign-flip"


def detectable(deviation: float, tasks: int, zero_one: bool) -> float:
    """The smallest true difference that a paired comparison over ``tasks`` tasks finds with 80% power, at most 1.

    (t(0.975) + t(0.8)) * s / sqrt(n), with n - 1 degrees of freedom and ``deviation`` s of the per-task differences:
    Miller 2024 (arXiv 2411.00640), section 5, with t for z. Differences of -1, 0 and 1 (``zero_one``) with mean d
    vary at least by d(1 - d), so there no less than the solution of d² = c² d(1 - d) / n; likewise where s is 0.
    """
    c = student_t((1 + CONFIDENCE) / 2, tasks - 1) + student_t(POWER, tasks - 1)
    found = c * deviation / math.sqrt(tasks)
    if zero_one or deviation < 1e-12:
        found = max(found, c * c / (tasks + c * c))
    return min(1.0, found)


def detectable_for_one(task_means: Sequence[float]) -> float | None:
    """:func:`detectable` before there is a second run: it is taken to spread as this one and to share nothing.

    Two runs that find the same tasks hard share something, so the true figure is lower. ``None`` for under two tasks.
    """
    if len(task_means) < 2:
        return None
    zero_one = all(m in (0, 1) for m in task_means)
    return detectable(math.sqrt(2) * stdev(task_means), len(task_means), zero_one)
