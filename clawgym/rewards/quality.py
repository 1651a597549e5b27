"""How well scores of turns agree with what the turns achieved: AUC, Brier score and calibration error.

Invariants: AUC compares turns of the same family only, so a score that merely recognises families has 0.5. Intervals
are bootstrapped over tasks, as turns and episodes of one task are correlated, with a fixed seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from clawgym.rewards.calibration import auc
from clawgym.statistics import CONFIDENCE

__all__ = ["Interval", "Quality", "null_auc", "qualities"]

_RESAMPLES, _BINS = 1000, 10


@dataclass(frozen=True, slots=True)
class Interval:
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, slots=True)
class Quality:
    """How good the scores of one model are."""

    auc: Interval | None
    """Probability that a turn with progress has a higher score than one of its family without."""
    brier: Interval | None = None
    """Mean squared difference of score and target; 1 for progress, 0 for its loss, else 1/2."""
    ece: Interval | None = None
    """Expected calibration error: mean difference of score and target in ten groups of equal size, by score."""
    table: tuple[tuple[int, float, float], ...] = ()
    """Reliability: number of turns, mean score and mean target of each group."""
    gain: Interval | None = None
    """The first model's AUC minus this one's, on the same resamples."""

    def about(self) -> dict[str, object]:
        """As JSON data."""
        return asdict(self)


def null_auc(scores: Sequence[np.ndarray], targets: np.ndarray, families: Sequence[str]) -> Interval | None:
    """The mean AUC of several models' ``scores`` (N,), with the range of 95 % of them; None if it is undefined."""
    kinds = np.unique(np.asarray(families), return_inverse=True)[1]
    found = [_auc(of, targets > 0.5, kinds) for of in scores]
    areas = [area for area in found if area is not None]
    if not areas:
        return None
    low, high = np.quantile(areas, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(float(np.mean(areas)), float(low), float(high))


def qualities(
    scores: Mapping[str, np.ndarray], targets: np.ndarray, families: Sequence[str], tasks: Sequence[str]
) -> dict[str, Quality]:
    """The quality of each model's ``scores`` (N,) for turns with ``targets`` (N,) in {0, 1/2, 1}."""
    kinds = np.unique(np.asarray(families), return_inverse=True)[1]
    samples = _resamples(tasks)
    areas = {
        name: _estimates(lambda at, of=of: _auc(of[at], targets[at] > 0.5, kinds[at]), samples, len(targets))
        for name, of in scores.items()
    }
    first = next(iter(areas.values()))
    found = {}
    for name, of in scores.items():
        error = (of - targets) ** 2
        found[name] = Quality(
            _interval(areas[name]),
            _interval(_estimates(lambda at, e=error: float(e[at].mean()), samples, len(targets))),
            _interval(_estimates(lambda at, of=of: _ece(of[at], targets[at]), samples, len(targets))),
            tuple(_table(of, targets)),
            None if areas[name] is first else _interval(first - areas[name]),
        )
    return found


def _resamples(tasks: Sequence[str]) -> list[np.ndarray]:
    """Indices of turns: those of as many tasks as there are, drawn with replacement."""
    which = np.unique(np.asarray(tasks), return_inverse=True)[1]
    members = [np.flatnonzero(which == n) for n in range(which.max(initial=-1) + 1)]
    generator = np.random.default_rng(20_240_229)
    return [
        np.concatenate([members[n] for n in generator.integers(0, len(members), len(members))])
        for _ in range(_RESAMPLES if members else 0)
    ]


def _estimates(of: Callable[[np.ndarray], float | None], samples: Sequence[np.ndarray], turns: int) -> np.ndarray:
    """(1 + resamples,) the estimate, then that of each resample; NaN where it is undefined."""
    found = [of(at) for at in (np.arange(turns), *samples)]
    return np.array([np.nan if value is None else value for value in found])


def _interval(estimates: np.ndarray) -> Interval | None:
    value, drawn = float(estimates[0]), estimates[1:][np.isfinite(estimates[1:])]
    if not np.isfinite(value) or not len(drawn):
        return None
    low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(value, min(value, float(low)), max(value, float(high)))


def _auc(scores: np.ndarray, good: np.ndarray, kinds: np.ndarray) -> float | None:
    right = pairs = 0.0
    for kind in np.unique(kinds):
        at = kinds == kind
        count = int(good[at].sum()) * int((~good[at]).sum())
        if count:
            right += count * (auc(scores[at], good[at]) or 0.0)
            pairs += count
    return right / pairs if pairs else None


def _table(scores: np.ndarray, targets: np.ndarray) -> list[tuple[int, float, float]]:
    order = np.argsort(scores, kind="stable")
    groups = np.array_split(order, min(_BINS, len(order)))
    return [(len(g), float(scores[g].mean()), float(targets[g].mean())) for g in groups if len(g)]


def _ece(scores: np.ndarray, targets: np.ndarray) -> float:
    table = _table(scores, targets)
    return sum(n * abs(score - target) for n, score, target in table) / len(scores)
