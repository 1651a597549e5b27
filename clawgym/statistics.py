"""Means, rates and their confidence intervals; pass@k and pass^k.

Invariants: tasks are weighted equally, however many samples they have. Intervals are clustered by task, as samples of
one task are correlated. Every interval is within [0, 1] and contains its mean. Resampling is seeded and starts from
sorted values, so results do not depend on the order of rows. ``docs/concepts/scores.md`` has formulas and sources.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist, fmean, stdev

import numpy as np

__all__ = [
    "CONFIDENCE",
    "Estimate",
    "as_float",
    "bootstrap",
    "krippendorff_alpha",
    "mean",
    "pass_at_k",
    "pass_hat_k",
    "rate",
    "student_t",
    "wilson",
]

CONFIDENCE = 0.95
_RESAMPLES = 10_000
_AT_ONCE = 2_000_000
"""Most values drawn at once, to bound memory."""


def as_float(value: float | str) -> float:
    """``float(value)``; infinite for an integer that no float can hold, as JSON from outside may have it.

    Raises ValueError and TypeError as ``float`` does.
    """
    try:
        return float(value)
    except OverflowError:
        return math.inf


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over tasks with its 95 % confidence interval."""

    value: float
    low: float
    high: float
    tasks: int
    method: str
    """``wilson``, ``wilson-clustered`` or ``bootstrap``."""

    def overlaps(self, other: Estimate) -> bool:
        """Whether the two intervals share a point."""
        return self.low <= other.high and other.low <= self.high


def student_t(p: float, df: int) -> float:
    """Quantile of Student's t: exact for 1 and 2 degrees of freedom, else Abramowitz & Stegun 26.7.5."""
    if not 0 < p < 1 or df < 1:
        raise ValueError(f"no t quantile for p={p}, df={df}: give 0 < p < 1 and df >= 1")
    if df == 1:
        return math.tan(math.pi * (p - 0.5))
    if df == 2:
        return (2 * p - 1) / math.sqrt(2 * p * (1 - p))
    z = NormalDist().inv_cdf(p)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / df**power for power, term in enumerate(terms, 1))


def wilson(p: float, n: float) -> tuple[float, float]:
    """Wilson's (1927) score interval for an observed proportion ``p`` of ``n`` independent trials."""
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    shrink = 1 + z * z / n
    centre = (p + z * z / (2 * n)) / shrink
    half = z / shrink * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, min(p, centre - half)), min(1.0, max(p, centre + half))


def rate(by_task: Sequence[Sequence[float]]) -> Estimate | None:
    """A pass rate, with one inner sequence of 0/1 per task. None without tasks.

    With one sample per task: Wilson's interval. With more: Wilson's interval with the effective sample size p(1-p)/SE²,
    where SE is the standard error clustered by task, bounded by the numbers of tasks and samples.
    """
    by_task = [group for group in by_task if len(group)]
    if not by_task:
        return None
    means = [fmean(group) for group in by_task]
    tasks, samples = len(means), sum(len(group) for group in by_task)
    p = _unit(fmean(means))
    effective = float(tasks)
    if samples > tasks > 1 and 0 < p < 1:
        squared_error = stdev(means) ** 2 / tasks
        effective = samples if squared_error == 0 else p * (1 - p) / squared_error
        effective = min(max(effective, tasks), samples)
    return Estimate(p, *wilson(p, effective), tasks, "wilson" if samples == tasks else "wilson-clustered")


def mean(by_task: Sequence[Sequence[float]]) -> Estimate | None:
    """A mean of scores in [0, 1], with one inner sequence per task. None without tasks.

    The interval is the :func:`bootstrap` of the task means, so samples of one task stay together. If all task means are
    0 or 1, or all are equal, it is Wilson's interval instead: resampling equal values would give no width. Wilson's
    interval is valid for any variable in [0, 1], since none has more variance than a 0/1 variable of the same mean.
    """
    means = [fmean(group) for group in by_task if len(group)]
    if not means:
        return None
    value, tasks = _unit(fmean(means)), len(means)
    if max(means) - min(means) < 1e-12 or all(m in (0, 1) for m in means):
        return Estimate(value, *wilson(value, tasks), tasks, "wilson")
    low, high = bootstrap(means)
    return Estimate(value, max(0.0, min(low, value)), min(1.0, max(high, value)), tasks, "bootstrap")


def bootstrap(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the mean of two or more ``values``: Hesterberg's (2015) expanded percentile bootstrap.

    10,000 resamples with a fixed seed. The percentiles are those of the normal distribution at
    ``t(0.975, n - 1) * sqrt(n / (n - 1))`` instead of 1.96, which corrects the undercoverage of the plain percentile
    interval in small samples.
    """
    if len(values) < 2:
        raise ValueError("no bootstrap interval of one value: give two or more")
    return _bootstrap(tuple(sorted(map(float, values))))


@lru_cache(maxsize=256)  # the summary and the report of a run need the same values
def _bootstrap(values: tuple[float, ...]) -> tuple[float, float]:
    n = len(values)
    held = np.array(values)
    generator = np.random.default_rng(20_240_229)
    step = max(1, _AT_ONCE // n)
    means = np.concatenate(
        [
            held[generator.integers(0, n, size=(min(step, _RESAMPLES - start), n), dtype=np.uint32)].mean(axis=1)
            for start in range(0, _RESAMPLES, step)
        ]
    )
    tail = NormalDist().cdf(-student_t((1 + CONFIDENCE) / 2, n - 1) * math.sqrt(n / (n - 1)))
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of P(at least one of ``k`` samples passes) from ``c`` passes in ``n`` samples.

    1 - C(n-c, k) / C(n, k): Chen et al. 2021 (arXiv 2107.03374), equation 1.
    """
    _check(n, c, k)
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def pass_hat_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of P(all of ``k`` samples pass): C(c, k) / C(n, k), Yao et al. 2024 (arXiv 2406.12045)."""
    _check(n, c, k)
    return math.comb(c, k) / math.comb(n, k)


def krippendorff_alpha(units: Sequence[Sequence[float]]) -> float | None:
    """Agreement of the ratings within units: 1 if they are equal, about 0 if they are as far apart as those of
    different units, and negative if they are farther.

    Krippendorff's alpha 1 - D_o / D_e with squared differences (interval data). D_o is the mean difference within a
    unit, whose pairs of ratings have the weight 1 / (m - 1) for its m ratings; D_e is that of all pairs of ratings.
    Units may have any number of ratings; those with fewer than two are left out. ``None`` if there are no others, or
    if all ratings are equal. Source: K. Krippendorff, "Computing Krippendorff's Alpha-Reliability", 2011.
    """
    rated = [unit for unit in units if len(unit) > 1]
    ratings = [rating for unit in rated for rating in unit]
    expected = _squares(ratings)
    if not expected:
        return None
    observed = math.fsum(_squares(unit) / (len(unit) - 1) for unit in rated)
    return 1 - (len(ratings) - 1) * observed / expected


def _squares(ratings: Sequence[float]) -> float:
    """The sum of squared differences over ordered pairs."""
    if not ratings or min(ratings) == max(ratings):
        return 0.0
    middle = fmean(ratings)
    return 2 * len(ratings) * math.fsum((rating - middle) ** 2 for rating in ratings)


def _check(n: int, c: int, k: int) -> None:
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"no estimate for n={n}, c={c}, k={k}: give 0 <= c <= n and 1 <= k <= n")


def _unit(value: float) -> float:
    return min(1.0, max(0.0, value))
