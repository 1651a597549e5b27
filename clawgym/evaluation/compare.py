"""Compare two runs over the same tasks, paired by task (``clawgym runs compare``).

Invariants:

- A task is compared only if both runs attempted the same content and graded it with the same verifier. The tasks that
  are left out are listed with the reason.
- Two runs are called different only if :attr:`Difference.significant`.
- Too many infrastructure errors, or too few common tasks, raise :class:`ComparisonRefused`.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clawgym.errors import ComparisonRefused
from clawgym.evaluation.paired import ALPHA, Difference, difference
from clawgym.evaluation.summary import Summary, graded_by_task, summarize_rows, task_means
from clawgym.frames import Preview, Table, Tabular
from clawgym.records.run_folder import RunFolder

__all__ = ["MAX_INFRA_SHARE", "MIN_TASKS", "Comparison", "Side", "compare", "compare_runs"]

MAX_INFRA_SHARE = 0.02
"""Largest share of episodes that may lack a result because of infrastructure errors. Above it, the missing episodes
may bias the comparison."""
MIN_TASKS = 6
"""With fewer tasks no difference can be significant, whatever the results: 2 * 0.5**5 > 0.05."""
SCORES = ("strict", "official", "corrected")


@dataclass(frozen=True)
class Side:
    """One of the two runs."""

    name: str
    """Agent, and the model if the agent uses one."""
    run: str
    """Name of the run folder."""
    samples: int
    means: Mapping[str, float]
    """By score: the mean over the compared tasks."""
    infra_share: float
    """Share of the attempted episodes whose last attempt ended by an infrastructure error."""
    missing: int
    """Number of episodes of the whole run that have no result."""


_COLUMNS = (
    *("score", "first", "second", "difference", "low", "high", "p"),
    *("tasks", "ahead", "behind", "detectable", "verdict"),
)
"""The columns of the table of a comparison."""


@dataclass(frozen=True)
class Comparison(Tabular):
    """Run ``b`` against run ``a``; a positive difference means that ``b`` is better."""

    a: Side
    b: Side
    tasks: int
    scores: Mapping[str, Difference]
    """By score. ``corrected``, the baseline-adjusted score, only over tasks with a known no-model baseline."""
    left_out: Mapping[str, tuple[str, ...]]
    """Reason -> ids of the tasks that were not compared."""
    notes: tuple[str, ...]
    """Other differences between the two runs that a reader should know."""

    def verdict(self, score: str) -> str:
        """Whether ``b`` is ``better``, ``worse`` or ``not told apart`` (no significant difference)."""
        found = self.scores[score]
        if not found.significant:
            return "not told apart"
        return "better" if found.value > 0 else "worse"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready data."""
        raw = dataclasses.asdict(self)
        for name, found in self.scores.items():
            raw["scores"][name] |= {"told_apart": found.significant, "verdict": self.verdict(name)}
        return raw | {"alpha": round(ALPHA, 10), "power": 0.8}

    def _rows(self) -> Iterator[tuple[Any, ...]]:
        for name, found in self.scores.items():
            change = (found.value, found.low, found.high, found.p)
            counts = (found.tasks, found.ahead, found.behind, found.detectable)
            yield (name, self.a.means[name], self.b.means[name], *change, *counts, self.verdict(name))

    def _tables(self) -> Mapping[str, Callable[[], Table]]:
        return {
            "scores": lambda: Table(_COLUMNS, self._rows()),
            "left_out": lambda: Table(
                ("task", "reason"), ((task, why) for why, tasks in self.left_out.items() for task in tasks)
            ),
        }

    def _preview(self) -> Preview:
        title = f"{self.b.name} ({self.b.run}) against {self.a.name} ({self.a.run}): {self.tasks:,} tasks, paired"
        left_out = [f"left out, {why}: {len(tasks):,} tasks" for why, tasks in self.left_out.items()]
        return Preview(title, [*self.notes, *left_out], Table(_COLUMNS, self._rows()), len(self.scores))


def compare(a: str | Path, b: str | Path) -> Comparison:
    """Compare two run folders.

    Raises :class:`~clawgym.errors.ComparisonRefused` if more than 2% of either run's episodes ended by an
    infrastructure error, if fewer than six tasks can be paired, or if results were not graded by the verifier that the
    run manifest names. Raises :class:`~clawgym.errors.RunFolderError` if ``a`` or ``b`` is not a run folder.
    """
    return compare_runs(RunFolder.read(a), RunFolder.read(b))


def compare_runs(a: RunFolder, b: RunFolder, summaries: Sequence[Summary] | None = None) -> Comparison:
    """:func:`compare` of two folders that were read already, and summarized if ``summaries`` is given."""
    runs = a, b
    names = _names(*runs)
    if summaries is None:
        summaries = [summarize_rows(run.manifest, run.rows) for run in runs]
    for name, run, summary in zip(names, runs, summaries, strict=True):
        _check_infra(name, summary)
        _check_verifiers(name, run)
    kept, left_out = _pairs(*runs)
    if len(kept) < MIN_TASKS:
        raise ComparisonRefused(
            f"{names[0]} and {names[1]} share {len(kept)} graded tasks; a significant difference needs at least "
            f"{MIN_TASKS}{_why(left_out)}: run both on the same version of the same tasks"
        )
    graded = [
        {task: rows for task, rows in graded_by_task(run.manifest, run.rows).items() if task in kept} for run in runs
    ]
    scores: dict[str, Difference] = {}
    means: list[dict[str, float]] = [{}, {}]
    for score in SCORES:
        pair = [task_means(rows, score) for rows in graded]
        tasks = [task for task in kept if task in pair[0] and task in pair[1]]
        if score == "corrected":
            tasks = [task for task in tasks if _same_baseline(runs, task)]
        if len(tasks) < MIN_TASKS:
            continue
        scores[score] = difference([pair[1][task] - pair[0][task] for task in tasks])
        for side in (0, 1):
            means[side][score] = sum(pair[side][task] for task in tasks) / len(tasks)
    sides = [
        Side(run.manifest.label, name, run.manifest.samples, mean, summary.infra_share, len(summary.missing))
        for run, name, mean, summary in zip(runs, names, means, summaries, strict=True)
    ]
    notes = _notes(runs, names, summaries, kept, scores)
    return Comparison(sides[0], sides[1], len(kept), scores, left_out, tuple(notes))


def _names(a: RunFolder, b: RunFolder) -> tuple[str, str]:
    """The names of the folders, or their paths if the names are equal."""
    one, other = a.path.resolve(), b.path.resolve()
    return (one.name, other.name) if one.name != other.name else (str(a.path), str(b.path))


def _check_infra(name: str, summary: Summary) -> None:
    if summary.infra_share > MAX_INFRA_SHARE:
        attempted = summary.scores.episodes + summary.infra_episodes
        raise ComparisonRefused(
            f"{name}: {summary.infra_episodes} of {attempted} episodes ({100 * summary.infra_share:.1f}%) ended by an "
            f"infrastructure error; above {100 * MAX_INFRA_SHARE:g}% the missing episodes may bias the comparison: "
            f"fix the cause ({next(iter(summary.infra_causes), 'unknown')[:80]}), then run the same `clawgym eval` "
            "command again to run these episodes again"
        )


def _check_verifiers(name: str, run: RunFolder) -> None:
    for task, rows in graded_by_task(run.manifest, run.rows).items():
        for row in rows:
            about = run.manifest.tasks[task]
            used = (row["result"] or {}).get("verifier_hash")
            if row.get("task_hash") != about["hash"] or (used and used != about.get("verifier")):
                raise ComparisonRefused(
                    f"{name}: the result of {row['key']} was graded by a verifier, or on a task, that the run manifest "
                    f"does not list: check it with `clawgym runs verify {run.path}`, or run it again in another folder"
                )


def _pairs(a: RunFolder, b: RunFolder) -> tuple[list[str], dict[str, tuple[str, ...]]]:
    """The ids of the tasks to compare, and the others by the reason why they are left out."""
    graded = [graded_by_task(run.manifest, run.rows) for run in (a, b)]
    kept: list[str] = []
    out: dict[str, list[str]] = defaultdict(list)
    for task in dict.fromkeys([*a.manifest.tasks, *b.manifest.tasks]):
        one, other = a.manifest.tasks.get(task), b.manifest.tasks.get(task)
        if one is None or other is None:
            out["only in the " + ("second" if one is None else "first")].append(task)
        elif one.get("verifier") != other.get("verifier"):
            out["verifiers differ"].append(task)
        elif one["hash"] != other["hash"]:
            out["tasks differ"].append(task)
        elif task not in graded[0] or task not in graded[1]:
            lacking = [name for name, rows in zip(("the first", "the second"), graded, strict=True) if task not in rows]
            out["no result in " + " and ".join(lacking)].append(task)
        else:
            kept.append(task)
    return kept, {why: tuple(tasks) for why, tasks in out.items()}


def _why(left_out: Mapping[str, tuple[str, ...]]) -> str:
    return f" ({'; '.join(f'{why}: {len(tasks)}' for why, tasks in left_out.items())})" if left_out else ""


def _same_baseline(runs: tuple[RunFolder, RunFolder], task: str) -> bool:
    return runs[0].manifest.tasks[task].get("floor") == runs[1].manifest.tasks[task].get("floor")


def _notes(
    runs: tuple[RunFolder, RunFolder],
    names: tuple[str, str],
    summaries: Sequence[Summary],
    kept: list[str],
    scores: Mapping[str, Difference],
) -> list[str]:
    notes = []
    one, other = runs[0].manifest, runs[1].manifest
    for what, left, right in (
        ("samples per task", one.samples, other.samples),
        ("isolation", one.isolation.get("tier"), other.isolation.get("tier")),
        ("ClawGym version", one.library, other.library),
        ("ClawGym's grading code", one.grader.get("code"), other.grader.get("code")),
    ):
        if left is not None and right is not None and left != right:
            notes.append(f"the runs differ in {what}: {left} and {right}")
    for name, summary in zip(names, summaries, strict=True):
        if summary.missing:
            notes.append(f"{name}: {len(summary.missing)} of {summary.planned} episodes have no result")
        if summary.infra_rate > MAX_INFRA_SHARE:
            rate = f"{100 * summary.infra_rate:.1f}%"
            notes.append(f"{name}: {rate} of the attempts ended by an infrastructure error and were retried")
        if summary.tampered:
            notes.append(f"{name}: {len(summary.tampered)} episodes with tampered inputs")
    changed = sum(not _same_baseline(runs, task) for task in kept)
    if changed:
        notes.append(f"baseline-adjusted: {changed} tasks left out, whose no-model baselines differ between the runs")
    if "corrected" in scores and scores["corrected"].tasks < len(kept) - changed:
        notes.append(f"baseline-adjusted: only the {scores['corrected'].tasks} tasks with a known no-model baseline")
    return notes
