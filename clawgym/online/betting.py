"""Bounds on a mean that stay valid when they are looked at after every new value, and the levels of many tests.

Invariants:

- A bound is wrong at any time, however often it is looked at, with probability at most its level. The values need
  only be bounded. They may be skewed, and their spread need not be known.
- A bound does not depend on the order of the values.
- The levels that :func:`spend` gives sum to less than its ``alpha``, for any number of tests.

``docs/concepts/promotion.md`` has formulas and sources.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["FRACTIONS", "SPREAD", "log_evidence", "lower_bound", "spend", "upper_bound", "within_reach"]

FRACTIONS = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Shares of the wealth that are bet on each value; the evidence is the mean over them."""
SPREAD = 20
"""The number of tests that get the first half of alpha (:func:`spend`)."""
_STEPS = 50
"""Bisections of a bound: to 2 / 2^50."""


def log_evidence(values: ArrayLike, mean: float = 0.0) -> float | NDArray[np.float64]:
    """Logarithm of the evidence (an e-value) that the true mean is above ``mean``.

    It is the wealth of a bettor who starts with 1 and bets the share f of it on each value x, at the odds
    (1 + x) / (1 + mean), averaged over f in :data:`FRACTIONS`. If the true mean, given everything before, is never
    above ``mean``, the wealth ever reaches 1 / alpha with probability at most alpha (Ville 1939).

    Args:
        values: numbers in [-1, 1]. The last axis has the values of one test; other axes are tests of their own.
        mean: in (-1, 1].

    Returns:
        A number, or an array of the shape of ``values`` without its last axis. 0 without values.

    Raises:
        ValueError: a value or the mean is out of range.
    """
    held = _checked(values)
    if not -1 < mean <= 1:
        raise ValueError(f"no evidence about a mean of {mean}: give a number above -1, at most 1")
    found = _log_evidence(held, mean)
    return float(found) if held.ndim == 1 else found


def lower_bound(values: ArrayLike, alpha: float) -> float:
    """The lower bound of the true mean of ``values``, in [-1, 1]: all smaller means have evidence of 1 / ``alpha``.

    -1 without values. Raises ValueError for a value outside of [-1, 1] and for an ``alpha`` outside of (0, 1).
    """
    held = _checked(values)
    if held.ndim != 1:
        raise ValueError(f"an array of shape {held.shape} has no single bound: give a list of numbers")
    if not 0 < alpha < 1:
        raise ValueError(f"alpha={alpha}: give a number between 0 and 1")
    if held.size == 0:
        return -1.0
    low, high = -1.0, float(np.clip(held.mean(), -1.0, 1.0))
    needed = -math.log(alpha)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if middle > -1 and _log_evidence(held, middle) < needed:
            high = middle
        else:
            low = middle
    return low


def upper_bound(values: ArrayLike, alpha: float) -> float:
    """The upper bound of the true mean, as :func:`lower_bound`. 1 without values."""
    return -lower_bound(-_checked(values), alpha)


def within_reach(values: ArrayLike, mean: float, alpha: float, most: int) -> bool:
    """Whether the lower bound would exceed ``mean`` with ``most`` values, if the others were like those in ``values``,
    and all of them better by two standard errors of their mean.

    An estimate that says when to give up. It makes no bound wrong, as it can only end a test that has not passed. True
    for fewer than two values. Raises ValueError as :func:`lower_bound` does.
    """
    held = _checked(values)
    if held.ndim != 1:
        raise ValueError(f"an array of shape {held.shape} has no single bound: give a list of numbers")
    if held.size < 2:
        return True
    lower = mean - 2 * float(held.std(ddof=1)) / math.sqrt(held.size)
    return lower <= -1 or float(_mean_of_logs(_log_wealth(held, lower) * most / held.size)) > -math.log(alpha)


def spend(number: int, alpha: float) -> float:
    """The level of the test with this ``number`` (from 1): alpha * c / ((k + c - 1)(k + c)), c = :data:`SPREAD`.

    The first K levels sum to alpha * K / (K + c), so all of them together to less than ``alpha``.
    """
    if number < 1 or not 0 < alpha < 1:
        raise ValueError(f"no level for test {number} with alpha={alpha}: give a number from 1 on and 0 < alpha < 1")
    return alpha * SPREAD / ((number + SPREAD - 1) * (number + SPREAD))


def _checked(values: ArrayLike) -> NDArray[np.float64]:
    held = np.asarray(values, dtype=float)
    if not (np.abs(held) <= 1).all():  # NaN is not
        raise ValueError("a value is not a number in [-1, 1]: give differences of scores in [0, 1]")
    return held


def _log_evidence(values: NDArray[np.float64], mean: float) -> NDArray[np.float64]:
    return _mean_of_logs(_log_wealth(values, mean))


def _log_wealth(values: NDArray[np.float64], mean: float) -> NDArray[np.float64]:
    """The logarithm of the wealth of each of :data:`FRACTIONS`, on the first axis."""
    odds = (1 + values) / (1 + mean)
    return np.stack([np.log(1 - f + f * odds).sum(axis=-1) for f in FRACTIONS])


def _mean_of_logs(logs: NDArray[np.float64]) -> NDArray[np.float64]:
    """The logarithm of the mean over the first axis of what ``logs`` are the logarithms of."""
    best = logs.max(axis=0)
    return best + np.log(np.exp(logs - best).mean(axis=0))
