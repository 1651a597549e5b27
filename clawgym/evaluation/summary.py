"""From a run manifest and result rows to the numbers of a run.

Invariants: computed from the rows alone, so anybody can recompute it from the folder; ``infra`` and
unsupported episodes never enter a score and are always counted beside it; row order does not matter.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from clawgym import statistics
from clawgym.evaluation.paired import detectable_for_one
from clawgym.records import Outcome, Usage
from clawgym.records.run_folder import RunFolder, RunManifest
from clawgym.statistics import Estimate

__all__ = [
    "JUDGED",
    "READS_FILES",
    "GroupScores",
    "Scores",
    "Summary",
    "fault",
    "faults_text",
    "graded_by_task",
    "summarize",
    "task_means",
]

READS_FILES = "reads files only"
"""The group of the tasks whose grader is code that runs nothing that the agent wrote."""
JUDGED = "judged by a model"
"""The group of the tasks whose scores a model gave."""

Row = Mapping[str, Any]
_LEVELS = {"easy": 1, "medium": 2, "hard": 3}


@dataclass(frozen=True)
class Scores:
    """The three numbers, over the graded episodes of some tasks."""

    episodes: int
    strict: Estimate | None
    """Share of episodes in which every check passed with the inputs restored."""
    official: Estimate | None
    """What the format's own harness gives."""
    corrected: Estimate | None
    """Mean share of non-composite checks above the task's floor; over the tasks with a known floor."""


@dataclass(frozen=True)
class GroupScores(Scores):
    """Scores of the tasks that share a category, a level, or a kind of grader."""

    name: str = ""


@dataclass(frozen=True)
class Summary:
    """Everything ``clawgym eval`` reports; :meth:`to_dict` is ``summary.json``."""

    scores: Scores
    planned: int
    """Tasks that can run here, times samples."""
    complete: bool
    """Every planned episode has a result that is not ``infra``."""
    outcomes: Mapping[str, int]
    causes: Mapping[str, int]
    """Of the graded episodes that were not solved, commonest first."""
    pass_at: Mapping[int, Estimate] = field(default_factory=dict)
    pass_hat: Mapping[int, Estimate] = field(default_factory=dict)
    attempts: int = 0
    infra_attempts: int = 0
    infra_causes: Mapping[str, int] = field(default_factory=dict)
    infra_faults: Mapping[str, int] = field(default_factory=dict)
    """Attempts that ended ``infra``, by where the error came from (:func:`fault`)."""
    infra_newest: Mapping[str, str] = field(default_factory=dict)
    """The cause of the last of them, by the same."""
    missing: tuple[str, ...] = ()
    """Keys without a result: not run, or ``infra`` to the last."""
    unsupported: Mapping[str, str] = field(default_factory=dict)
    """Task id -> why."""
    problems: Mapping[str, str] = field(default_factory=dict)
    """Tasks that could not be read."""
    tampered: tuple[str, ...] = ()
    judged: Mapping[str, int] = field(default_factory=dict)
    """Grader and model -> graded episodes whose scores a model gave."""
    groups: Mapping[str, tuple[GroupScores, ...]] = field(default_factory=dict)
    """``category``, ``level``, ``grader``: those that divide the set; ``grader`` also where no task's grader
    is code that reads files only."""
    usage: Usage = field(default_factory=Usage)
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Summed over the graded episodes, by phase."""
    cost_per_solved: float | None = None
    """US dollars of all graded episodes over the solved ones; ``None`` where no price is known or nothing is solved."""
    tokens_per_solved: float | None = None
    """Likewise of tokens, in and out together."""
    infra_episodes: int = 0
    """Episodes whose last attempt ended ``infra``."""
    scores_infra_zero: Scores | None = None
    """The scores if those episodes counted 0: the least they can be. ``None`` where there are none."""
    detectable: Mapping[str, float] = field(default_factory=dict)
    """By score: the smallest true difference to a second run over these tasks that is found with 80% power."""

    @property
    def infra_share(self) -> float:
        """Episodes whose last attempt ended ``infra``, of those attempted."""
        attempted = self.scores.episodes + self.infra_episodes
        return self.infra_episodes / attempted if attempted else 0.0

    @property
    def infra_rate(self) -> float:
        """Attempts that ended ``infra``, of all attempts."""
        return self.infra_attempts / self.attempts if self.attempts else 0.0

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"infra_rate": self.infra_rate, "infra_share": self.infra_share}


def summarize(run: RunFolder) -> Summary:
    """The numbers of a run folder."""
    return summarize_rows(run.manifest, run.rows)


def summarize_rows(manifest: RunManifest, rows: Iterable[Row]) -> Summary:
    """The numbers of the rows that belong to ``manifest``'s tasks and samples."""
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
        infra_faults=_counted(map(fault, infra)),
        infra_newest={fault(row): row.get("cause") or "unknown" for row in infra},
        missing=missing,
        unsupported=unsupported,
        problems=dict(manifest.task_set.get("problems") or {}),
        tampered=tuple(key for key, row in graded.items() if (row["result"] or {}).get("tampered")),
        judged=_counted(by for row in graded.values() if (by := judged_by(manifest, row))),
        groups=_groups(manifest, by_task),
        usage=usage,
        seconds=_seconds(graded.values()),
        cost_per_solved=usage.cost_usd / solved if usage.cost_usd is not None and solved else None,
        tokens_per_solved=_tokens(usage) / solved if _tokens(usage) and solved else None,
        infra_episodes=len(down),
        scores_infra_zero=_with_zeros(manifest, [*graded.values(), *down]) if down else None,
        detectable={
            name: least
            for name in ("strict", "official", "corrected")
            if (least := detectable_for_one(list(task_means(by_task, name).values()))) is not None
        },
    )


def graded_by_task(manifest: RunManifest, rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Task id -> the rows that count: of the run manifest's tasks and samples, the last of each, neither ``infra`` nor
    unsupported."""
    latest = {row["key"]: row for row in rows}
    planned = [f"{task}#{sample}" for task in manifest.tasks for sample in range(manifest.samples)]
    return _by_task(
        latest[key]
        for key in planned
        if key in latest and latest[key]["outcome"] not in (Outcome.INFRA, Outcome.UNSUPPORTED)
    )


def task_means(by_task: Mapping[str, Sequence[Row]], score: str) -> dict[str, float]:
    """Task id -> mean of ``strict``, ``official`` or ``corrected`` over its rows; without a floor, no corrected one."""
    of = {"strict": strict, "official": official, "corrected": lambda row: corrected(row) or 0.0}[score]
    rows = by_task if score != "corrected" else _with_floor(by_task)
    return {task: math.fsum(map(of, group)) / len(group) for task, group in rows.items()}


def strict(row: Row) -> float:
    """The strict score of a graded row; 0 where the verifier was never reached."""
    return float((row["result"] or {}).get("strict") or 0.0)


def official(row: Row) -> float:
    """The official score of a graded row, likewise; held to [0, 1], whatever a verifier printed."""
    value = float((row["result"] or {}).get("official") or 0.0)
    return min(1.0, max(0.0, value)) if math.isfinite(value) else 0.0


def corrected(row: Row) -> float | None:
    """The corrected score; ``None`` where no floor is known."""
    value = (row["result"] or {}).get("corrected")
    return None if value is None else float(value)


def cause(row: Row) -> str:
    """Why a graded episode was not solved, in a word or two."""
    why = row.get("cause") or (row["result"] or {}).get("cause")
    if row["outcome"] == Outcome.TRUNCATED:
        return f"truncated: {why}" if why else "truncated"
    return why or "checks failed"


def fault(row: Row) -> str:
    """Where the infrastructure error of an ``infra`` row came from: ``host``, ``endpoint`` or ``task``; ``unknown`` in
    the rows of earlier versions."""
    return str(row.get("fault") or "unknown")


def faults_text(counts: Mapping[str, int]) -> str:
    """``3 infrastructure errors (2 endpoint, 1 host)``."""
    total = sum(counts.values())
    parts = ", ".join(f"{count} {where}" for where, count in _counted(Counter(counts).elements()).items())
    return f"{total} infrastructure error{'s' if total != 1 else ''} ({parts})"


def judged_by(manifest: RunManifest, row: Row) -> str:
    """The grader and the model that gave the scores of a row, empty where code did: as the row says, or the run."""
    about = manifest.tasks.get(row["task_id"]) or {}
    return str((row.get("result") or {}).get("judged_by") or about.get("judged_by") or "")


def _by_task(rows: Iterable[Row]) -> dict[str, list[Row]]:
    out: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        out[row["task_id"]].append(row)
    return out


def _with_floor(by_task: Mapping[str, Sequence[Row]]) -> dict[str, Sequence[Row]]:
    # An episode without a result scores 0 whatever the floor of its task is.
    kept = {
        task: rows
        for task, rows in by_task.items()
        if any(corrected(row) is not None or row["result"] is None for row in rows)
    }
    return kept if any(corrected(row) is not None for rows in kept.values() for row in rows) else {}


def _with_zeros(manifest: RunManifest, rows: Iterable[Row]) -> Scores:
    """The scores with each ``infra`` row counted 0 in all three."""
    zero = {"strict": 0.0, "official": 0.0}
    counted = []
    for row in rows:
        if row["outcome"] == Outcome.INFRA:
            floor = manifest.tasks[row["task_id"]].get("floor")
            row = {**row, "result": zero | {"corrected": None if floor is None else 0.0}}
        counted.append(row)
    return _scores(list(_by_task(counted).values()))


def _scores(groups: Sequence[Sequence[Row]]) -> Scores:
    with_floor = _with_floor({str(n): group for n, group in enumerate(groups)}).values()
    return Scores(
        episodes=sum(map(len, groups)),
        strict=statistics.rate([[strict(row) for row in group] for group in groups]),
        official=statistics.mean([[official(row) for row in group] for group in groups]),
        corrected=statistics.mean([[corrected(row) or 0.0 for row in group] for group in with_floor]),
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


def _pass_k(by_task: Mapping[str, list[Row]]) -> tuple[dict[int, Estimate], dict[int, Estimate]]:
    """pass@k and pass^k for k = 1, 2, 4, ... and the largest; each over the tasks that have k samples."""
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
