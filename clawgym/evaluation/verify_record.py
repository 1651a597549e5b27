"""The record of a verification: what grading a run again said.

Invariant: it says which results it is about, and against what; :attr:`Verification.agrees` is computed, never stored
and believed.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from clawgym.records.atif import json_safe
from clawgym.records.run_folder import RunFolder

__all__ = [
    "CHANGED",
    "DAMAGED",
    "NOT_GRADABLE",
    "SAME",
    "VERIFICATION",
    "Verification",
    "read_verification",
]

VERIFICATION = "verification.json"
SAME, CHANGED, DAMAGED, NOT_GRADABLE = "same", "changed", "damaged", "not re-gradable"


@dataclass(frozen=True)
class Verification:
    """What grading again said; :meth:`to_dict` is ``verification.json``."""

    results: str
    """Digest of ``results.jsonl`` that this is about."""
    against: Mapping[str, Any]
    """``library``, ``grader``, ``isolation`` of this verification."""
    created: str
    complete: bool
    """Every graded episode was looked at."""
    episodes: Mapping[str, Mapping[str, Any]]
    """By key: ``outcome`` (``same``, ``changed``, ``damaged``, ``not re-gradable``, or ``infra`` where the host
    failed now), ``why``, and where it is not the same ``old`` and ``new`` numbers."""
    discrepancies: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """What does not fit in the stored results, by key; under the empty key, about the folder."""
    images: tuple[str, ...] = ()
    """Images that are not what they were when the run was graded, with what is known to differ. A possible reason for
    other results, and no disagreement by itself."""

    @property
    def counts(self) -> dict[str, int]:
        """Episodes by outcome."""
        return dict(Counter(str(entry["outcome"]) for entry in self.episodes.values()).most_common())

    @property
    def other_tasks(self) -> tuple[str, ...]:
        """Keys graded on a task, or by a verifier, that is not the one of the run."""
        return tuple(key for key, entry in self.episodes.items() if entry.get("other_task"))

    @property
    def agrees(self) -> bool:
        """Everything that can be graded again was, by the run's own verifiers, and came out the same; nothing is
        damaged or does not fit; and there was something to grade."""
        counts = self.counts
        good = self.complete and not self.discrepancies and not self.other_tasks
        return good and bool(counts.get(SAME)) and not counts.keys() - {SAME, NOT_GRADABLE}

    def to_dict(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``."""
        extra = {"agrees": self.agrees, "counts": self.counts}
        return json_safe({f.name: getattr(self, f.name) for f in dataclasses.fields(self)} | extra)


def read_verification(run: RunFolder) -> Verification | None:
    """The record in the run folder, if there is one that can be read. It is the folder's own word."""
    try:
        raw = json.loads((run.path / VERIFICATION).read_bytes())
        fields = {f.name: raw[f.name] for f in dataclasses.fields(Verification)}
        record = Verification(**fields)
        return record if isinstance(record.agrees, bool) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
