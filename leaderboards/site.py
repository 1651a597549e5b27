"""A static site of a board: plain HTML, without scripts and without files of other sites.

Invariants: names and texts of entries are escaped. A page shows whether an entry was checked, and by which record.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from clawgym.errors import ClawGymError
from clawgym.evaluation.summary import SCORE_LABELS
from clawgym.leaderboards.boards import BoardFolder, LeaderboardError
from clawgym.leaderboards.check import UNPROVEN
from clawgym.leaderboards.entries import SCORES, BoardEntry, load_entry
from clawgym.leaderboards.ranking import Board, Ranked, rank
from clawgym.leaderboards.rendering import to_json
from clawgym.records.run_folder import RunFolder
from clawgym.statistics import Estimate
from clawgym.visible import visible_value

__all__ = ["ShownEntry", "build", "entries_of", "ranking_of"]

_WIDTH, _HEIGHT, _LEFT = 640, 200, 40


@dataclass(frozen=True)
class ShownEntry:
    """An entry of a board, with what is known about it."""

    name: str
    """The name of its folder."""
    entry: BoardEntry
    created: str
    """When its run started, as it says. ISO 8601."""
    record: dict[str, Any] | None
    """The record of its last check."""

    @property
    def status(self) -> str:
        """``checked``, ``refused`` or ``not checked``."""
        return "not checked" if self.record is None else "checked" if self.record.get("accepted") is True else "refused"


def entries_of(board: BoardFolder) -> tuple[list[ShownEntry], dict[str, str]]:
    """The entries of a board, and by name why others cannot be shown: they are damaged, or about other tasks."""
    shown: list[ShownEntry] = []
    left_out: dict[str, str] = {}
    for name in board.names:
        try:
            entry = load_entry(board.entry(name))
            if entry.task_set_hash != board.rules.task_set_hash:
                raise LeaderboardError("its results are about other tasks")
            created = str(RunFolder.read(board.entry(name)).manifest.created)
            record = board.record(name)
            shown.append(ShownEntry(name, entry, created[:25], None if record is None else dict(record)))
        except (ClawGymError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
            left_out[name] = str(error).split("\n")[0][:200]
    return shown, left_out


def ranking_of(shown: Sequence[ShownEntry]) -> tuple[Board | None, list[tuple[Ranked, ShownEntry]]]:
    """The ranking of the entries of a board by their strict score, best first. Refused entries have no rank."""
    ranked = rank([one.entry for one in shown if one.status != "refused"], "strict")
    top = ranked[0] if ranked else None
    by_entry = {id(one.entry): one for one in shown}
    return top, [(one, by_entry[id(one.entry)]) for one in (top.entries if top else ())]


def build(board: BoardFolder, out: Path) -> list[str]:
    """Write the site of a board into the folder ``out``; returns the names of the files.

    Refused entries are listed without a rank. Raises :class:`LeaderboardError` if ``out`` cannot be written.
    """
    shown, left_out = entries_of(board)
    top, lines = ranking_of(shown)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("clawgym.leaderboards", "."),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        finalize=visible_value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["percent"] = _percent
    common = {"rules": board.rules, "scores": [(name, SCORE_LABELS[name]) for name in SCORES], "unproven": UNPROVEN}
    pages = {
        "index.html": environment.get_template("board.html.j2").render(
            **common,
            lines=lines,
            refused=[one for one in shown if one.status == "refused"],
            left_out=left_out,
            matrix=_matrix(lines),
            history=_history(lines),
        )
    }
    for one in shown:
        pages[f"entries/{one.name}.html"] = environment.get_template("entry.html.j2").render(**common, one=one)
    data = to_json([top] if top else [])
    try:
        (out / "entries").mkdir(parents=True, exist_ok=True)
        for name, text in pages.items():
            (out / name).write_text(text, encoding="utf-8")
        (out / "board.json").write_text(json.dumps(data, indent=1) + "\n")
    except OSError as error:
        raise LeaderboardError(f"{out}: cannot be written ({error.strerror}): name another --out") from error
    return [*pages, "board.json"]


def _percent(estimate: Estimate | None) -> str:
    if estimate is None:
        return "-"
    return f"{100 * estimate.value:.1f} [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"


def _matrix(lines: Sequence[tuple[Ranked, ShownEntry]]) -> dict[str, Any]:
    """The best strict score of each model with each agent; a model's and an agent's own order is by best rank."""
    models = list(dict.fromkeys(one.entry.model or "(no model)" for _, one in lines))
    agents = list(dict.fromkeys(one.entry.agent for _, one in lines))
    cells: dict[tuple[str, str], tuple[Ranked, ShownEntry]] = {}
    for ranked, one in lines:
        cells.setdefault((one.entry.model or "(no model)", one.entry.agent), (ranked, one))
    return {"agents": agents, "rows": [(model, [cells.get((model, agent)) for agent in agents]) for model in models]}


def _history(lines: Sequence[tuple[Ranked, ShownEntry]]) -> dict[str, Any]:
    """The entries by date, with the best score so far, and the points of a chart."""
    dated = sorted(((one.created, one) for _, one in lines), key=lambda pair: (pair[0], pair[1].name))
    best, rows = -1.0, []
    for created, one in dated:
        score = one.entry.score("strict")
        leads = score is not None and score.value > best
        best = max(best, score.value if score else -1.0)
        rows.append({"created": created[:10], "one": one, "score": score, "leads": leads, "best": best})
    step = (_WIDTH - _LEFT - 20) / max(1, len(rows) - 1)
    points = [
        (round(_LEFT + n * step, 1), _height(row["score"].value), _height(row["score"].low), _height(row["score"].high))
        for n, row in enumerate(rows)
        if row["score"] is not None
    ]
    line = [(round(_LEFT + n * step, 1), _height(row["best"])) for n, row in enumerate(rows) if row["best"] >= 0]
    return {"rows": rows, "points": points, "line": line, "width": _WIDTH, "height": _HEIGHT}


def _height(value: float) -> float:
    value = value if math.isfinite(value) else 0.0
    return round(10 + (1 - min(1.0, max(0.0, value))) * (_HEIGHT - 30), 1)
