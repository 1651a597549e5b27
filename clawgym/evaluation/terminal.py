"""Format summaries, comparisons and verifications for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from clawgym.evaluation.compare import Comparison
from clawgym.evaluation.progress import duration
from clawgym.evaluation.summary import SCORE_LABELS, Scores, Summary, percent, points
from clawgym.evaluation.verification import NOT_GRADABLE, SAME, Verification
from clawgym.records import Outcome
from clawgym.visible import visible

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["comparison_view", "summary_view", "verification_lines"]


def summary_view(summary: Summary, title: str) -> RenderableType:
    """A table of the scores in percent with 95% intervals, overall and by group, and notes below it."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(visible(title), style="bold"), title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("")
    for name in ("episodes", *SCORE_LABELS.values()):
        table.add_column(_wrapped(name), justify="right")

    def add(name: str, scores: Scores, *, last: bool = False, bold: bool = False) -> None:
        table.add_row(
            Text(visible(name)),
            str(scores.episodes),
            percent(scores.strict),
            percent(scores.official),
            percent(scores.corrected),
            end_section=last,
            style="bold" if bold else "",
        )

    add("all", summary.scores, last=True, bold=True)
    for dimension, groups in summary.groups.items():
        for group in groups:
            add(f"level {group.name}" if dimension == "level" else group.name, group, last=group is groups[-1])
    return Group(table, *(Text(visible(line)) for line in _lines(summary)))


def _lines(summary: Summary) -> list[str]:
    lines = summary.remarks()
    if summary.seconds:
        lines.append("time: " + ", ".join(f"{phase} {duration(s)}" for phase, s in summary.seconds.items()))
    return lines


def _wrapped(label: str) -> str:
    return label.replace("-", "-\n")


def comparison_view(comparison: Comparison) -> RenderableType:
    """A table of two runs side by side in percent, their difference in points, and notes below it."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    a, b = comparison.a, comparison.b
    title = f"{b.name} ({b.run}) against {a.name} ({a.run}): {comparison.tasks} tasks, paired"
    table = Table(title=Text(visible(title), style="bold"), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in ("first", "second", "change", "95% interval", "p"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("second is", no_wrap=True)
    for score, found in comparison.scores.items():
        table.add_row(
            _wrapped(SCORE_LABELS[score]),
            f"{100 * a.means[score]:.1f}",
            f"{100 * b.means[score]:.1f}",
            f"{100 * found.value:+.1f}",
            f"{100 * found.low:+.1f} to {100 * found.high:+.1f}",
            f"{found.p:.3f}" if found.p >= 0.001 else "<0.001",
            Text(
                comparison.verdict(score) if found.significant else "not different",
                style="bold" if found.significant else "dim",
            ),
        )
    detectable = points({score: found.detectable for score, found in comparison.scores.items()})
    lines = [f"minimum detectable difference (80% power), in points: {detectable}", *comparison.notes]
    for why, tasks in comparison.left_out.items():
        shown = ", ".join(task[:60] for task in tasks[:8]) + (f" and {len(tasks) - 8} more" if len(tasks) > 8 else "")
        lines.append(f"left out, {why}: {shown}")
    return Group(table, *(Text(visible(line)) for line in lines))


def verification_lines(record: Verification, shown: int = 20) -> list[str]:
    """The output of ``clawgym runs verify``: a line per finding, at most ``shown`` of a kind, then the verdict."""
    out: list[str] = []

    def some(lines: list[str]) -> None:
        out.extend(lines[:shown])
        if len(lines) > shown:
            out.append(f"  and {len(lines) - shown} more in verification.json")

    some([f"{key or 'the folder'}: {'; '.join(found)}" for key, found in record.discrepancies.items()])
    some(list(record.images))
    for outcome in record.counts:
        entries = {key: entry for key, entry in record.episodes.items() if entry["outcome"] == outcome}
        if outcome == NOT_GRADABLE:
            by_why: dict[str, list[str]] = {}
            for key, entry in entries.items():
                by_why.setdefault("; ".join(entry["why"]), []).append(key)
            for why, keys in by_why.items():
                some([f"{key}: {outcome}: {why}" for key in keys])
        elif outcome == SAME:
            some(
                [f"{key}: reproduced, but {'; '.join(entry['why'])}" for key, entry in entries.items() if entry["why"]]
            )
        else:
            label = _outcome_label(outcome)
            some([f"{key}: {label}: {'; '.join(entry['why'])}{_change(entry)}" for key, entry in entries.items()])
    return [*out, _verdict(record)]


def _verdict(record: Verification) -> str:
    """``verified: 47 of 47 results reproduced, 1 not re-gradable``."""
    counts = record.counts
    gradable = sum(counts.values()) - counts.get(NOT_GRADABLE, 0)
    parts = [f"{counts.pop(SAME, 0)} of {gradable} results reproduced"]
    parts += [f"{count} {_outcome_label(outcome)}" for outcome, count in counts.items()]
    if not record.complete:
        return f"unfinished: {', '.join(parts)}; run the same command again to resume"
    return f"{'verified' if record.agrees else 'not verified'}: {', '.join(parts)}"


def _outcome_label(outcome: str) -> str:
    return "infrastructure error" if outcome == Outcome.INFRA else outcome


def _change(entry: Mapping[str, Any]) -> str:
    """Format old and new scores: `` (strict 1 -> 0, official 1 -> 0.5; checks: a 1 -> 0)``."""
    old, new = entry.get("old"), entry.get("new")
    if not old or not new:
        return ""
    parts = [f"{name} {_number(old[name])} -> {_number(new[name])}" for name in old if _differs(old, new, name)]
    one, other = old["checks"] or {}, new["checks"] or {}
    changed = [n for n in dict.fromkeys([*one, *other]) if one.get(n) != other.get(n)]
    checks = [f"{name[:40]} {_number(one.get(name))} -> {_number(other.get(name))}" for name in changed[:6]]
    more = f" and {len(changed) - 6} more" if len(changed) > 6 else ""
    return " (" + ", ".join(parts) + (f"; checks: {', '.join(checks)}{more}" if checks else "") + ")"


def _differs(old: Mapping[str, Any], new: Mapping[str, Any], name: str) -> bool:
    return name != "checks" and old[name] != new[name]


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)[:40]
