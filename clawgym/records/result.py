"""What grading a workspace gives: named checks, and the three scores made of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from clawgym.records.task import GradingMode

__all__ = ["VerifierResult"]


@dataclass(frozen=True)
class VerifierResult:
    """Named checks and the three numbers made of them; all in [0, 1]."""

    checks: Mapping[str, float]
    """The strict grading's named checks."""
    official: float
    """Bit for bit what the format's own harness gives on the workspace as it was left."""
    strict: float
    """1.0 if every check passes with changed inputs restored, else 0.0."""
    corrected: float | None
    """max(0, (s - f) / (1 - f)): ``s`` the mean of the non-composite checks, ``f`` the task's floor (the
    best cheap policy's ``s``). ``None`` where no floor is known."""
    mode: GradingMode = GradingMode.CLEAN
    verifier_hash: str = ""
    floor: float | None = None
    tampered: bool = False
    """Restoring the inputs changed the checks."""
    changed_inputs: tuple[str, ...] = ()
    cause: str | None = None
    """Why the verifier gave no checks (``crash``, ``timeout``, ``oom``, ``output``, ...), or ``None``."""
    log: str = ""
    """Output of the verifier, both ends."""
    judged_by: str = ""
    """The model that gave the scores, and the grader that asked it: ``rubric (gpt-5)``. Empty where code graded."""
    out_of_range: tuple[str, ...] = ()
    """Checks that scored below 0, above 1 or NaN. They count as held to [0, 1], NaN as 0."""
    seconds: float = 0.0
