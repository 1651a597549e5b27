"""Rank entries over the same tasks by their paired differences.

Invariants: entries with different task-set hashes are never ranked together. Two entries whose difference is not
significant differ in rank only if a third entry is better than one of them and not than the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from clawgym.evaluation.compare import MIN_TASKS
from clawgym.evaluation.paired import difference
from clawgym.evaluation.summary import SCORE_LABELS, percent, score_columns
from clawgym.frames import Preview, Table, Tabular
from clawgym.leaderboards.entries import SCORES, BoardEntry

__all__ = ["Board", "Ranked", "better", "rank"]


@dataclass(frozen=True)
class Ranked:
    """An entry and its rank: one plus the number of entries that are significantly better."""

    rank: int | None
    """``None`` if the entry does not have the score."""
    entry: BoardEntry


_COLUMNS = (
    *("rank", "name", "run", "agent", "agent_version", "model", "samples", "episodes", *score_columns({})),
    *("infra_rate", "tokens_per_solved", "cost_per_solved", "verified", "flags"),
)
"""The columns of the table of a board."""


@dataclass(frozen=True)
class Board(Tabular):
    """One ranking: the entries with one task-set hash."""

    task_set: str
    task_set_hash: str
    by: str
    """Name of the score."""
    entries: tuple[Ranked, ...]
    """Best first."""

    @property
    def title(self) -> str:
        """The task set, and the score that decides."""
        about = f"{self.task_set or 'unnamed tasks'} ({self.task_set_hash[:12]})"
        return f"{about}, ranked by {SCORE_LABELS[self.by]} score"

    def _rows(self) -> Iterator[dict[str, Any]]:
        for one in self.entries:
            entry, summary = one.entry, one.entry.summary
            named = ("name", "run", "agent", "agent_version", "model", "samples", "verified")
            yield {
                "rank": one.rank,
                **{name: getattr(entry, name) for name in named},
                "episodes": summary.scores.episodes,
                **score_columns({name: entry.score(name) for name in SCORES}),
                **{name: getattr(summary, name) for name in ("infra_rate", "tokens_per_solved", "cost_per_solved")},
                "flags": "; ".join(entry.flags),
            }

    def _tables(self) -> Mapping[str, Callable[[], Table]]:
        return {"entries": lambda: Table.of(self._rows(), _COLUMNS)}

    def _preview(self) -> Preview:
        rows = (
            (row["rank"], row["name"], *(percent(one.entry.score(name)) for name in SCORES), row["flags"])
            for one, row in zip(self.entries, self._rows(), strict=True)
        )
        table = Table(("rank", "agent", *(SCORE_LABELS[name] for name in SCORES), "flags"), rows)
        return Preview(self.title, (), table, len(self.entries))


def rank(entries: Iterable[BoardEntry], by: str = "strict") -> tuple[Board, ...]:
    """Make one board per task-set hash, in the order in which the hashes first appear.

    An entry ranks behind another only if the other is better, see :func:`better`. Raises ValueError if ``by`` is not
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


def better(one: BoardEntry, other: BoardEntry, by: str) -> bool:
    """Whether ``one`` is significantly better: by the paired difference over the tasks that both have
    (:attr:`Difference.significant <clawgym.evaluation.paired.Difference.significant>`). With fewer than six common
    tasks no difference can be significant; then the whole interval must lie above the other's."""
    a, b = one.means.get(by, {}), other.means.get(by, {})
    common = [task for task in a if task in b]
    if len(common) >= MIN_TASKS:
        found = difference([a[task] - b[task] for task in common])
        return found.significant and found.value > 0
    high, low = one.score(by), other.score(by)
    return high is not None and low is not None and high.low > low.high


def _ranked(entries: list[BoardEntry], by: str) -> list[Ranked]:
    def order(entry: BoardEntry) -> tuple[float, str, str]:
        score = entry.score(by)
        return (-score.value if score else 1.0, entry.name, entry.run)

    return [
        Ranked(None if entry.score(by) is None else 1 + sum(better(other, entry, by) for other in entries), entry)
        for entry in sorted(entries, key=order)
    ]
