"""Render boards as a terminal table, Markdown or JSON.

Invariants: every flag of an entry is shown with its score. Names are escaped for the format.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from clawgym.evaluation.summary import JUDGED, SCORE_LABELS
from clawgym.leaderboards.entries import SCORES, BoardEntry
from clawgym.leaderboards.ranking import Board
from clawgym.statistics import Estimate
from clawgym.visible import visible

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["NOTES", "to_json", "to_markdown", "to_view"]

_COLUMNS = (
    *("rank", "agent", *(SCORE_LABELS[score] for score in SCORES), "k", "infrastructure errors"),
    *("tokens / solved", "$ / solved", "verified", "flags"),
)
_LEFT = ("agent", "flags")


def _percent(estimate: Estimate | None) -> str:
    if estimate is None:
        return "-"
    return f"{100 * estimate.value:.1f} [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"


def _cells(rank: int | None, entry: BoardEntry) -> list[str]:
    cost, tokens = entry.summary.cost_per_solved, entry.summary.tokens_per_solved
    return [
        "-" if rank is None else str(rank),
        entry.name,
        *(_percent(entry.score(by)) for by in SCORES),
        str(entry.samples),
        f"{100 * entry.summary.infra_rate:.1f}%",
        "-" if tokens is None else f"{tokens:,.0f}",
        "-" if cost is None else f"{cost:.4f}",
        entry.verified or "-",
        "; ".join(entry.flags),
    ]


def _notes(boards: Sequence[Board]) -> list[str]:
    verified = any(ranked.entry.verified for board in boards for ranked in board.entries)
    return [*NOTES[: 1 + (len(boards) > 1)], *([_VERIFIED] if verified else [])]


def _excluded(board: Board) -> list[tuple[str, int, str]]:
    return [
        (f"{ranked.entry.name}, {scores.name}", scores.episodes, _percent(scores.strict))
        for ranked in board.entries
        for scores in ranked.entry.excluded
    ]


NOTES = (
    "Scores are percentages with 95% intervals. Entries rank apart only if their paired difference is significant.",
    "Results over different task contents are never ranked together.",
)
_VERIFIED = (
    "Verified: results reproduced by grading the stored workspaces again, as recorded in the run folder; "
    "check it with `clawgym runs verify RUN`."
)
_EXCLUDED = (
    "Not in the strict score: tasks whose grader runs the agent's code (the agent could forge the result) or is a model"
)


def to_view(boards: Sequence[Board]) -> RenderableType:
    """Render for the terminal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[RenderableType] = []
    for board in boards:
        table = Table(title=Text(visible(board.title)), title_justify="left")
        for column in _COLUMNS[:6]:
            header = column.replace("-", "-\n")
            table.add_column(header, justify="left" if column in _LEFT else "right", overflow="fold")
        flags = []
        for ranked in board.entries:
            entry, cells = ranked.entry, _cells(ranked.rank, ranked.entry)
            agent = Text(visible(entry.name)) + Text("\n" + visible(entry.run), style="dim")
            if entry.verified:
                agent += Text(f"\nverified: {visible(entry.verified)}", style="dim")
            table.add_row(cells[0], agent, *(Text(cell.replace(" [", "\n[")) for cell in cells[2:6]))
            if entry.flags:
                flags.append(Text(visible(f"  {entry.name} ({entry.run}): {cells[-1]}"), style="yellow"))
        parts.append(table)
        parts.extend(flags)
        if excluded := _excluded(board):
            parts.append(Text(_EXCLUDED + ":"))
            parts.extend(Text(visible(f"  {name}: strict {score} over {n} episodes")) for name, n, score in excluded)
    parts.extend(Text(note, style="dim") for note in _notes(boards))
    return Group(*parts)


def to_markdown(boards: Sequence[Board]) -> str:
    """Render as Markdown."""
    out = []
    for board in boards:
        out += [f"## {_escape(board.title)}", "", "| " + " | ".join(_COLUMNS) + " |"]
        out.append("|" + "|".join(" --- " if column in _LEFT else " ---: " for column in _COLUMNS) + "|")
        out += [
            "| " + " | ".join(_escape(cell) for cell in _cells(ranked.rank, ranked.entry)) + " |"
            for ranked in board.entries
        ]
        out.append("")
        if excluded := _excluded(board):
            out += [f"{_EXCLUDED}:", ""]
            out += [f"- {_escape(name)}: strict {_escape(score)} over {n} episodes" for name, n, score in excluded]
            out.append("")
    out += [*_notes(boards), ""]
    return "\n".join(out)


def _escape(text: str) -> str:
    """Escape ``text`` so that Markdown shows it unchanged, on one line."""
    return re.sub(r"([\\`*_{}\[\]<>#|~&!])", r"\\\1", visible(" ".join(text.split())))


def to_json(boards: Sequence[Board]) -> list[dict[str, Any]]:
    """Render as JSON-ready data."""
    return [
        {
            "task_set": board.task_set,
            "task_set_hash": board.task_set_hash,
            "by": board.by,
            "entries": [{"rank": ranked.rank, **_entry_json(ranked.entry)} for ranked in board.entries],
        }
        for board in boards
    ]


def _entry_json(entry: BoardEntry) -> dict[str, Any]:
    def plain(estimate: Estimate | None) -> dict[str, Any] | None:
        return None if estimate is None else dataclasses.asdict(estimate)

    summary = entry.summary
    return {
        "name": entry.name,
        "run": entry.run,
        "agent": entry.agent,
        "agent_version": entry.agent_version,
        "model": entry.model,
        "samples": entry.samples,
        "seed": entry.seed,
        "isolation": entry.isolation,
        "library": entry.library,
        **{name: plain(entry.score(name)) for name in SCORES},
        "executes_agent_code": {group.name: plain(group.strict) for group in entry.excluded if group.name != JUDGED},
        "judged": next((plain(group.strict) for group in entry.excluded if group.name == JUDGED), None),
        "pass_at": {str(k): estimate.value for k, estimate in summary.pass_at.items()},
        "pass_hat": {str(k): estimate.value for k, estimate in summary.pass_hat.items()},
        "episodes": summary.scores.episodes,
        "planned": summary.planned,
        "infra_rate": summary.infra_rate,
        "infra_share": summary.infra_share,
        "infra_zero": {
            name: plain(None if summary.scores_infra_zero is None else getattr(summary.scores_infra_zero, name))
            for name in SCORES
        },
        "detectable": dict(summary.detectable),
        "tampered": len(summary.tampered),
        "cost_per_solved": summary.cost_per_solved,
        "tokens_per_solved": summary.tokens_per_solved,
        "verified": entry.verified or None,
        "flags": list(entry.flags),
    }
