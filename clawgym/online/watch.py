"""Watching a promoted version: is it rated worse by users and judges than the version before?

Invariants:

- A version that is not rated worse is rolled back with probability at most ``alpha``, however often this is looked at.
- No single source and no single session can cause a rollback: the evidence without it must suffice.
- However many signals a source gives, it has one value in a period. A source without signals from before the promotion
  has none. A period counts if two sources or more gave signals.

``docs/concepts/promotion.md`` has the rules and their sources.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from clawgym.online.betting import log_evidence

__all__ = ["LiveSignal", "WatchDecision", "watch"]


@dataclass(frozen=True, slots=True)
class LiveSignal:
    """What one source said about one live turn: a thumb, or the vote of a judge."""

    source: str
    """Who or what gave it, such as ``user:7`` or ``judge:qwen``."""
    session: str
    turn: str
    value: int
    """-1, 0 or 1."""
    period: int
    """When it came, counted in periods such as hours."""

    def __post_init__(self) -> None:
        if self.value not in (-1, 0, 1):
            raise ValueError(f"{self.source}: a signal of {self.value} on turn {self.turn}: give -1, 0 or 1")


@dataclass(frozen=True, slots=True)
class WatchDecision:
    """Whether to roll back, with the figures and the reason in words."""

    verdict: Literal["keep", "rollback"]
    evidence: float
    """Evidence of a drop from all signals. 1 is none."""
    weakest: float | None
    """The least evidence without one source or one session; None if all of it does not suffice."""
    needed: float
    """1 / alpha. A rollback needs ``weakest`` to be at least this."""
    change: float | None
    """Mean of the periods' changes, in [-2, 2]; None without pairs of periods."""
    periods: int
    """Pairs of periods compared."""
    sources: int
    """Sources with signals before and after the promotion."""
    sessions: int
    """Sessions after the promotion with signals of these sources."""
    reason: str


def watch(
    before: Sequence[LiveSignal],
    after: Sequence[LiveSignal],
    now: int,
    *,
    alpha: float = 0.05,
    tolerance: float = 0.0,
) -> WatchDecision:
    """Compare the signals after a promotion with those before. May be called at the end of every period.

    Args:
        before: signals of the version that served before the promotion.
        after: signals of the promoted version.
        now: the present period, which does not count yet.
        alpha: probability of rolling back a version that is not rated worse by more than ``tolerance``.
        tolerance: the drop of the mean signal that is accepted, in [0, 2).

    Raises:
        ValueError: a setting is out of range, a source has two signals on one turn, or a period of ``after`` is not
            later than all of ``before``.
    """
    if not 0 < alpha < 1 or not 0 <= tolerance < 2:
        raise ValueError(f"alpha={alpha}, tolerance={tolerance}: give 0 < alpha < 1 and 0 <= tolerance < 2")
    for signals in (before, after):
        seen: set[tuple[str, str]] = set()
        for one in signals:
            if (one.source, one.turn) in seen:
                raise ValueError(f"{one.source} has two signals on turn {one.turn}: give the last one only")
            seen.add((one.source, one.turn))
    if before and after and min(one.period for one in after) <= max(one.period for one in before):
        raise ValueError("a signal after the promotion is in a period from before: begin a new period at the promotion")
    after = [one for one in after if one.period < now]
    needed = 1 / alpha
    changes = _Changes(before, after)
    evidence = _evidence(changes.values(), tolerance)
    weakest = _weakest(changes, tolerance, needed) if evidence >= needed else None
    values = changes.by_period()
    known = {one.source for one in before}
    counted = [one for one in after if one.source in known]
    verdict = "rollback" if weakest is not None and weakest >= needed else "keep"
    if verdict == "rollback":
        reason = f"the mean signal dropped by {-2 * values.mean():.2f}, also without any one source or session"
    elif weakest is not None:
        reason = "the mean signal dropped, but without one source or session the evidence does not suffice"
    elif not values.size:
        reason = "no period before and after the promotion has signals of two sources"
    else:
        reason = f"the evidence of a drop is {evidence:.2g}; {needed:.2g} is needed"
    return WatchDecision(
        verdict,
        evidence,
        weakest,
        needed,
        2 * float(values.mean()) if values.size else None,
        values.size,
        len({one.source for one in counted}),
        len({one.session for one in counted}),
        reason,
    )


class _Changes:
    """The change of each source in each pair of periods.

    The first period after the promotion is compared with the last one before it, the second with the last but one.
    Each period is used once, so that the pairs are independent.
    """

    def __init__(self, before: Sequence[LiveSignal], after: Sequence[LiveSignal]) -> None:
        self._sources = {name: column for column, name in enumerate(sorted({one.source for one in before}))}
        self._places: dict[str, set[tuple[int, int, int]]] = defaultdict(set)
        self._cells: dict[tuple[int, int, int], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        old, new = self._periods(before)[::-1], self._periods(after)
        pairs = min(len(old), len(new))
        self._table = np.full((2, pairs, len(self._sources)), np.nan)
        """(before and after, pairs of periods, sources): mean over the sessions of the mean signal; NaN without one."""
        for side, periods, signals in ((0, old, before), (1, new, after)):
            rows = {period: row for row, period in enumerate(periods[:pairs])}
            for one in signals:
                if one.period in rows and one.source in self._sources:
                    place = side, rows[one.period], self._sources[one.source]
                    self._cells[place][one.session].append(one.value)
                    self._places[one.session].add(place)
        for place in self._cells:
            self._table[place] = self._mean(place)

    @property
    def sessions(self) -> list[str]:
        """The sessions that count."""
        return sorted(self._places)

    def values(self, without: str | None = None) -> NDArray[np.float64]:
        """(pairs of periods, sources): half the change, in [-1, 1], without one session.

        NaN where a source is not in both periods.
        """
        table = self._table
        if without is not None:
            table = table.copy()
            for place in self._places[without]:
                table[place] = self._mean(place, without)
        return (table[1] - table[0]) / 2

    def by_period(self) -> NDArray[np.float64]:
        """Half the change of each pair of periods that has a source in both: the mean over its sources."""
        values = self.values()
        count = (~np.isnan(values)).sum(axis=1)
        return np.nansum(values, axis=1)[count > 0] / count[count > 0]

    def _periods(self, signals: Sequence[LiveSignal]) -> list[int]:
        """The periods in which at least two sources gave signals, so that no single one adds periods."""
        found: dict[int, set[str]] = defaultdict(set)
        for one in signals:
            if one.source in self._sources:
                found[one.period].add(one.source)
        return sorted(period for period, sources in found.items() if len(sources) > 1)

    def _mean(self, place: tuple[int, int, int], without: str | None = None) -> float:
        means = [sum(votes) / len(votes) for session, votes in self._cells[place].items() if session != without]
        return sum(means) / len(means) if means else math.nan


def _evidence(values: NDArray[np.float64], tolerance: float) -> float:
    """Evidence of a drop by more than ``tolerance``, from (pairs of periods, sources) of half the changes.

    A pair of periods has one value, the mean over its sources. The result is the mean of the evidence from all sources
    and of that without each one in turn. So one source that likes every new version cannot hide a drop that the others
    show.
    """
    held, known = np.nan_to_num(values), (~np.isnan(values)).astype(int)
    total, count = held.sum(axis=1, keepdims=True), known.sum(axis=1, keepdims=True)
    totals, counts = np.hstack([total, total - held]), np.hstack([count, count - known])  # (pairs, 1 + sources)
    means = np.clip(totals / np.maximum(counts, 1), -1, 1)
    drops = np.where(counts > 0, -means, tolerance / 2)  # no evidence without a source
    return float(np.exp(log_evidence(drops.T, tolerance / 2)).mean())


def _weakest(changes: _Changes, tolerance: float, needed: float) -> float:
    """The least evidence without one source or one session; the search ends at the first below ``needed``."""
    values = changes.values()
    views = chain(
        (np.delete(values, column, axis=1) for column in range(values.shape[1])),
        (changes.values(without=session) for session in changes.sessions),
    )
    weakest = math.inf
    for view in views:
        weakest = min(weakest, _evidence(view, tolerance))
        if weakest < needed:
            break
    return weakest
