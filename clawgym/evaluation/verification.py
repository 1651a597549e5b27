"""The result of grading a run again, stored as ``verification.json``.

Invariant: the record names the results that were graded again, and the versions that graded them.
:attr:`Verification.agrees` is always computed, never read from the file.
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
    """The result of grading a run again; :meth:`to_dict` is the content of ``verification.json``."""

    results: str
    """Hex SHA-256 of the ``results.jsonl`` that was verified."""
    against: Mapping[str, Any]
    """``library``, ``grader`` and ``isolation`` with which the results were graded again."""
    created: str
    """ISO 8601, UTC."""
    complete: bool
    """Whether every graded episode was examined."""
    episodes: Mapping[str, Mapping[str, Any]]
    """By episode key: ``outcome`` (``same``, ``changed``, ``damaged``, ``not re-gradable``, or ``infra`` after an
    infrastructure error of this verification), ``why``, and for ``changed`` the ``old`` and ``new`` scores."""
    discrepancies: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Inconsistencies in the stored results, by episode key; those of the whole folder under the empty key."""
    images: tuple[str, ...] = ()
    """Images that changed since the run was graded, with what is known to differ. A possible reason for other results,
    but not a failure of the verification."""

    @property
    def counts(self) -> dict[str, int]:
        """Outcome -> number of episodes, most frequent first."""
        return dict(Counter(str(entry["outcome"]) for entry in self.episodes.values()).most_common())

    @property
    def other_tasks(self) -> tuple[str, ...]:
        """Keys of the episodes that were graded again on another task, or by another verifier, than in the run."""
        return tuple(key for key, entry in self.episodes.items() if entry.get("other_task"))

    @property
    def agrees(self) -> bool:
        """Whether the verification succeeded.

        True if at least one result was graded again, all that could be were reproduced by the run's own verifiers, and
        nothing is damaged or inconsistent.
        """
        counts = self.counts
        good = self.complete and not self.discrepancies and not self.other_tasks
        return good and bool(counts.get(SAME)) and not counts.keys() - {SAME, NOT_GRADABLE}

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready data."""
        extra = {"agrees": self.agrees, "counts": self.counts}
        return json_safe({f.name: getattr(self, f.name) for f in dataclasses.fields(self)} | extra)


def read_verification(run: RunFolder) -> Verification | None:
    """Read ``verification.json`` of a run folder; None if it is missing or damaged. Untrusted, as the folder is."""
    try:
        raw = json.loads(run.read_file(VERIFICATION))
        fields = {f.name: raw[f.name] for f in dataclasses.fields(Verification)}
        record = Verification(**fields)
        return record if isinstance(record.agrees, bool) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
