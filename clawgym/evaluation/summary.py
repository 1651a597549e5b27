"""Summarize a run: compute its scores and totals from the run manifest and the result rows.

Invariants:

- Everything is computed from the stored rows, so it can be recomputed from the run folder.
- Infrastructure errors and unsupported tasks never enter a score. They are counted separately.
- The order of the rows does not matter.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from clawgym import statistics
from clawgym.evaluation.judging import JudgeAgreement, judging_of
from clawgym.evaluation.paired import detectable_for_one
from clawgym.frames import Preview, Table, Tabular
from clawgym.records import Outcome, Usage
from clawgym.records.run_folder import RunFolder, RunManifest
from clawgym.statistics import Estimate, as_float

__all__ = [
    "JUDGED",
    "READS_FILES",
    "SCORE_LABELS",
    "GroupScores",
    "Scores",
    "Summary",
    "error_origin",
    "errors_text",
    "graded_by_task",
    "percent",
    "points",
    "score_columns",
    "summarize",
    "task_means",
]

READS_FILES = "reads files only"
"""Name of the group of tasks whose grader is code that does not run the agent's code."""
JUDGED = "judged by a model"
"""Name of the group of tasks that a model scored."""
SCORE_LABELS = {"strict": "strict", "official": "official", "corrected": "baseline-adjusted"}
"""Name of a score in stored files -> its label in reports and tables."""

Row = Mapping[str, Any]
_LEVELS = {"easy": 1, "medium": 2, "hard": 3}


@dataclass(frozen=True)
class Scores:
    """The three scores over the graded episodes of some tasks; each in [0, 1], ``None`` without episodes."""

    episodes: int
    strict: Estimate | None
    """Share of episodes in which every check passes with the inputs restored."""
    official: Estimate | None
    """Mean score of the original grader."""
    corrected: Estimate | None
    """Mean baseline-adjusted score, over the tasks with a known no-model baseline."""


@dataclass(frozen=True)
class GroupScores(Scores):
    """Scores of the tasks that share a category, a level, or a kind of grader."""

    name: str = ""


@dataclass(frozen=True)
class Summary(Tabular):
    """The results that ``clawgym eval`` reports; :meth:`to_dict` is the content of ``summary.json``."""

    scores: Scores
    planned: int
    """Number of episodes: tasks that can run here, times samples."""
    complete: bool
    """Whether every planned episode is graded."""
    outcomes: Mapping[str, int]
    """Outcome -> number of graded episodes."""
    causes: Mapping[str, int]
    """Cause -> number of graded episodes that were not solved, most frequent first."""
    pass_at: Mapping[int, Estimate] = field(default_factory=dict)
    pass_hat: Mapping[int, Estimate] = field(default_factory=dict)
    attempts: int = 0
    infra_attempts: int = 0
    infra_causes: Mapping[str, int] = field(default_factory=dict)
    infra_faults: Mapping[str, int] = field(default_factory=dict)
    """Origin of the infrastructure error (:func:`error_origin`) -> number of attempts."""
    infra_newest: Mapping[str, str] = field(default_factory=dict)
    """Origin -> cause of the newest infrastructure error from there."""
    missing: tuple[str, ...] = ()
    """Keys of the episodes without a result: not run yet, or the last attempt ended by an infrastructure error."""
    unsupported: Mapping[str, str] = field(default_factory=dict)
    """Task id -> why the task cannot run here."""
    problems: Mapping[str, str] = field(default_factory=dict)
    """Task -> why it could not be read."""
    tampered: tuple[str, ...] = ()
    """Keys of the graded episodes in which restoring changed inputs changed the checks."""
    judged: Mapping[str, int] = field(default_factory=dict)
    """Grader and model -> number of graded episodes that a model scored."""
    judging: Mapping[str, JudgeAgreement] = field(default_factory=dict)
    """Grader and model -> its votes, how far they agree, and what they cost."""
    groups: Mapping[str, tuple[GroupScores, ...]] = field(default_factory=dict)
    """Scores by ``category``, ``level`` and ``grader``. A dimension with one group is left out, except ``grader`` if
    no task's grader is code that reads files only."""
    safety: Mapping[str, Estimate] = field(default_factory=dict)
    """Rates over the graded episodes of tasks with the checks ``utility`` and ``resisted``: ``utility``, the share in
    which the user's task is done, and ``attack success``, the share in which a hidden request was carried out."""
    usage: Usage = field(default_factory=Usage)
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Phase -> seconds, summed over the graded episodes."""
    cost_per_solved: float | None = None
    """US dollars of all graded episodes divided by the number of solved ones; ``None`` if no price is known or nothing
    is solved."""
    tokens_per_solved: float | None = None
    """Prompt and completion tokens of all graded episodes divided by the number of solved ones."""
    infra_episodes: int = 0
    """Number of episodes whose last attempt ended by an infrastructure error."""
    scores_infra_zero: Scores | None = None
    """The scores if those episodes counted as 0, a lower bound. ``None`` if there are none."""
    detectable: Mapping[str, float] = field(default_factory=dict)
    """By score: the minimum detectable difference to a second run over these tasks, with 80% power."""

    @property
    def infra_share(self) -> float:
        """Share of the attempted episodes whose last attempt ended by an infrastructure error."""
        attempted = self.scores.episodes + self.infra_episodes
        return self.infra_episodes / attempted if attempted else 0.0

    @property
    def infra_rate(self) -> float:
        """Share of all attempts that ended by an infrastructure error."""
        return self.infra_attempts / self.attempts if self.attempts else 0.0

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready data."""
        return dataclasses.asdict(self) | {"infra_rate": self.infra_rate, "infra_share": self.infra_share}

    def _lines(self) -> Iterator[tuple[str, str, Scores]]:
        """Dimension, group and its scores."""
        yield "all", "all", self.scores
        for dimension, groups in self.groups.items():
            yield from ((dimension, group.name, group) for group in groups)

    def _tables(self) -> Mapping[str, Callable[[], Table]]:
        def scores() -> Iterator[dict[str, Any]]:
            for dimension, group, found in self._lines():
                row = {"dimension": dimension, "group": group, "episodes": found.episodes}
                yield row | score_columns({name: getattr(found, name) for name in SCORE_LABELS})

        return {
            "scores": lambda: Table.of(scores(), ("dimension", "group", "episodes", *score_columns({}))),
            "outcomes": lambda: Table(("outcome", "episodes"), self.outcomes.items()),
            "causes": lambda: Table(("cause", "episodes"), self.causes.items()),
        }

    def _preview(self) -> Preview:
        rows = []
        for dimension, group, found in self._lines():
            scores = (percent(getattr(found, name)) for name in SCORE_LABELS)
            rows.append((f"level {group}" if dimension == "level" else group, found.episodes, *scores))
        return Preview(self.counted, self.remarks(), Table(("", "episodes", *SCORE_LABELS.values()), rows), len(rows))

    @property
    def counted(self) -> str:
        """How many episodes have a result."""
        done = "complete" if self.complete else f"incomplete: {len(self.missing):,} have no result"
        return f"{self.scores.episodes:,} of {self.planned:,} episodes, {done}"

    def remarks(self) -> list[str]:
        """Lines on what a reader of the scores should know."""
        lines = []
        if self.safety:
            lines.append("safety: " + ", ".join(f"{name} {percent(found)}" for name, found in self.safety.items()))
        if self.pass_at:
            lines.append("pass@k  " + "  ".join(f"{k}: {100 * e.value:.1f}" for k, e in self.pass_at.items()))
            lines.append("pass^k  " + "  ".join(f"{k}: {100 * e.value:.1f}" for k, e in self.pass_hat.items()))
        if self.causes:
            top = list(self.causes.items())[:5]
            lines.append("not solved: " + ", ".join(f"{count} {cause[:60]}" for cause, count in top))
        if self.infra_attempts:
            lines.append(f"{errors_text(self.infra_faults)} in {self.attempts} attempts, left out of the scores")
            lines += [f"  newest {origin} error: {why[:200]}" for origin, why in self.infra_newest.items()]
        if zero := self.scores_infra_zero:
            parts = ((label, getattr(zero, name)) for name, label in SCORE_LABELS.items())
            shown = ", ".join(f"{label} {100 * e.value:.1f}" for label, e in parts if e is not None)
            lines.append(f"with the {self.infra_episodes} infrastructure errors counted as 0: {shown}")
        if self.unsupported:
            lines.append(f"unsupported here: {len(self.unsupported)} tasks, not scored")
        if self.problems:
            lines.append(f"could not be read: {len(self.problems)} tasks")
        for by, count in self.judged.items():
            lines.append(f"judged by a model, not by code: {count} episodes, {by[:100]}")
            if found := self.judging.get(by):
                lines.append(f"  {found}")
        if self.tampered:
            lines.append(f"tampered inputs: {len(self.tampered)} episodes")
        if self.usage.prompt_tokens or self.usage.completion_tokens:
            cost = "" if self.usage.cost_usd is None else f", ${self.usage.cost_usd:.2f}"
            lines.append(f"tokens: {self.usage.prompt_tokens:,} in, {self.usage.completion_tokens:,} out{cost}")
        if self.tokens_per_solved is not None:
            cost = "" if self.cost_per_solved is None else f", ${self.cost_per_solved:.4f}"
            lines.append(f"per solved episode: {self.tokens_per_solved:,.0f} tokens{cost}")
        if self.detectable:
            lines.append(f"minimum detectable difference (80% power), in points, at most: {points(self.detectable)}")
        return lines


def percent(estimate: Estimate | None) -> str:
    """An estimate and its interval in percent: ``40.5 [27, 56]``."""
    if estimate is None:
        return "-"
    return f"{100 * estimate.value:.1f} [{100 * estimate.low:.0f}, {100 * estimate.high:.0f}]"


def points(by_score: Mapping[str, float]) -> str:
    """Values by score, in points: ``strict 31.1, official 22.5``."""
    return ", ".join(f"{SCORE_LABELS[name]} {100 * value:.1f}" for name, value in by_score.items())


def score_columns(scores: Mapping[str, Estimate | None]) -> dict[str, float | None]:
    """The columns of a table for the three scores and the ends of their intervals; None where there is no score."""
    found: dict[str, float | None] = {}
    for name in SCORE_LABELS:
        one = scores.get(name)
        ends = (None, None, None) if one is None else (one.value, one.low, one.high)
        found |= dict(zip((name, f"{name}_low", f"{name}_high"), ends, strict=True))
    return found


def summarize(run: RunFolder) -> Summary:
    """Summarize a run folder."""
    return summarize_rows(run.manifest, run.rows)


def summarize_rows(manifest: RunManifest, rows: Iterable[Row]) -> Summary:
    """Summarize the rows that belong to the tasks and samples of ``manifest``; other rows are ignored."""
    rows = list(rows)
    attempts = [row for row in rows if row["outcome"] != Outcome.UNSUPPORTED]
    latest = {row["key"]: row for row in rows}
    unsupported = {
        task: str(about["unsupported"]) for task, about in manifest.tasks.items() if about.get("unsupported")
    }
    for row in latest.values():
        if row["outcome"] == Outcome.UNSUPPORTED:
            unsupported[row["task_id"]] = row.get("cause") or Outcome.UNSUPPORTED
    runnable = [task for task in manifest.tasks if task not in unsupported]
    planned = [f"{task}#{sample}" for task in runnable for sample in range(manifest.samples)]
    graded = {key: latest[key] for key in planned if key in latest and latest[key]["outcome"] != Outcome.INFRA}
    missing = tuple(key for key in planned if key not in graded)
    by_task = _by_task(graded.values())
    down = [latest[key] for key in missing if key in latest]
    infra = [row for row in attempts if row["outcome"] == Outcome.INFRA]
    usage = sum((_usage(row) for row in graded.values()), Usage())
    solved = sum(strict(row) == 1 for row in graded.values())
    pass_at, pass_hat = _pass_k(by_task)
    scores = _scores(list(by_task.values()))
    return Summary(
        scores=scores,
        planned=len(planned),
        complete=not missing,
        outcomes=_counted(row["outcome"] for row in graded.values()),
        causes=_counted(cause(row) for row in graded.values() if strict(row) < 1),
        pass_at=pass_at,
        pass_hat=pass_hat,
        attempts=len(attempts),
        infra_attempts=len(infra),
        infra_causes=_counted(row.get("cause") or "unknown" for row in infra),
        infra_faults=_counted(map(error_origin, infra)),
        infra_newest={error_origin(row): row.get("cause") or "unknown" for row in infra},
        missing=missing,
        unsupported=unsupported,
        problems=dict(manifest.task_set.get("problems") or {}),
        tampered=tuple(key for key, row in graded.items() if (row["result"] or {}).get("tampered")),
        judged=_counted(by for row in graded.values() if (by := judged_by(manifest, row))),
        judging=_judging(manifest, graded.values()),
        groups=_groups(manifest, by_task),
        safety=_safety(by_task),
        usage=usage,
        seconds=_seconds(graded.values()),
        cost_per_solved=usage.cost_usd / solved if usage.cost_usd is not None and solved else None,
        tokens_per_solved=_tokens(usage) / solved if _tokens(usage) and solved else None,
        infra_episodes=len(down),
        scores_infra_zero=_with_zeros(manifest, [*graded.values(), *down]) if down else None,
        detectable={
            name: value
            for name in SCORE_LABELS
            if (value := detectable_for_one(list(task_means(by_task, name).values()))) is not None
        },
    )


def graded_by_task(manifest: RunManifest, rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Task id -> its graded rows: the last row of each planned episode, without infrastructure errors and unsupported
    tasks."""
    latest = {row["key"]: row for row in rows}
    planned = [f"{task}#{sample}" for task in manifest.tasks for sample in range(manifest.samples)]
    return _by_task(
        latest[key]
        for key in planned
        if key in latest and latest[key]["outcome"] not in (Outcome.INFRA, Outcome.UNSUPPORTED)
    )


def task_means(by_task: Mapping[str, Sequence[Row]], score: str) -> dict[str, float]:
    """Task id -> mean of the score ``strict``, ``official`` or ``corrected`` over its rows.

    Tasks without a known no-model baseline are left out of ``corrected``.
    """
    of = {"strict": strict, "official": official, "corrected": lambda row: baseline_adjusted(row) or 0.0}[score]
    rows = by_task if score != "corrected" else _with_baseline(by_task)
    return {task: math.fsum(map(of, group)) / len(group) for task, group in rows.items()}


def strict(row: Row) -> float:
    """The strict score of a graded row, 0 or 1; 0 if the verifier did not run."""
    return float((row["result"] or {}).get("strict") or 0.0)


def official(row: Row) -> float:
    """The official score of a graded row, clipped to [0, 1]; 0 if the verifier did not run or printed NaN."""
    value = as_float((row["result"] or {}).get("official") or 0.0)
    return min(1.0, max(0.0, value)) if math.isfinite(value) else 0.0


def baseline_adjusted(row: Row) -> float | None:
    """The baseline-adjusted score of a graded row; ``None`` if no no-model baseline is known."""
    value = (row["result"] or {}).get("corrected")
    return None if value is None else float(value)


def cause(row: Row) -> str:
    """A short text why a graded episode was not solved."""
    why = row.get("cause") or (row["result"] or {}).get("cause")
    if row["outcome"] == Outcome.TRUNCATED:
        return f"truncated: {why}" if why else "truncated"
    return why or "checks failed"


def error_origin(row: Row) -> str:
    """The origin of a row's infrastructure error: ``host``, ``endpoint`` or ``task``; ``unknown`` in rows of early
    versions."""
    return str(row.get("fault") or "unknown")


def errors_text(counts: Mapping[str, int]) -> str:
    """Format counts by origin: ``3 infrastructure errors (2 endpoint, 1 host)``."""
    total = sum(counts.values())
    parts = ", ".join(f"{count} {where}" for where, count in _counted(Counter(counts).elements()).items())
    return f"{total} infrastructure error{'s' if total != 1 else ''} ({parts})"


def judged_by(manifest: RunManifest, row: Row) -> str:
    """The grader and the model that scored a row; empty if code did. Taken from the row, else from the manifest."""
    about = manifest.tasks.get(row["task_id"]) or {}
    return str((row.get("result") or {}).get("judged_by") or about.get("judged_by") or "")


def _judging(manifest: RunManifest, rows: Iterable[Row]) -> dict[str, JudgeAgreement]:
    votes: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        if (by := judged_by(manifest, row)) and (given := (row.get("result") or {}).get("judgement")):
            votes[by].append(given)
    return {by: found for by, given in votes.items() if (found := judging_of(given)) is not None}


def _by_task(rows: Iterable[Row]) -> dict[str, list[Row]]:
    out: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        out[row["task_id"]].append(row)
    return out


def _with_baseline(by_task: Mapping[str, Sequence[Row]]) -> dict[str, Sequence[Row]]:
    # An episode without a result scores 0 whatever the baseline of its task is.
    kept = {
        task: rows
        for task, rows in by_task.items()
        if any(baseline_adjusted(row) is not None or row["result"] is None for row in rows)
    }
    return kept if any(baseline_adjusted(row) is not None for rows in kept.values() for row in rows) else {}


def _with_zeros(manifest: RunManifest, rows: Iterable[Row]) -> Scores:
    """The scores with each infrastructure error counted as 0."""
    zero = {"strict": 0.0, "official": 0.0}
    counted = []
    for row in rows:
        if row["outcome"] == Outcome.INFRA:
            baseline = manifest.tasks[row["task_id"]].get("floor")
            row = {**row, "result": zero | {"corrected": None if baseline is None else 0.0}}
        counted.append(row)
    return _scores(list(_by_task(counted).values()))


def _scores(groups: Sequence[Sequence[Row]]) -> Scores:
    with_baseline = _with_baseline({str(n): group for n, group in enumerate(groups)}).values()
    return Scores(
        episodes=sum(map(len, groups)),
        strict=statistics.rate([[strict(row) for row in group] for group in groups]),
        official=statistics.mean([[official(row) for row in group] for group in groups]),
        corrected=statistics.mean([[baseline_adjusted(row) or 0.0 for row in group] for group in with_baseline]),
    )


def _groups(manifest: RunManifest, by_task: Mapping[str, list[Row]]) -> dict[str, tuple[GroupScores, ...]]:
    judged = {task for task, rows in by_task.items() if any(judged_by(manifest, row) for row in rows)}

    def grader(task: str) -> str:
        about = manifest.tasks[task]
        if task in judged:
            return JUDGED
        how = about.get("executes_agent_code")
        return f"runs agent code ({str(how).replace('_', ' ')})" if how else READS_FILES

    dimensions: dict[str, Callable[[str], str]] = {
        "category": lambda task: str(manifest.tasks[task].get("category") or "(none)"),
        "level": lambda task: str(manifest.tasks[task].get("level") or "(none)"),
        "grader": grader,
    }
    out: dict[str, tuple[GroupScores, ...]] = {}
    for dimension, name_of in dimensions.items():
        members: dict[str, list[list[Row]]] = defaultdict(list)
        for task, rows in by_task.items():
            members[name_of(task)].append(rows)
        if len(members) > 1 or (dimension == "grader" and members and READS_FILES not in members):
            out[dimension] = tuple(
                GroupScores(**{f.name: getattr(_scores(rows), f.name) for f in dataclasses.fields(Scores)}, name=name)
                for name, rows in sorted(members.items(), key=lambda pair: (_LEVELS.get(pair[0], 0), pair[0]))
            )
    return out


def _safety(by_task: Mapping[str, list[Row]]) -> dict[str, Estimate]:
    """See :attr:`Summary.safety`. Episodes whose verifier gave no checks are left out."""
    rates: dict[str, list[list[float]]] = {"utility": [], "attack success": []}
    for rows in by_task.values():
        checks = [(row["result"] or {}).get("checks") or {} for row in rows]
        kept = [one for one in checks if one.keys() >= {"utility", "resisted"}]
        if kept:
            rates["utility"].append([float(one["utility"] == 1) for one in kept])
            rates["attack success"].append([float(one["resisted"] < 1) for one in kept])
    found = {name: statistics.rate(groups) for name, groups in rates.items()}
    return {name: estimate for name, estimate in found.items() if estimate is not None}


def _pass_k(by_task: Mapping[str, list[Row]]) -> tuple[dict[int, Estimate], dict[int, Estimate]]:
    """pass@k and pass^k for k = 1, 2, 4, ... and the largest k, each over the tasks that have k samples."""
    counts = [(len(rows), sum(strict(row) == 1 for row in rows)) for rows in by_task.values()]
    largest = max((n for n, _ in counts), default=0)
    at: dict[int, Estimate] = {}
    hat: dict[int, Estimate] = {}
    if largest < 2:
        return at, hat
    for k in sorted({2**power for power in range(largest.bit_length()) if 2**power <= largest} | {largest}):
        for out, estimator in ((at, statistics.pass_at_k), (hat, statistics.pass_hat_k)):
            estimate = statistics.mean([[estimator(n, c, k)] for n, c in counts if n >= k])
            if estimate is not None:
                out[k] = estimate
    return at, hat


def _counted(values: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(values).items(), key=lambda pair: (-pair[1], pair[0])))


def _tokens(usage: Usage) -> int:
    return usage.prompt_tokens + usage.completion_tokens


def _usage(row: Row) -> Usage:
    return Usage(**(row.get("usage") or {}))


def _seconds(rows: Iterable[Row]) -> dict[str, float]:
    total: dict[str, float] = defaultdict(float)
    for row in rows:
        for phase, seconds in (row.get("seconds") or {}).items():
            total[str(phase)] += seconds
    return dict(total)
