"""The report of ``python benchmarks/personal.py``.

Invariant: every number is in ``results.json``, or is a mean of such numbers with its interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from clawgym.statistics import CONFIDENCE, student_t

__all__ = ["Interval", "by_method", "hint_summary", "learning_curves", "over_seeds", "report", "format_interval"]

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
    cells: dict[str, list[Mapping[str, Any]]] = {}
    for cell in sorted(results["cells"], key=lambda cell: cell["seed"]):
        cells.setdefault(cell["method"], []).append(cell)
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


def learning_curves(cells: Mapping[str, Sequence[Mapping[str, Any]]], window: int) -> tuple[list[Any], list[Any]]:
    """Lines and bands of a chart (:func:`~clawgym.trainers.common.report.curve`): first replies while training.

    Each label has a line of means over its cells, which have one seed each, and a band from the lowest to the highest
    seed; a point for each ``window`` sessions. A seed that ended early leaves the mean there."""
    lines, bands = [], []
    for label, rows in cells.items():
        first = [row["first_replies"] for row in rows]
        points: list[tuple[float, float, float, float]] = []
        for end in range(window, max(map(len, first), default=0) + 1, window):
            means = [fmean(values[end - window : end]) for values in first if len(values) >= end]
            points.append((end, fmean(means), min(means), max(means)))
        lines.append((label, [(x, y) for x, y, _, _ in points]))
        bands.append([(x, low, high) for x, _, low, high in points])
    return lines, bands


def report(results: Mapping[str, Any]) -> str:
    """``report.md``."""
    lines = [
        "# Does the policy learn the person's style?",
        "",
        hint_summary(results["hints"]),
        "",
        "The score of a first reply to a held-out request is the mean over the person's rules, times the share of the "
        "content.",
        "Intervals (95 %) are over seeds (Student's t) in the first table, over requests in the second.",
        "",
        "| method | seeds | before | during training | after | change | minus random votes | all rules kept, after | "
        "content, after | sessions until stable |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for method, row in by_method(results).items():
        against = "" if row["against_random"] is None else format_interval(row["against_random"], sign=True)
        stable = ", ".join("never" if n is None else str(n) for n in row["stable"])
        lines.append(
            f"| {method} | {row['seeds']} | {row['before'][0]:.2f} | {format_interval(row['learning'])} | "
            f"{format_interval(row['after'])} | "
            f"{format_interval(row['change'], sign=True)} | {against} | {format_interval(row['right'])} | "
            f"{format_interval(row['content'])} | "
            f"{stable} |"
        )
    lines += [
        "",
        "| cell | rules | before | after | change | content | rules, after |",
        "|---|---|---|---|---|---|---|",
    ]
    for cell in sorted(results["cells"], key=lambda cell: (cell["seed"], cell["method"])):
        rules = ", ".join(f"{name} {value:.2f}" for name, value in cell["after"]["rules"].items())
        lines.append(
            f"| {cell['method']}, seed {cell['seed']} | {', '.join(cell['rules'])} | {_of(cell['before']['score'])} | "
            f"{_of(cell['after']['score'])} | {_of(cell['change'], sign=True)} | "
            f"{cell['before']['content']['value']:.2f} to {cell['after']['content']['value']:.2f} | {rules} |"
        )
    lines += ["", "Mean score of first replies during training, in consecutive parts of the sessions:", ""]
    for cell in sorted(results["cells"], key=lambda cell: (cell["seed"], cell["method"])):
        lines.append(f"- {cell['method']}, seed {cell['seed']}: {' '.join(_splits(cell['first_replies']))}")
        if cell["ended"]:
            lines.append(f"  - ended early: {cell['ended']}")
    return "\n".join(lines) + "\n"


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
