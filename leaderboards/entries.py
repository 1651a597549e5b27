"""One run folder as one entry of a leaderboard.

Invariant: an entry is computed from the receipt and the result lines, never from a stored summary, and what
does not fit together (another task content, another grader, a sample too many) is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clawgym.evaluation.statistics import Estimate
from clawgym.evaluation.summary import Scores, Summary, summarize
from clawgym.runs import RunFolder

__all__ = ["SCORES", "Entry", "load_entry"]

SCORES = ("strict", "corrected", "official")
"""What can be ranked by."""


@dataclass(frozen=True)
class Entry:
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
    flags: tuple[str, ...]
    """What a reader must know before comparing: missing episodes, tampering, edits."""

    def score(self, by: str) -> Estimate | None:
        """The score called ``by`` (one of :data:`SCORES`)."""
        return getattr(self.summary.scores, by)

    @property
    def forgeable(self) -> Scores | None:
        """The scores on tasks whose grader runs the agent's code; ``None`` without such tasks."""
        found = [g for g in self.summary.groups.get("grader", ()) if g.name.startswith("runs agent code")]
        return found[0] if found else None


def load_entry(path: str | Path) -> Entry:
    """Read a run folder. Raises :class:`~clawgym.errors.RunFolderError` if it is none."""
    run = RunFolder.read(path)
    receipt, summary = run.receipt, summarize(run)
    return Entry(
        name=receipt.label,
        run=run.path.resolve().name,
        task_set=" ".join(str(receipt.task_set.get(key) or "") for key in ("name", "version")).strip(),
        task_set_hash=str(receipt.task_set.get("hash") or ""),
        agent=str(receipt.agent.get("name") or "unknown"),
        agent_version=str(receipt.agent.get("version") or ""),
        model=str(receipt.engine.get("model") or receipt.agent.get("model") or ""),
        samples=receipt.samples,
        seed=receipt.seed,
        isolation=str(receipt.isolation.get("tier") or ""),
        library=receipt.library,
        summary=summary,
        flags=tuple(_flags(run, summary)),
    )


def _flags(run: RunFolder, summary: Summary) -> list[str]:
    flags = []
    if summary.missing:
        flags.append(f"{len(summary.missing)} of {summary.planned} episodes missing")
    if summary.tampered:
        flags.append(f"tampered episodes: {len(summary.tampered)}")
    if summary.unsupported:
        flags.append(f"unsupported tasks: {len(summary.unsupported)}")
    if foreign := sum(not _belongs(run, row) for row in run.latest.values()):
        flags.append(f"results that do not fit the receipt: {foreign}")
    if any(opening.get("library") != run.receipt.library for opening in run.receipt.resumed):
        flags.append("made by several ClawGym versions")
    return flags


def _belongs(run: RunFolder, row: Mapping[str, Any]) -> bool:
    """Whether a row is a sample of a task of the receipt, graded by that task's verifier."""
    about = run.receipt.tasks.get(row.get("task_id", ""))
    if about is None or row.get("task_hash") != about["hash"]:
        return False
    sample = row.get("sample")
    if not isinstance(sample, int) or not 0 <= sample < run.receipt.samples:
        return False
    verifier = (row.get("result") or {}).get("verifier_hash")
    return row["key"] == f"{row['task_id']}#{sample}" and (not verifier or verifier == about["verifier"])
