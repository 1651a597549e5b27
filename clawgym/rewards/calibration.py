"""Measure whether process rewards agree with outcomes, and set their weight accordingly.

Invariants: episodes are weighted equally, whatever their number of turns, as all turns of an episode share its outcome.
Settings are never mixed. Every interval is within [0, 1] and contains its value.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from clawgym.evaluation.paired import ALPHA, Difference, difference
from clawgym.statistics import CONFIDENCE

__all__ = [
    "CLEAR",
    "WINDOW",
    "Calibration",
    "Judged",
    "auc",
    "auc_interval",
    "calibrate",
    "canary",
    "pearson",
    "risen",
    "spearman",
    "weight",
]

WINDOW = 256
"""Number of latest episodes of each setting that are used."""
CLEAR = 0.6
"""AUC from which on a judge clearly agrees with outcomes: three of five pairs in the right order."""


@dataclass(frozen=True, slots=True)
class Judged:
    """The process reward and the outcome of one episode."""

    setting: str
    """``terminal``, ``swe``, ...; the quality of a judge differs between settings."""
    process: float
    """Mean of the process rewards of its judged turns."""
    score: float
    """In [0, 1]."""
    solved: bool


@dataclass(frozen=True, slots=True)
class Calibration:
    """How far process rewards and outcomes agree in the latest episodes of one setting. None: undefined."""

    episodes: int
    solved: int
    auc: float | None
    """Probability that the judge rates a solved episode higher than an unsolved one."""
    interval: tuple[float, float]
    """95 % interval of the AUC; (0, 1) if it is undefined."""
    pearson: float | None
    """Correlation of process reward and score."""
    spearman: float | None
    """Rank correlation of process reward and score."""

    @property
    def weight(self) -> float:
        """See :func:`weight`."""
        return weight(self.interval)


def calibrate(episodes: Iterable[Judged], *, window: int = WINDOW) -> dict[str, Calibration]:
    """Calibrate each setting on the last ``window`` of its ``episodes``, which are given oldest first."""
    kept: dict[str, deque[Judged]] = {}
    for episode in episodes:
        kept.setdefault(episode.setting, deque(maxlen=window)).append(episode)
    seen = {}
    for setting, rows in kept.items():
        process, solved = [row.process for row in rows], [row.solved for row in rows]
        scores = [row.score for row in rows]
        area, n = auc(process, solved), sum(solved)
        interval = (0.0, 1.0) if area is None else auc_interval(area, n, len(rows) - n)
        seen[setting] = Calibration(len(rows), n, area, interval, pearson(process, scores), spearman(process, scores))
    return seen


def auc(scores: Sequence[float] | np.ndarray, solved: Sequence[bool] | np.ndarray) -> float | None:
    """Share of the pairs (solved, unsolved) in which the solved one has the higher score, ties a half.

    ``scores`` (n,), ``solved`` (n,) -> in [0, 1]; ``None`` without such a pair. The Mann-Whitney statistic over the
    number of pairs: Hanley and McNeil 1982, "The Meaning and Use of the Area under a ROC Curve".
    """
    values, positive = _pair(scores, solved)
    is_solved = positive.astype(bool)
    n, m = int(is_solved.sum()), int((~is_solved).sum())
    if not n or not m:
        return None
    return float((_ranks(values)[is_solved].sum() - n * (n + 1) / 2) / (n * m))


def auc_interval(area: float, solved: int, failed: int) -> tuple[float, float]:
    """95 % interval of an AUC from the numbers of solved and failed episodes.

    The ends are the A with (area - A)^2 = z^2 V(A), V(A) = A (1 - A) (1 + N (1 - A) / (2 - A) + N A / (1 + A)) /
    (solved * failed), N = (solved + failed) / 2 - 1. Source: Newcombe 2006, "Confidence intervals for an effect size
    measure based on the Mann-Whitney statistic", part 2, method 5. Unlike area +- z * error it is not empty when the
    two groups are fully separated, so that a single pair in the right order is no proof.
    """
    if not 0 <= area <= 1 or solved < 1 or failed < 1:
        raise ValueError(f"no interval for {area} of {solved} solved and {failed} failed: give an AUC and one of each")
    z, n = NormalDist().inv_cdf((1 + CONFIDENCE) / 2), (solved + failed) / 2 - 1

    def beyond(a: float) -> bool:
        variance = a * (1 - a) * (1 + n * (1 - a) / (2 - a) + n * a / (1 + a)) / (solved * failed)
        return (area - a) ** 2 > z * z * variance

    ends = []
    for out in (0.0, 1.0):
        inside = area
        for _ in range(60):
            middle = (inside + out) / 2
            inside, out = (inside, middle) if beyond(middle) else (middle, out)
        ends.append(inside)
    return ends[0], ends[1]


def weight(interval: tuple[float, float]) -> float:
    """The weight of the process reward, in [0, 1], given the interval of its AUC.

    It is the mean over the interval of a ramp from 0 at an AUC of 0.5 to 1 at :data:`CLEAR`. So it is 1 if the whole
    interval is clear agreement, 0 if all of it is chance or worse, and never falls when either end rises. Without
    evidence, (0, 1), it is 0.45; evidence for a random judge takes it to 0.
    """
    low, high = interval
    if not 0 <= low <= high <= 1:
        raise ValueError(f"interval {interval} is not within [0, 1]: give (low, high)")

    def area(x: float) -> float:  # of the ramp, from 0 to x
        climbed = min(max(x - 0.5, 0.0), CLEAR - 0.5)
        return climbed**2 / (2 * (CLEAR - 0.5)) + max(x - CLEAR, 0.0)

    if high - low < 1e-9:
        return min(1.0, max(0.0, (low - 0.5) / (CLEAR - 0.5)))
    return min(1.0, max(0.0, (area(high) - area(low)) / (high - low)))


def pearson(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Correlation in [-1, 1]; None for fewer than two values, or if one side is constant."""
    return _correlation(*_pair(a, b))


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """:func:`pearson` of the ranks; equal values share their mean rank."""
    x, y = _pair(a, b)
    return _correlation(_ranks(x), _ranks(y))


def canary(
    baseline: Mapping[str, Mapping[str, float]], now: Mapping[str, Mapping[str, float]]
) -> dict[str, Difference]:
    """Compare the scores of exploits and other no-work policies on the held-out split, before and now.

    Their scores should never rise: honest training raises only the score of the trained policy. A rise means that some
    exploit earns more reward than before. :func:`risen` says which differences are significant.

    Args:
        baseline: policy -> task -> score in [0, 1], before.
        now: the same, now.

    Returns:
        Policy -> difference over the tasks, positive if it earns more than before.

    Raises:
        ValueError: policies or tasks differ between the two.
    """
    if set(baseline) != set(now):
        raise ValueError(f"policies {sorted(set(baseline) ^ set(now))} are in one of the two only: run them again")
    moved = {}
    for policy, before in baseline.items():
        if set(before) != set(now[policy]):
            only = sorted(set(before) ^ set(now[policy]))[:3]
            raise ValueError(f"{policy}: tasks {only} are in one of the two only: run them again")
        moved[policy] = difference([now[policy][task] - before[task] for task in sorted(before)])
    return moved


def risen(moved: Mapping[str, Difference]) -> tuple[str, ...]:
    """The policies of :func:`canary` whose score has risen significantly.

    The interval is above 0, and p is below 0.05 divided by the number of policies (Bonferroni).
    """
    return tuple(policy for policy, d in moved.items() if d.value > 0 and d.significant and d.p < ALPHA / len(moved))


def _pair(a: Sequence[float] | np.ndarray, b: Sequence[float] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    x, y = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    if x.shape != y.shape or x.ndim != 1:
        raise ValueError(f"{x.shape} and {y.shape} values: give two lists of one length")
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise ValueError("a value is not finite: leave out episodes that were not judged or not graded")
    return x, y


def _correlation(x: np.ndarray, y: np.ndarray) -> float | None:
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    x, y = x - x.mean(), y - y.mean()
    below = math.sqrt(float(x @ x)) * math.sqrt(float(y @ y))
    return max(-1.0, min(1.0, float(x @ y) / below)) if below else None


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1; equal values share their mean rank."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[which]
