"""Graders by name: made with a task's options, and what their answers must be.

Invariants: nothing is executed for a task but the named grader itself, which its user installed; an answer that is not
a mapping of names to finite numbers is the grader's fault and scores nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from clawgym.errors import GradingError
from clawgym.records import Grader, VerifierSpec
from clawgym.registry import graders

__all__ = ["checked", "judged_by", "make_grader"]

_MOST_CHECKS = 1000


def make_grader(spec: VerifierSpec) -> Grader:
    """The grader that ``spec`` names. Raises :class:`GradingError` if it is unknown, or cannot be made."""
    made = graders.make(spec.grader, **spec.grader_options)
    if not isinstance(made, Grader):
        raise GradingError(
            f"grader {spec.grader!r} is no grader, but {type(made).__name__}: give it name, version, model and "
            "grade(submission) (docs/grading.md)"
        )
    return made


def judged_by(spec: VerifierSpec) -> str:
    """The grader and its model, where a model decides: ``rubric (gpt-5)``; else empty.

    Raises as :func:`make_grader` does.
    """
    if not spec.grader:
        return ""
    grader = make_grader(spec)
    return f"{grader.name} ({grader.model})" if grader.model else ""


def checked(scores: Any, grader: str) -> dict[str, float]:
    """What a grader answered, as named numbers. Raises :class:`ValueError` if it is anything else."""
    if not isinstance(scores, Mapping) or not 0 < len(scores) <= _MOST_CHECKS:
        raise ValueError(f"grader {grader!r} answered no mapping of 1 to {_MOST_CHECKS} names to scores")
    found = {str(name): float(score) for name, score in scores.items()}
    if bad := [name for name, score in found.items() if not math.isfinite(score)]:
        raise ValueError(f"grader {grader!r} gave check {bad[0]!r} a score that is not finite")
    return found
