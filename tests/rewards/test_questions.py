"""The grader whose program asks a model: rounds, votes and failures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from clawgym.errors import EngineError, GradingError
from clawgym.records import ProgramResult, Submission, Task, TaskFile, VerifierSpec
from clawgym.rewards._panel import BASE_URL, MODEL
from clawgym.rewards.questions import QuestionsGrader
from clawgym.sandbox import Archive, Backend
from clawgym.verifiers.grading import Subject, empty_archive, grade

from ..engines.fake_openai import FakeOpenAI, error, fake_openai, reply

__all__ = ["fake_openai"]


@pytest.fixture
def endpoint(fake_openai: FakeOpenAI, monkeypatch: pytest.MonkeyPatch) -> FakeOpenAI:
    monkeypatch.setenv(MODEL, "judge-1")
    monkeypatch.setenv(BASE_URL, fake_openai.base_url)
    return fake_openai


def asks(name: str, text: str = "How good is it?") -> ProgramResult:
    return ProgramResult(questions={name: [{"role": "user", "content": text}]})


async def check(answers: Mapping[str, str]) -> ProgramResult:
    """Asks for a number, and for another one if it is above 0; the score is the last."""
    if "first" not in answers:
        return asks("first")
    if not answers["first"].isdecimal():
        raise ValueError("no number")
    if answers["first"] != "0" and "second" not in answers:
        return asks("second", "And <|im_end|> now?")
    return ProgramResult({"good": float(answers.get("second", "0"))})


async def judged(votes: int = 3) -> tuple[dict[str, float], QuestionsGrader]:
    grader = QuestionsGrader(votes=votes)
    return await grader.grade(Submission("Write.", empty_archive().tar, check=check)), grader


async def test_program_is_run_until_it_has_scores(endpoint: FakeOpenAI) -> None:
    endpoint.default = reply("1")
    scores, grader = await judged()
    assert scores == {"good": 1.0}
    asked = [request["messages"][0]["content"] for request in endpoint.requests]
    assert asked.count("How good is it?") == 3
    assert len(asked) == 6
    assert not any("<|im_end|>" in text for text in asked), "no end of a message for a chat template"
    assert len({request["seed"] for request in endpoint.requests}) == 6
    assert grader.judgement is not None
    assert (grader.judgement.votes, grader.judgement.prompt_tokens) == ({"good": (1.0, 1.0, 1.0)}, 60)


async def test_score_is_the_median_of_the_votes_that_could_be_read(endpoint: FakeOpenAI) -> None:
    seeds: list[int] = []

    async def by_vote(request: dict[str, Any]) -> Any:
        if request["messages"][0]["content"] == "How good is it?":
            seeds.append(request["seed"])
            return await reply(("1", "0", "Well.")[seeds.index(request["seed"])])(request)
        return await reply("1")(request)

    endpoint.default = by_vote
    assert (await judged())[0] == {"good": 0.0}, "of two middle votes the lower one"
    endpoint.default = reply("Well.")
    with pytest.raises(ValueError, match="0 of 3 answers"):
        await judged()


async def test_model_without_an_answer_is_an_engine_error(endpoint: FakeOpenAI) -> None:
    endpoint.default = error(401)
    with pytest.raises(EngineError):
        await judged()


@pytest.mark.parametrize(("step", "most"), [(lambda known: [str(known)], 50), (lambda known: ["q"], 2)])
async def test_program_that_asks_forever_gives_no_vote(
    endpoint: FakeOpenAI, step: Callable[[int], list[str]], most: int
) -> None:
    async def more(answers: Mapping[str, str]) -> ProgramResult:
        return asks(*step(len(answers)), text="x" * 200_000)

    endpoint.default = reply("1")
    with pytest.raises(ValueError, match="0 of 1 answers"):
        await QuestionsGrader(votes=1).grade(Submission("Write.", empty_archive().tar, check=more))
    assert len(endpoint.requests) == most
    assert len(endpoint.requests[0]["messages"][0]["content"]) < 101_000


async def test_questions_at_once_are_bounded(endpoint: FakeOpenAI) -> None:
    async def many(answers: Mapping[str, str]) -> ProgramResult:
        asked = [{"role": "user", "content": "x"}]
        return ProgramResult(questions={str(n): asked for n in range(51)})

    with pytest.raises(ValueError, match="0 of 1 answers"):
        await QuestionsGrader(votes=1).grade(Submission("Write.", empty_archive().tar, check=many))
    assert not endpoint.requests


async def test_task_without_a_program_is_refused(endpoint: FakeOpenAI) -> None:
    with pytest.raises(GradingError, match=r"the task's own check\.py"):
        await QuestionsGrader().grade(Submission("Write.", empty_archive().tar))


CHECK = """
import json, os
with open("/answers/answers.json") as file:
    known = json.load(file)
if "q" in known:
    said = {"good": float(known["q"]), "written": os.path.exists(os.path.join(__import__("sys").argv[1], "a.txt"))}
else:
    said = SAID
print(json.dumps(said))
"""
ASKS = '{"questions": {"q": [{"role": "user", "content": "How good?"}]}}'


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        (ASKS, None),
        ('{"questions": {}}', "output"),
        ('{"questions": {str(n): [{"role": "user", "content": "x"}] for n in range(101)}}', "output"),
        ('{"questions": {"q": [{"role": "tool", "content": "x"}]}}', "output"),
        ('{"questions": {"q": [{"role": "user", "content": ["x"]}]}}', "output"),
        ('{"questions": {"q": "x"}}', "output"),
        ('{"questions": {"q": []}}', "output"),
    ],
)
async def test_questions_come_from_a_sandbox_and_are_checked(
    endpoint: FakeOpenAI, backend: Backend, said: str, cause: str | None
) -> None:
    endpoint.default = reply("1")
    program = CHECK.replace("SAID", said)
    files = (TaskFile("check.py", program.encode()),)
    spec = VerifierSpec("grader", files, grader="questions", grader_options={"votes": 1})
    task = Task("t", "Write.", spec, inputs=(TaskFile("a.txt", b"x"),))
    subject = Subject(Archive(empty_archive().tar))
    if cause is None:
        result = await grade(task, subject, backend)
        assert (result.checks, result.judged_by) == ({"good": 1.0, "written": 1.0}, "questions (judge-1)")
        assert [request["messages"][0]["content"] for request in endpoint.requests] == ["How good?"]
    else:
        with pytest.raises(GradingError, match=f"untouched workspace too \\({cause}\\)"):
            await grade(task, subject, backend)
        assert not endpoint.requests
