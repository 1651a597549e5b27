"""One run folder as one entry of a leaderboard.

Invariant: an entry is computed from the run manifest and the result lines, never from a stored summary, and what
does not fit together (another task content, another grader, a sample too many) is said.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from clawgym.evaluation.integrity import belongs, edited, results_digest
from clawgym.evaluation.summary import READS_FILES, GroupScores, Summary, summarize
from clawgym.evaluation.verification import read_verification
from clawgym.records.run_folder import RunFolder
from clawgym.statistics import Estimate

__all__ = ["SCORES", "BoardEntry", "load_entry"]

SCORES = ("strict", "corrected", "official")
"""What can be ranked by."""


@dataclass(frozen=True)
class BoardEntry:
    """A run, as a leaderboard sees it."""

    name: str
    """Agent, and model if there is one."""
    run: str
    """The run folder's own name."""
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
    """``n of m`` where the folder holds a record that n of its m graded episodes, and all that can be, were graded
    again with the same result; ``no`` where they were not; empty without a record. The folder's own word."""
    flags: tuple[str, ...]
    """What a reader must know before comparing: missing episodes, tampering, edits."""

    def score(self, by: str) -> Estimate | None:
        """The score called ``by`` (one of :data:`SCORES`).

        The strict one is over the tasks whose grader is code that only reads files: what could be forged, and what a
        model judged, does not count.
        """
        if by == "strict" and self.apart:
            kept = [group for group in self.summary.groups["grader"] if group.name == READS_FILES]
            return kept[0].strict if kept else None
        return getattr(self.summary.scores, by)

    @property
    def apart(self) -> tuple[GroupScores, ...]:
        """The scores that are no part of the strict one: of tasks whose grader runs the agent's code, by how it does,
        and of tasks that a model judged."""
        return tuple(group for group in self.summary.groups.get("grader", ()) if group.name != READS_FILES)


def load_entry(path: str | Path) -> BoardEntry:
    """Read a run folder. Raises :class:`~clawgym.errors.RunFolderError` if it is none."""
    run = RunFolder.read(path)
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
    )


def _flags(run: RunFolder, summary: Summary) -> list[str]:
    flags = []
    if summary.missing:
        flags.append(f"{len(summary.missing)} of {summary.planned} episodes missing")
    if summary.tampered:
        flags.append(f"tampered episodes: {len(summary.tampered)}")
    flags += [f"judged by a model: {count} episodes, {by}" for by, count in summary.judged.items()]
    if summary.unsupported:
        flags.append(f"unsupported tasks: {len(summary.unsupported)}")
    if foreign := sum(not belongs(run, row) for row in run.latest.values()):
        flags.append(f"results that do not fit the run manifest: {foreign}")
    if changed := sum(edited(run, row) for row in run.rows):
        flags.append(f"edited result lines: {changed}")
    if (found := _verified(run)[1]) is not None:
        flags.append(found)
    if any(opening.get("library") != run.manifest.library for opening in run.manifest.resumed):
        flags.append("made by several ClawGym versions")
    return flags


def _verified(run: RunFolder) -> tuple[str, str | None]:
    """What the folder's own record says of these very results, for the table; and what is to be flagged of it."""
    record = read_verification(run)
    if record is None:
        return "", None
    if record.results != results_digest(run):
        return "", "its verification is of other results"
    counts, total = record.counts, len(record.episodes)
    if not record.complete:
        return "", "its verification is unfinished"
    if not record.agrees:
        return "no", "its verification does not agree"
    return f"{counts.get('same', 0)} of {total}", None
