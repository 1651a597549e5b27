"""The answer about a board, with the type ``Board`` of ``web/src/api.ts``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from clawgym.leaderboards.entries import SCORES, entry_of
from clawgym.leaderboards.ranking import rank
from clawgym.leaderboards.rendering import NOTES
from clawgym.records.run_folder import RunFolder
from clawgym.statistics import Estimate

__all__ = ["board_answer"]


def board_answer(runs: Sequence[tuple[str, RunFolder]], by: str) -> dict[str, Any]:
    """``Board`` of the answers, without ``id``: runs over the same tasks, ranked by the score ``by``.

    ``runs``: (id of the source, run). Raises ValueError if ``by`` is not one of
    :data:`~clawgym.leaderboards.entries.SCORES`."""
    entries = [(source, entry_of(run)) for source, run in runs]
    ids = {id(entry): source for source, entry in entries}
    (board,) = rank([entry for _, entry in entries], by)
    return {
        "task_set": board.task_set,
        "task_set_hash": board.task_set_hash,
        "by": board.by,
        "entries": [
            {
                "run": ids[id(one.entry)],
                "rank": one.rank,
                "name": one.entry.name,
                "folder": one.entry.run,
                **{
                    name: getattr(one.entry, name)
                    for name in ("agent", "agent_version", "model", "samples", "isolation", "library", "verified")
                },
                **{score: _estimate(one.entry.score(score)) for score in SCORES},
                "excluded": [dataclasses.asdict(group) for group in one.entry.excluded],
                "episodes": one.entry.summary.scores.episodes,
                "planned": one.entry.summary.planned,
                "infra_rate": one.entry.summary.infra_rate,
                "cost_per_solved": one.entry.summary.cost_per_solved,
                "tokens_per_solved": one.entry.summary.tokens_per_solved,
                "flags": list(one.entry.flags),
            }
            for one in board.entries
        ],
        "notes": list(NOTES),
    }


def _estimate(found: Estimate | None) -> dict[str, Any] | None:
    return None if found is None else dataclasses.asdict(found)
