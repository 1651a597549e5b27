"""A run folder that is only looked at, in Python and in a notebook.

Invariant: a run folder is hostile. Its files are read without following links, up to a size. What is damaged raises
:class:`~clawgym.errors.RunFolderError`; a notebook shows the message.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from clawgym.errors import RunFolderError
from clawgym.evaluation.answers import episode_line, ordered, transcript_of
from clawgym.evaluation.compare import Comparison, compare_runs
from clawgym.evaluation.summary import SCORE_LABELS, Summary, percent, summarize
from clawgym.frames import MOST_ROWS, Preview, Table, Tabular
from clawgym.records import Episode, Fault, GradingMode, Outcome, Usage, VerifierResult
from clawgym.records.episode import CHECK_COLUMNS, STEP_COLUMNS
from clawgym.records.manifest import RunManifest
from clawgym.records.run_folder import RunFolder, safe_name
from clawgym.statistics import as_float
from clawgym.trainers.common.answers import training_tables

__all__ = ["RunView"]

_EPISODES = (
    *("task", "sample", "category", "level", "outcome", *SCORE_LABELS, "passed", "checks", "cause", "fault"),
    *("steps", "tool_calls", "prompt_tokens", "completion_tokens", "cost_usd", "seconds", "attempts", "tampered"),
    *("judged_by", "finished"),
)
_EVALUATIONS = (
    *("step", "task_set", "split", "score", "low", "high", "episodes", "samples", "greedy", "infra", "partial"),
)
_MOST_TEXT = 2**30
"""Most characters of a table of steps."""


class RunView(Tabular):
    """The folder of an evaluation or a training, as it was when this object was made.

    Raises :class:`~clawgym.errors.RunFolderError` if ``path`` is no such folder, or is damaged.

    >>> run = RunView("runs/demo")  # doctest: +SKIP
    >>> run.summary.scores.strict  # doctest: +SKIP
    >>> run.to_pandas("checks")  # doctest: +SKIP
    """

    def __init__(self, path: str | Path) -> None:
        self._folder = RunFolder.read(path)
        self.path = self._folder.path
        kind = self.manifest.kind
        if kind not in ("eval", "train"):
            raise RunFolderError(f"{path} is a run of kind {str(kind)[:80]!r}: give one of `clawgym eval` or `train`")
        self._trained = kind == "train"
        fields = ("task_set", "tasks", "agent", "engine", "config", "isolation")
        if not all(isinstance(getattr(self.manifest, name), Mapping) for name in fields):
            raise RunFolderError(f"{path}: the run manifest is damaged: restore it from a copy")

    def __repr__(self) -> str:
        return f"RunView({str(self.path)!r})"

    @property
    def manifest(self) -> RunManifest:
        """What the results depend on."""
        return self._folder.manifest

    @cached_property
    def summary(self) -> Summary:
        """The scores of an evaluation. Raises :class:`~clawgym.errors.RunFolderError` for a training."""
        if self._trained:
            raise RunFolderError(f"{self.path} is a training: its scores are in to_pandas('evaluations')")
        with self._reading():
            return summarize(self._folder)

    def compare(self, other: RunView | str | Path) -> Comparison:
        """``other`` against this run, paired by task.

        Raises :class:`~clawgym.errors.ComparisonRefused` as :func:`~clawgym.evaluation.compare.compare` does.
        """
        theirs = other if isinstance(other, RunView) else RunView(other)
        summaries = [self.summary, theirs.summary]
        with self._reading():
            return compare_runs(self._folder, theirs._folder, summaries)

    def episode(self, task_id: str, sample: int = 0) -> Episode:
        """An episode with its transcript, without turns and workspace.

        Raises :class:`~clawgym.errors.RunFolderError` if the run has no result of it.
        """
        row = self._folder.latest.get(f"{task_id}#{sample}")
        if row is None:
            raise RunFolderError(f"{self.path} has no episode {task_id[:80]}#{sample}: see to_pandas() for all")
        with self._reading():
            return _episode(self.path, row)

    @cached_property
    def _lines(self) -> list[dict[str, Any]]:
        by_key: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
        for row in self._folder.rows:
            by_key[row["key"]].append(row)
        order = ordered(self.manifest)
        with self._reading():
            found = [episode_line(self.manifest, order, rows) for rows in by_key.values()]
        return sorted(found, key=lambda line: (line["order"], line["sample"]))

    def _checks(self) -> Iterator[tuple[Any, ...]]:
        with self._reading():
            for row in self._folder.latest.values():
                for check, score in ((row.get("result") or {}).get("checks") or {}).items():
                    yield row["task_id"], row["sample"], check, as_float(score)

    def _steps(self) -> Iterator[dict[str, Any]]:
        left = _MOST_TEXT
        with self._reading():
            for row in self._folder.latest.values():
                for step in _episode(self.path, row).step_rows():
                    left -= sum(len(value) for value in step.values() if isinstance(value, str))
                    if left < 0:
                        raise RunFolderError(f"{self.path}: too much text for one table: use episode(...).to_pandas()")
                    yield step

    def _metrics(self) -> Table:
        rows, _, _ = training_tables(self.path)
        names = dict.fromkeys(name for row in rows for name in row)
        return Table.of(rows, ["step", "time", *(name for name in names if name not in ("step", "time"))])

    def _tables(self) -> Mapping[str, Callable[[], Table]]:
        if self._trained:
            return {
                "metrics": self._metrics,
                "evaluations": lambda: Table.of(training_tables(self.path)[1], _EVALUATIONS),
            }
        return {
            "episodes": lambda: Table.of(self._lines, _EPISODES),
            "checks": lambda: Table(CHECK_COLUMNS, self._checks()),
            "steps": lambda: Table.of(self._steps(), STEP_COLUMNS),
        }

    def _preview(self) -> Preview:
        title = f"{self.path.resolve().name}: {self.manifest.label}"
        try:
            return self._training(title) if self._trained else self._evaluation(title)
        except RunFolderError as error:
            return Preview(title, [str(error)])

    def _evaluation(self, title: str) -> Preview:
        task_set, summary = self.manifest.task_set, self.summary
        name = " ".join(str(task_set.get(key) or "")[:100] for key in ("name", "version")).strip()
        scores = (f"{label} {percent(getattr(summary.scores, key))}" for key, label in SCORE_LABELS.items())
        shown = ("task", "sample", "outcome", *SCORE_LABELS, "cause", "steps", "seconds")
        lines = [f"{name}: {summary.counted}", ", ".join(scores), *summary.remarks()]
        table = Table([SCORE_LABELS.get(name, name) for name in shown], Table.of(self._lines[:MOST_ROWS], shown).rows)
        return Preview(title, lines, table, len(self._lines))

    def _training(self, title: str) -> Preview:
        metrics, scores, notes = training_tables(self.path)
        method = str(self.manifest.config.get("method") or "")[:80]
        steps = max((row["step"] for row in metrics), default=0)
        lines = [f"{method}: {steps:g} steps, {len(scores):,} evaluations", *notes]
        shown = ("step", "split", "greedy", "score", "low", "high", "episodes")
        return Preview(title, lines, Table.of(scores[-MOST_ROWS:], shown), len(scores))

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Turn what damaged rows raise into a :class:`RunFolderError`."""
        try:
            yield
        except RunFolderError:
            raise
        except (TypeError, KeyError, AttributeError, ValueError, ArithmeticError, RecursionError) as error:
            why = f"{type(error).__name__}: {str(error)[:100]}"
            raise RunFolderError(f"{self.path}: the results are damaged ({why}): restore them from a copy") from error


def _episode(run: Path, row: Mapping[str, Any]) -> Episode:
    task, sample = str(row["task_id"]), int(row["sample"])
    found, fault = row.get("result"), row.get("fault")
    transcript = transcript_of(run, safe_name(task, sample))
    return Episode(
        task_id=task,
        task_hash=str(row.get("task_hash") or ""),
        sample=sample,
        seed=int(row.get("seed") or 0),
        agent=str(row.get("agent") or ""),
        outcome=Outcome(row["outcome"]),
        cause=None if row.get("cause") is None else str(row["cause"]),
        fault=Fault(fault) if fault else None,
        result=None if found is None else _result(found),
        steps=transcript.steps,
        usage=Usage(**(row.get("usage") or {})),
        final_message=str(row.get("final_message") or ""),
        seconds={str(phase): float(value) for phase, value in (row.get("seconds") or {}).items()},
        dropped=(*_texts(row.get("dropped")), *filter(None, [transcript.note])),
    )


def _result(found: Mapping[str, Any]) -> VerifierResult:
    corrected, floor = found.get("corrected"), found.get("floor")
    return VerifierResult(
        checks={str(name): as_float(score) for name, score in found["checks"].items()},
        official=as_float(found["official"]),
        strict=as_float(found["strict"]),
        corrected=None if corrected is None else as_float(corrected),
        mode=GradingMode(found.get("mode") or GradingMode.CLEAN),
        verifier_hash=str(found.get("verifier_hash") or ""),
        floor=None if floor is None else as_float(floor),
        tampered=bool(found.get("tampered")),
        changed_inputs=_texts(found.get("changed_inputs")),
        cause=None if found.get("cause") is None else str(found["cause"]),
        judged_by=str(found.get("judged_by") or ""),
        seconds=as_float(found.get("seconds") or 0.0),
    )


def _texts(values: Iterable[Any] | None) -> tuple[str, ...]:
    return tuple(map(str, values or ()))
