"""The report of an experiment that compares arms: its curves and tables, in the page of ``clawgym view``.

Every function returns a part with the types of ``web/src/api.ts``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clawgym._version import __version__
from clawgym.reporting.page import mailable, source_answer, source_id

__all__ = ["chart", "experiment", "experiment_page", "line", "markdown", "table"]

Point = tuple[float, float, float, float]
"""x, mean, low, high."""


def line(name: str, points: Sequence[Point]) -> dict[str, Any]:
    """``Curve``: a line with its interval."""
    return {"name": name, **{axis: [point[n] for point in points] for n, axis in enumerate(("x", "y", "low", "high"))}}


def chart(
    title: str,
    lines: Sequence[dict[str, Any]],
    *,
    about: str = "",
    across: str = "session",
    low: float | None = None,
    high: float | None = None,
) -> dict[str, Any]:
    """``Curves``: a chart. ``across`` names the horizontal axis; ``low`` and ``high`` are the limits of the other."""
    return {"title": title, "about": about, "across": across, "from": low, "to": high, "lines": list(lines)}


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], about: str = "") -> dict[str, Any]:
    """``Grid``: a table of texts."""
    return {"title": title, "about": about, "columns": list(columns), "rows": [list(row) for row in rows]}


def markdown(grid: dict[str, Any]) -> str:
    """A table of :func:`table` as Markdown, without its title."""
    rows = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in grid["rows"]]
    lines = [grid["columns"], ["---"] * len(grid["columns"]), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def experiment(
    name: str,
    *,
    charts: Sequence[dict[str, Any]],
    tables: Sequence[dict[str, Any]],
    notes: Sequence[str] = (),
    about: Sequence[tuple[str, str]] = (),
) -> dict[str, Any]:
    """``Experiment``, without ``id``, ``path``, ``state`` and ``changed``."""
    return {"name": name, "about": list(about), "notes": list(notes), "charts": list(charts), "tables": list(tables)}


def experiment_page(answer: dict[str, Any]) -> str:
    """``report.html``: the page of :func:`experiment` as one file."""
    name = answer["name"]
    id, known = source_id(name, name), {"state": "unknown", "changed": 0.0}
    source = source_answer(id, "experiment", name, name, **known)
    answers = {
        "sources": {"library": __version__, "writable": False, "paths": [], "sources": [source], "problems": []},
        f"experiments/{id}": {**answer, "id": id, "path": name, **known},
    }
    return mailable(f"{name} · ClawGym experiment", f"/experiments/{id}", answers)
