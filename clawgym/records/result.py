"""The result of grading a workspace: named checks and three scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from clawgym.records.task import GradingMode

__all__ = ["JudgeVotes", "VerifierResult"]


@dataclass(frozen=True)
class JudgeVotes:
    """The votes of a model that judged a submission, and what they took."""

    asked: int
    """How many votes were asked for."""
    votes: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Criterion -> its score in each vote that could be read, in [0, 1], in the order of the votes."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float | None = None
    """US dollars of all answers, read or not; ``None`` if no price is known."""


@dataclass(frozen=True)
class VerifierResult:
    """Named checks and three scores; all in [0, 1]."""

    checks: Mapping[str, float]
    """Name of a check -> score, with changed inputs restored."""
    official: float
    """The score of the original grader on the workspace as the agent left it, exactly."""
    strict: float
    """1.0 if every check passes with changed inputs restored, else 0.0."""
    corrected: float | None
    """The baseline-adjusted score, max(0, (s - b) / (1 - b)): ``s`` is the mean of the non-composite checks, ``b`` the
    task's no-model baseline. ``None`` if no baseline is known."""
    mode: GradingMode = GradingMode.CLEAN
    verifier_hash: str = ""
    floor: float | None = None
    """The task's no-model baseline: the best mean of the non-composite checks that a policy without a model gets."""
    tampered: bool = False
    """Whether restoring the inputs changed the checks."""
    changed_inputs: tuple[str, ...] = ()
    """Paths of the inputs that the agent changed and that were restored."""
    cause: str | None = None
    """Why the verifier gave no checks (``crash``, ``timeout``, ``oom``, ``output``, ...), or ``None``."""
    log: str = ""
    """Beginning and end of the verifier's output. Untrusted."""
    judged_by: str = ""
    """The grader and the model that gave the scores, such as ``rubric (gpt-5)``. Empty if code graded."""
    judgement: JudgeVotes | None = None
    """The votes, if the grader says so."""
    out_of_range: tuple[str, ...] = ()
    """Names of the checks that scored below 0, above 1 or NaN. They are clipped to [0, 1], NaN to 0."""
    seconds: float = 0.0
    """Wall time of the grading."""

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, with plain values."""
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return found | {"judgement": self.judgement and dataclasses.asdict(self.judgement)}
