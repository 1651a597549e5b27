"""Graders: named judges that read the frozen workspace on the host.

Invariants: no code of a task is executed here, only the grader that the user installed; the task's files run in a
sandbox. An answer that is not a mapping of names to finite numbers scores 0.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from clawgym.errors import ClawGymError, EngineError, GradingError, traceback_of
from clawgym.offload import offloaded
from clawgym.records import Grader, JudgeVotes, ProgramResult, Submission, Task, TaskFile, VerifierSpec
from clawgym.registry import graders
from clawgym.statistics import as_float
from clawgym.verifiers.protocols.base import LOG_BYTES, Subject, VerifierReport, scored
from clawgym.verifiers.workspace import compose

__all__ = ["ask_grader", "checked", "judged_by", "make_grader"]

_RunCheck = Callable[[Mapping[str, str]], Awaitable[VerifierReport]]
_MOST_CHECKS = 1000
_REFUSED = (400, 413, 422)
"""HTTP statuses by which an endpoint refuses the content of a request."""


def make_grader(spec: VerifierSpec) -> Grader:
    """The grader of ``spec``. Raises :class:`GradingError` if it is unknown or cannot be made, and if the task has
    files that it would not run."""
    made = graders.make(spec.grader, **spec.grader_options)
    if not isinstance(made, Grader):
        raise GradingError(
            f"grader {spec.grader!r} is {type(made).__name__}, which is not a grader: a grader has name, "
            "version, model and grade(submission) (docs/concepts/grading.md)"
        )
    if spec.files and not getattr(made, "runs_check", False):
        raise GradingError(
            f"grader {spec.grader!r} runs no check.py: take the verifier's files out, or name one that does, such as "
            "'questions'"
        )
    return made


def judged_by(spec: VerifierSpec) -> str:
    """The grader and its model, such as ``rubric (gpt-5)``; empty if no model decides.

    Raises as :func:`make_grader` does.
    """
    if not spec.grader:
        return ""
    grader = make_grader(spec)
    return f"{grader.name} ({grader.model})" if grader.model else ""


def checked(scores: Any, grader: str) -> dict[str, float]:
    """A grader's answer as named numbers. Raises :class:`ValueError` if it is invalid."""
    if not isinstance(scores, Mapping) or not 0 < len(scores) <= _MOST_CHECKS:
        raise ValueError(f"grader {grader!r} must return a mapping of 1 to {_MOST_CHECKS} names to scores: correct it")
    found = {str(name): as_float(score) for name, score in scores.items()}
    if bad := [name for name, score in found.items() if not math.isfinite(score)]:
        raise ValueError(f"grader {grader!r} gave check {bad[0]!r} a score that is not finite: correct it")
    return found


async def ask_grader(
    task: Task, subject: Subject, originals: Sequence[TaskFile], check: _RunCheck | None = None
) -> VerifierReport:
    """Grade the workspace, with ``originals`` restored, with the task's grader. The score is the mean of its checks.

    ``check`` runs the task's own program on it, with answers by the id of their question.

    Raises :class:`~clawgym.errors.EngineError` if the grader cannot reach its model.
    """
    tar = subject.workspace.tar
    submission = Submission(
        task.instruction,
        await offloaded(partial(compose, tar, put=originals)) if originals else tar,
        frozenset(file.path for file in task.inputs),
        subject.final_message,
        subject.transcript,
        None if check is None else partial(_checked, check),
    )
    grader = make_grader(task.verifier)
    report = await _asked(grader, submission)
    given = getattr(grader, "judgement", None)
    return dataclasses.replace(report, judgement=given) if isinstance(given, JudgeVotes) else report


async def _checked(check: _RunCheck, answers: Mapping[str, str]) -> ProgramResult:
    """What the task's program says. Raises :class:`ValueError` if it gives no result."""
    report = await check(answers)
    if report.cause is not None:
        raise ValueError(f"the task's program gave no result ({report.cause}): {report.log}")
    return ProgramResult(report.checks, report.questions)


async def _asked(grader: Grader, submission: Submission) -> VerifierReport:
    """What ``grader`` says. Raises :class:`~clawgym.errors.EngineError` if it cannot reach its model."""
    try:
        values = checked(await grader.grade(submission), grader.name)
    except EngineError as error:
        # The endpoint rejected the request for its content or size. The control run shows whether the task is at fault.
        if error.status not in _REFUSED:
            raise
        return VerifierReport(0.0, cause="judge-refused", log=str(error))
    except ValueError as error:
        return VerifierReport(0.0, cause="output", log=str(error)[-LOG_BYTES:])
    except ClawGymError:
        raise
    except Exception as error:  # from the grader's code
        return VerifierReport(0.0, cause="crash", log=traceback_of(error)[-LOG_BYTES:])
    return scored(math.fsum(values.values()) / len(values), values, "")
