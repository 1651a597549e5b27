"""The report of ``python benchmarks/personal.py``.

Invariant: every number is in ``results.json``, or is a mean of such numbers with its interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from clawgym.reporting.experiment import chart, experiment, line, markdown, table
from clawgym.statistics import CONFIDENCE, student_t

__all__ = [
    "COLUMNS",
    "Interval",
    "by_method",
    "cells_of",
    "curves",
    "format_interval",
    "hint_summary",
    "learning_curves",
    "over_seeds",
    "report",
    "report_answer",
    "tables",
]

COLUMNS = (
    *("method", "seeds", "before", "during training", "after", "change", "minus random votes"),
    *("all rules kept, after", "content, after", "sessions until stable"),
)
"""Of the table by method."""

Interval = tuple[float, float, float]
"""Mean, low, high."""
_BLOCKS = 6


def over_seeds(values: Sequence[float], *, least: float = 0.0) -> Interval:
    """The mean of one value per seed, each in [``least``, 1], with its 95 % interval (Student's t), clipped to that
    range. For one seed the interval has no width."""
    centre = fmean(values)
    if len(values) < 2:
        return centre, centre, centre
    half = student_t((1 + CONFIDENCE) / 2, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return centre, max(least, centre - half), min(1.0, centre + half)


def hint_summary(hints: Mapping[str, Any] | None) -> str:
    """Whether the policy uses hints, in words; the first paragraph of the report."""
    if hints is None:
        return "Whether the policy uses hints has not been measured yet."
    right, wrong = hints["right"], hints["wrong"]
    found = (
        f"A hint changes the log-prob of a reply that follows it by {_nats(right)}, and of a reply that does not by "
        f"{_nats(wrong)} ({right['requests']} held-out requests)."
    )
    if right["low"] > 0 > wrong["high"]:
        return f"{found} The policy uses hints, so it can be its own teacher."
    return f"{found} There is no evidence that the policy uses hints, so OPD cannot be tested with it."


def by_method(results: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Means over seeds, by method, as :data:`Interval`: ``before``, ``after``, ``learning`` (first replies of all
    training sessions), ``change``, ``right``, ``content``; ``against_random`` (the change minus that with random votes,
    same person). Also ``stable``: sessions until stable, for each seed."""
    cells = cells_of(results)
    control = {cell["seed"]: cell["change"]["value"] for cell in cells.get("random", ())}
    found: dict[str, dict[str, Any]] = {}
    for method, rows in cells.items():
        against = [row["change"]["value"] - control[row["seed"]] for row in rows if row["seed"] in control]
        found[method] = {
            "seeds": len(rows),
            "before": over_seeds([row["before"]["score"]["value"] for row in rows]),
            "after": over_seeds([row["after"]["score"]["value"] for row in rows]),
            "learning": over_seeds([fmean(row["first_replies"]) for row in rows]),
            "change": over_seeds([row["change"]["value"] for row in rows], least=-1.0),
            "right": over_seeds([row["after"]["right"]["value"] for row in rows]),
            "content": over_seeds([row["after"]["content"]["value"] for row in rows]),
            "against_random": over_seeds(against, least=-1.0) if against and method != "random" else None,
            "stable": [row["stable_after"] for row in rows],
            "ended": sum(row["ended"] is not None for row in rows),
        }
    return found


def learning_curves(cells: Mapping[str, Sequence[Mapping[str, Any]]], window: int) -> list[dict[str, Any]]:
    """The lines of a chart (:func:`~clawgym.reporting.experiment.line`): first replies while training.

    Each label has a line of means over its cells, which have one seed each, with the interval of :func:`over_seeds`; a
    point for each ``window`` sessions. A seed that ended early leaves the mean there."""
    lines = []
    for label, rows in cells.items():
        first = [row["first_replies"] for row in rows]
        points = []
        for end in range(window, max(map(len, first), default=0) + 1, window):
            means = [fmean(values[end - window : end]) for values in first if len(values) >= end]
            points.append((float(end), *over_seeds(means)))
        lines.append(line(label, points))
    return lines


def curves(title: str, cells: Mapping[str, Sequence[Mapping[str, Any]]], window: int) -> dict[str, Any]:
    """The chart of :func:`learning_curves`."""
    about = f"Means of {window} sessions and of the seeds, with 95 % intervals over the seeds (Student's t)."
    return chart(title, learning_curves(cells, window), about=about, low=0.0, high=1.0)


def cells_of(results: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    """Method -> its cells, by seed."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for cell in sorted(results["cells"], key=lambda cell: cell["seed"]):
        found.setdefault(cell["method"], []).append(cell)
    return found


def tables(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tables of the report: by method, by cell, and the course of each cell."""
    methods = [
        [
            method,
            str(row["seeds"]),
            f"{row['before'][0]:.2f}",
            format_interval(row["learning"]),
            format_interval(row["after"]),
            format_interval(row["change"], sign=True),
            "" if row["against_random"] is None else format_interval(row["against_random"], sign=True),
            format_interval(row["right"]),
            format_interval(row["content"]),
            ", ".join("never" if n is None else str(n) for n in row["stable"]),
        ]
        for method, row in by_method(results).items()
    ]
    cells = sorted(results["cells"], key=lambda cell: (cell["seed"], cell["method"]))
    each = [
        [
            f"{cell['method']}, seed {cell['seed']}",
            ", ".join(cell["rules"]),
            _of(cell["before"]["score"]),
            _of(cell["after"]["score"]),
            _of(cell["change"], sign=True),
            f"{cell['before']['content']['value']:.2f} to {cell['after']['content']['value']:.2f}",
            ", ".join(f"{name} {value:.2f}" for name, value in cell["after"]["rules"].items()),
        ]
        for cell in cells
    ]
    parts = [
        [f"{cell['method']}, seed {cell['seed']}", " ".join(_splits(cell["first_replies"])), cell["ended"] or ""]
        for cell in cells
    ]
    score = "The score of a first reply to a held-out request is the mean over the person's rules, times the share of "
    return [
        table("By method", COLUMNS, methods, f"{score}the content. Intervals (95 %) are over seeds (Student's t)."),
        table(
            "By cell",
            ("cell", "rules", "before", "after", "change", "content", "rules, after"),
            each,
            "Intervals (95 %) are over requests.",
        ),
        table(
            "During training",
            ("cell", "mean score of first replies", "ended early"),
            parts,
            "In consecutive parts of the sessions.",
        ),
    ]


def report(results: Mapping[str, Any]) -> str:
    """``report.md``."""
    parts = [f"## {grid['title']}\n\n{grid['about']}\n\n{markdown(grid)}" for grid in tables(results)]
    return "\n\n".join(["# Does the policy learn the person's style?", hint_summary(results["hints"]), *parts]) + "\n"


def report_answer(name: str, results: Mapping[str, Any], window: int) -> dict[str, Any]:
    """``Experiment`` of the answers of ``clawgym view``. ``window``: sessions of one training step.

    Without the curve of ``random``, which is a control."""
    shown = {method: rows for method, rows in cells_of(results).items() if method != "random"}
    return experiment(
        name,
        notes=[hint_summary(results["hints"])],
        charts=[curves("Score of first replies during training", shown, window)] if shown else [],
        tables=tables(results) if results["cells"] else [],
    )


def _splits(values: Sequence[float]) -> list[str]:
    size = max(1, math.ceil(len(values) / _BLOCKS))
    return [f"{fmean(values[start : start + size]):.2f}" for start in range(0, len(values), size)]


def _nats(found: Mapping[str, float]) -> str:
    return f"{found['nats']:+.2f} nats [{found['low']:+.2f}, {found['high']:+.2f}]"


def _of(found: Mapping[str, float], *, sign: bool = False) -> str:
    return format_interval((found["value"], found["low"], found["high"]), sign=sign)


def format_interval(found: Interval, *, sign: bool = False) -> str:
    """``value [low, high]`` with two digits each; only the value if the interval has no width."""
    form = "+.2f" if sign else ".2f"
    value, low, high = (format(number, form) for number in found)
    return value if low == high else f"{value} [{low}, {high}]"
