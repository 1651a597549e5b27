"""Tasks that a grader on the host grades, instead of a verifier in a sandbox."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

import pytest

from clawgym.errors import EngineError, GradingError, TaskError
from clawgym.records import GradingMode, Submission, TaskFile, VerifierSpec
from clawgym.registry import graders
from clawgym.sandbox import Backend
from clawgym.verifiers.graders import judged_by
from clawgym.verifiers.grading import Subject, grade

from .tasks_for_tests import archive, task

NOBODY = cast("Backend", None)
"""No sandbox is made for a grader."""


@graders.register("test-sum")
class Sum:
    """Compares the answer with a number.

    Args:
        right: the number.
        model: what it says that its model is.
    """

    name, version = "test-sum", "1"

    def __init__(self, right: int = 6, model: str = "") -> None:
        self.right, self.model = right, model

    async def grade(self, submission: Submission) -> Mapping[str, Any]:
        text = (submission.read("output/sum.txt") or b"").decode()
        kinds: dict[str, Any] = {
            "crash": ZeroDivisionError("by the agent"),
            "value": ValueError("cannot be judged"),
            "refused": EngineError("too long", status=413),
            "gone": EngineError("connection refused", retryable=True),
        }
        if text in kinds:
            raise kinds[text]
        answers: dict[str, Any] = {"nan": {"right": float("nan")}, "none": {}, "high": {"right": 2, "low": -1}}
        unread = submission.read("input/numbers.txt") == b"1 2 3\n"
        return answers.get(text, {"right": text == str(self.right), "inputs": unread})


def graded(**options: Any) -> Any:
    return task(verifier=VerifierSpec("grader", grader="test-sum", grader_options=options))


def left(text: bytes, numbers: bytes = b"1 2 3\n") -> Subject:
    return Subject(archive(input__numbers_txt=numbers, output__sum_txt=text))


async def test_grader_gives_the_checks() -> None:
    result = await grade(graded(), left(b"6"), NOBODY, baseline=0.5)
    assert (result.checks, result.official, result.strict) == ({"right": 1.0, "inputs": 1.0}, 1.0, 1.0)
    assert (result.corrected, result.judged_by) == (1.0, "")
    result = await grade(graded(right=7), left(b"6"), NOBODY)
    assert (result.official, result.strict) == (0.5, 0.0)


async def test_grader_sees_restored_inputs() -> None:
    result = await grade(graded(), left(b"6", numbers=b"6"), NOBODY)
    assert result.strict == 1.0
    assert result.changed_inputs == ("input/numbers.txt",)


async def test_scores_of_a_model_are_marked() -> None:
    made = graded(model="gpt-x")
    assert judged_by(made.verifier) == "test-sum (gpt-x)"
    assert (await grade(made, left(b"6"), NOBODY)).judged_by == "test-sum (gpt-x)"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("crash", "crash"),
        ("value", "output"),
        ("nan", "output"),
        ("none", "output"),
        ("refused", "judge-refused"),
    ],
)
async def test_error_caused_by_submission_scores_0(text: str, cause: str) -> None:
    result = await grade(graded(), left(text.encode()), NOBODY)
    assert (result.official, result.strict, result.cause) == (0.0, 0.0, cause)


async def test_unreachable_endpoint_raises() -> None:
    with pytest.raises(EngineError, match="connection refused"):
        await grade(graded(), left(b"gone"), NOBODY)


@pytest.mark.parametrize("text", ["crash", "value", "nan", "refused"])
async def test_grader_that_fails_on_initial_workspace_raises(text: str) -> None:
    made = dataclasses.replace(graded(), inputs=(TaskFile("output/sum.txt", text.encode()),))
    with pytest.raises(GradingError, match="fails on the untouched workspace too") as caught:
        await grade(made, left(text.encode()), NOBODY)
    assert caught.value.cause.startswith("control-")


async def test_scores_out_of_range_are_clipped_and_named() -> None:
    result = await grade(graded(), left(b"high"), NOBODY)
    assert result.checks == {"right": 1.0, "low": 0.0}
    assert result.out_of_range == ("low", "right")


def test_hash_covers_the_name_and_the_options_of_a_grader() -> None:
    hashes = {graded(**options).content_hash for options in ({}, {"right": 7}, {"right": 7, "model": "m"})}
    assert len(hashes) == 3
    assert graded(right=7, model="m").content_hash == graded(model="m", right=7).content_hash


def test_invalid_specifications_raise() -> None:
    for wrong in (
        {"protocol": "grader"},
        {"protocol": "reward_sh", "grader": "rubric"},
        {"protocol": "grader", "grader": "rubric", "mode": GradingMode.LIVE},
    ):
        with pytest.raises(TaskError, match="grader"):
            VerifierSpec(**wrong)
    with pytest.raises(GradingError, match=r"there is no grader 'rubrik'\. Did you mean 'rubric'"):
        judged_by(VerifierSpec("grader", grader="rubrik"))
    with pytest.raises(GradingError, match=r"grader 'test-sum' runs no check\.py: take the verifier's files out"):
        judged_by(VerifierSpec("grader", (TaskFile("check.py", b""),), grader="test-sum"))
    with pytest.raises(GradingError, match="does not take wrong"):
        judged_by(VerifierSpec("grader", grader="test-sum", grader_options={"wrong": 1}))
    with pytest.raises(GradingError, match="is dict, which is not a grader"):
        judged_by(VerifierSpec("grader", grader="builtins:dict"))


def test_submission_lists_regular_files_and_follows_no_link() -> None:
    left = archive(a_txt=b"one", b__c_txt=b"three", link="/etc/passwd", other="a.txt")
    submission = Submission("Do it.", left.tar)
    assert dict(submission.files) == {"a.txt": 3, "b/c.txt": 5}
    assert submission.read("link") is None
    assert submission.read("other") is None
    assert submission.read("b/c.txt", 2) == b"th"
