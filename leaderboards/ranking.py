"""Ranking: entries over the same tasks, and ranks that say no more than the intervals do.

Invariants: entries over different task-set hashes are never in one ranking; two entries whose intervals
overlap differ in rank only if some third entry separates them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from clawgym.leaderboards.entries import SCORES, BoardEntry

__all__ = ["Board", "Ranked", "rank"]


@dataclass(frozen=True)
class Ranked:
    """An entry and its rank: one more than the number of entries that are surely better."""

    rank: int | None
    """``None``: this entry has no such score."""
    entry: BoardEntry


@dataclass(frozen=True)
class Board:
    """One ranking: entries over one task-set content."""

    task_set: str
    task_set_hash: str
    by: str
    entries: tuple[Ranked, ...]
    """Best first."""


def rank(entries: Iterable[BoardEntry], by: str = "strict") -> tuple[Board, ...]:
    """One board per task-set hash, in the order in which the hashes are met.

    An entry ranks behind another only if its interval lies wholly below the other's: entries that cannot be
    told apart share a rank.
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
