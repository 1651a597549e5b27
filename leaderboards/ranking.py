"""Rank entries over the same tasks by their confidence intervals.

Invariants: entries with different task-set hashes are never ranked together. Two entries with overlapping intervals
differ in rank only if a third entry is better than one of them and not than the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from clawgym.leaderboards.entries import SCORES, BoardEntry

__all__ = ["Board", "Ranked", "rank"]


@dataclass(frozen=True)
class Ranked:
    """An entry and its rank: one plus the number of entries whose interval lies wholly above its own."""

    rank: int | None
    """``None`` if the entry does not have the score."""
    entry: BoardEntry


@dataclass(frozen=True)
class Board:
    """One ranking: the entries with one task-set hash."""

    task_set: str
    task_set_hash: str
    by: str
    """Name of the score."""
    entries: tuple[Ranked, ...]
    """Best first."""


def rank(entries: Iterable[BoardEntry], by: str = "strict") -> tuple[Board, ...]:
    """Make one board per task-set hash, in the order in which the hashes first appear.

    An entry ranks behind another only if its interval lies wholly below the other's. Raises ValueError if ``by`` is not
    one of :data:`~clawgym.leaderboards.entries.SCORES`.
    """
    if by not in SCORES:
        raise ValueError(f"cannot rank by {by!r}: choose one of {', '.join(SCORES)}")
    groups: dict[str, list[BoardEntry]] = defaultdict(list)
    for entry in entries:
        groups[entry.task_set_hash].append(entry)
    return tuple(
        Board(members[0].task_set, task_set_hash, by, tuple(_ranked(members, by)))
        for task_set_hash, members in groups.items()
    )


def _ranked(entries: list[BoardEntry], by: str) -> list[Ranked]:
    def better(one: BoardEntry, other: BoardEntry) -> bool:
        a, b = one.score(by), other.score(by)
        return a is not None and b is not None and a.low > b.high

    def order(entry: BoardEntry) -> tuple[float, str, str]:
        score = entry.score(by)
        return (-score.value if score else 1.0, entry.name, entry.run)

    return [
        Ranked(
            None if entry.score(by) is None else 1 + sum(better(other, entry) for other in entries),
            entry,
        )
        for entry in sorted(entries, key=order)
    ]
