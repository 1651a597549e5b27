"""Paired differences between two runs over the same tasks: interval, test and minimum detectable difference.

Invariants:

- Each task gives one number, the difference of the two means over its samples. Samples of one task stay together.
- Swapping the two runs changes the signs of the results and nothing else.
- Resampling is seeded.

Formulas and sources are in ``docs/concepts/scores.md``.
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
_EPSILON = 1e-9
"""Differences below this are rounding errors."""
_MAX_EXACT = 14
"""With at most this many tasks that differ, the test enumerates all sign patterns."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The mean difference of one score over the tasks of two runs, second minus first, in [-1, 1]."""

    value: float
    low: float
    """Lower end of the 95% interval."""
    high: float
    p: float
    """Two-sided p-value of :func:`sign_flip`."""
    tasks: int
    ahead: int
    """Number of tasks in which the second run is better."""
    behind: int
    detectable: float
    """Minimum detectable difference with 80% power (:func:`detectable`)."""
    method: str
    """Method of the interval: ``bootstrap`` or ``agresti-min``."""
    test: str
    """Name of the test: ``mcnemar-exact``, ``sign-flip-exact`` or ``sign-flip``."""

    @property
    def significant(self) -> bool:
        """Whether the interval excludes 0 and the test rejects equality at 5%; only then are two runs called
        different."""
        return not self.low <= 0 <= self.high and self.p < ALPHA


def difference(by_task: Sequence[float]) -> Difference:
    """Estimate the mean difference. ``by_task`` holds one number in [-1, 1] per task, second run minus first.

    Raises ValueError for fewer than two tasks.
    """
    n = len(by_task)
    if n < 2:
        raise ValueError(f"a difference needs at least two tasks, not {n}")
    by_task = [0.0 if abs(d) < _EPSILON else d for d in by_task]
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
    """:func:`bootstrap`, with the same draws for the values and for their negatives."""
    there, back = sorted(by_task), sorted(-d for d in by_task)
    if there >= back:
        return bootstrap(there)
    low, high = bootstrap(back)
    return -high, -low


def _agresti_min(value: float, n: int) -> tuple[float, float]:
    """Agresti and Min (2005): Wald's interval with half a pair added to each of the four cells.

    For differences that are all equal, where the bootstrap interval would have width 0.
    """
    total = n + 2
    centre = n * value / total
    error = math.sqrt(max(0.0, (n * value * value + 1) / total - centre * centre) / total)
    half = student_t((1 + CONFIDENCE) / 2, n + 1) * error
    return centre - half, centre + half


def sign_flip(by_task: Sequence[float]) -> tuple[float, str]:
    """The two-sided p-value of no difference, and the name of the test.

    If the two runs were equal, each task's difference would be positive or negative with the same probability. The
    p-value is the share of sign patterns whose mean is at least as far from 0 as the observed one. If all differences
    have the same size, this is McNemar's exact test (binomial over the tasks that differ). Otherwise all patterns are
    enumerated for up to 14 tasks that differ. For more tasks 20,000 patterns are drawn, counting the observed one, so
    that p is never 0 (Phipson and Smyth 2010).
    """
    by_task = [d for d in by_task if abs(d) >= _EPSILON]
    sizes = np.sort(np.abs(by_task))
    m = len(sizes)
    if m == 0 or sizes[-1] - sizes[0] < _EPSILON:
        fewer = min(sum(d > 0 for d in by_task), sum(d < 0 for d in by_task))
        return min(1.0, 2 * sum(math.comb(m, i) for i in range(fewer + 1)) / 2**m), "mcnemar-exact"
    observed = abs(math.fsum(by_task)) - _EPSILON
    if m <= _MAX_EXACT:
        signs = 1 - 2 * (np.arange(2**m)[:, None] >> np.arange(m) & 1)
        return float(np.mean(np.abs(signs @ sizes) >= observed)), "sign-flip-exact"
    generator = np.random.default_rng(20_240_229)
    step = max(1, 2_000_000 // m)
    as_far = 0
    for start in range(0, _FLIPS - 1, step):
        signs = 1 - 2 * generator.integers(0, 2, size=(min(step, _FLIPS - 1 - start), m), dtype=np.int8)
        as_far += int(np.sum(np.abs(signs @ sizes) >= observed))
    return (1 + as_far) / _FLIPS, "sign-flip"


def detectable(deviation: float, tasks: int, zero_one: bool) -> float:
    """Minimum detectable difference: the smallest true difference that a paired comparison over ``tasks`` tasks finds
    significant with 80% power; at most 1.

    (t(0.975) + t(0.8)) * s / sqrt(n), with n - 1 degrees of freedom and ``deviation`` s of the per-task differences:
    Miller 2024 (arXiv 2411.00640), section 5, with t instead of z. Differences of -1, 0 and 1 (``zero_one``) with mean
    d have a variance of at least d(1 - d). The result is then at least the solution of d² = c² d(1 - d) / n; the same
    holds if s is 0.
    """
    c = student_t((1 + CONFIDENCE) / 2, tasks - 1) + student_t(POWER, tasks - 1)
    found = c * deviation / math.sqrt(tasks)
    if zero_one or deviation < 1e-12:
        found = max(found, c * c / (tasks + c * c))
    return min(1.0, found)


def detectable_for_one(task_means: Sequence[float]) -> float | None:
    """:func:`detectable` for one run, assuming a second run with the same variance and no correlation with it.

    Two runs usually find the same tasks hard and so are correlated. The true value is then lower: this is an upper
    bound. ``None`` for fewer than two tasks.
    """
    if len(task_means) < 2:
        return None
    zero_one = all(m in (0, 1) for m in task_means)
    return detectable(math.sqrt(2) * stdev(task_means), len(task_means), zero_one)
