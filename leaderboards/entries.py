"""Read a run folder as an entry of a leaderboard.

Invariant: an entry is computed from the run manifest and the result rows, never from a stored summary. Contradictions
between them (another task content, another grader, too many samples) are flagged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from clawgym.evaluation.integrity import belongs, edited, results_digest
from clawgym.evaluation.summary import (
    READS_FILES,
    GroupScores,
    Summary,
    graded_by_task,
    judged_by,
    summarize,
    task_means,
)
from clawgym.evaluation.verification import read_verification
from clawgym.records.run_folder import RunFolder
from clawgym.statistics import Estimate

__all__ = ["SCORES", "BoardEntry", "entry_of", "load_entry"]

SCORES = ("strict", "corrected", "official")
"""Names of the scores that entries can be ranked by; ``corrected`` is the baseline-adjusted score."""


@dataclass(frozen=True)
class BoardEntry:
    """One run on a leaderboard."""

    name: str
    """Agent, and the model if the agent uses one."""
    run: str
    """Name of the run folder."""
    task_set: str
    task_set_hash: str
    agent: str
    agent_version: str
    model: str
    samples: int
    seed: int
    isolation: str
    library: str
    summary: Summary
    verified: str
    """``n of m`` if the folder's ``verification.json`` says that n of m graded episodes were reproduced and the rest
    cannot be graded again; ``no`` if the verification failed; empty without one. As trustworthy as the folder."""
    flags: tuple[str, ...]
    """Warnings for the reader: missing episodes, tampered inputs, edited results."""
    means: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """By score: task id -> mean over its samples, for the tasks that the score covers."""

    def score(self, by: str) -> Estimate | None:
        """The score named ``by`` (one of :data:`SCORES`); ``None`` if the run has no such score.

        The strict score covers the tasks whose grader is code that only reads files. Tasks whose result the agent could
        forge, and tasks that a model judged, are excluded.
        """
        if by == "strict" and self.excluded:
            included = [group for group in self.summary.groups["grader"] if group.name == READS_FILES]
            return included[0].strict if included else None
        return getattr(self.summary.scores, by)

    @property
    def excluded(self) -> tuple[GroupScores, ...]:
        """The groups of tasks that are not in the strict score: whose grader runs the agent's code, and those that a
        model judged."""
        return tuple(group for group in self.summary.groups.get("grader", ()) if group.name != READS_FILES)


def load_entry(path: str | Path) -> BoardEntry:
    """Read a run folder. Raises :class:`~clawgym.errors.RunFolderError` if ``path`` is not a run folder."""
    return entry_of(RunFolder.read(path))


def entry_of(run: RunFolder) -> BoardEntry:
    """:func:`load_entry` of a folder that was read already."""
    manifest, summary = run.manifest, summarize(run)
    return BoardEntry(
        name=manifest.label,
        run=run.path.resolve().name,
        task_set=" ".join(str(manifest.task_set.get(key) or "") for key in ("name", "version")).strip(),
        task_set_hash=str(manifest.task_set.get("hash") or ""),
        agent=str(manifest.agent.get("name") or "unknown"),
        agent_version=str(manifest.agent.get("version") or ""),
        model=str(manifest.engine.get("model") or manifest.agent.get("model") or ""),
        samples=manifest.samples,
        seed=manifest.seed,
        isolation=str(manifest.isolation.get("tier") or ""),
        library=manifest.library,
        summary=summary,
        verified=_verified(run)[0],
        flags=tuple(_flags(run, summary)),
        means=_means(run),
    )


def _means(run: RunFolder) -> dict[str, dict[str, float]]:
    graded = graded_by_task(run.manifest, run.rows)
    forgeable = {
        task
        for task, rows in graded.items()
        if run.manifest.tasks[task].get("executes_agent_code") or any(judged_by(run.manifest, row) for row in rows)
    }
    covered = {task: rows for task, rows in graded.items() if task not in forgeable}
    return {score: task_means(covered if score == "strict" else graded, score) for score in SCORES}


def _flags(run: RunFolder, summary: Summary) -> list[str]:
    flags = []
    if summary.missing:
        flags.append(f"{len(summary.missing)} of {summary.planned} episodes missing")
    if summary.tampered:
        flags.append(f"tampered episodes: {len(summary.tampered)}")
    for by, count in summary.judged.items():
        found = summary.judging.get(by)
        flags.append(f"judged by a model: {count} episodes, {by}" + (f": {found}" if found else ""))
    if summary.unsupported:
        flags.append(f"unsupported tasks: {len(summary.unsupported)}")
    if foreign := sum(not belongs(run, row) for row in run.latest.values()):
        flags.append(f"results that contradict the run manifest: {foreign}")
    if changed := sum(edited(run, row) for row in run.rows):
        flags.append(f"edited result lines: {changed}")
    if (found := _verified(run)[1]) is not None:
        flags.append(found)
    if any(opening.get("library") != run.manifest.library for opening in run.manifest.resumed):
        flags.append("run with several ClawGym versions")
    return flags


def _verified(run: RunFolder) -> tuple[str, str | None]:
    """The text for :attr:`BoardEntry.verified`, and a flag if the verification is unusable or failed."""
    record = read_verification(run)
    if record is None:
        return "", None
    if record.results != results_digest(run):
        return "", "its verification is for other results"
    counts, total = record.counts, len(record.episodes)
    if not record.complete:
        return "", "its verification is unfinished"
    if not record.agrees:
        return "no", "its verification failed"
    return f"{counts.get('same', 0)} of {total}", None
