"""Grader ``questions``: the program of a published set checks the work in a sandbox, and a model answers what it asks.

Some sets have graders that check one part by code and ask a model about the rest, in the middle. Such a program has no
network here. It prints its questions and ends; the model is asked from the host; then the program is run again with the
answers, until it has scores.

Invariants: as those of :mod:`clawgym.rewards._panel`. The questions are the program's own, word for word but for tokens
that a chat template takes for the end of a message, and the middle of very long ones: what the agent wrote is fenced
only as far as the set does that. Their number is bounded.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence

from clawgym.engines.protocol import Engine, Sampling
from clawgym.errors import GradingError
from clawgym.records import JudgeVotes, ProgramResult, Submission, Usage
from clawgym.registry import graders
from clawgym.rewards._panel import Ballot, Panel
from clawgym.rewards._prompt import cut, unspecial

__all__ = ["QuestionsGrader"]

_QUESTIONS = 50
"""Most questions of one vote: a task may be hostile, and the user pays for the answers."""
_LONGEST = 100_000
"""Most characters of a message."""


@graders.register("questions")
class QuestionsGrader:
    """The task's own program grades, and a model answers its questions (CLAWGYM_GRADER_MODEL and _BASE_URL).

    Args:
        votes: how often the work is graded, each time with other answers. The score of a check is the median; of two
            middle ones the lower one.
        max_tokens: of one answer.
    """

    name = "questions"
    runs_check = True

    def __init__(self, votes: int = 3, max_tokens: int = 4096) -> None:
        self._panel = Panel(self.name, votes, max_tokens)
        self.model = self._panel.model
        self.version = hashlib.sha256(json.dumps([self.model, votes, max_tokens]).encode()).hexdigest()[:16]

    async def grade(self, submission: Submission) -> dict[str, float]:
        """The median of the votes for each check.

        Raises:
            GradingError: the task has no program.
            EngineError: fewer than half of the votes could be had.
            ValueError: fewer than half of those that could be had have scores.
        """
        check = submission.check
        if check is None:
            raise GradingError("the grader 'questions' runs the task's own check.py: give the verifier its files")
        first = await check({})  # what it asks first is the same for every vote

        async def vote(engine: Engine, sampling: Sampling) -> Ballot:
            answers: dict[str, str] = {}
            usage = Usage()
            said: ProgramResult = first
            while len(answers) + len(said.questions) <= _QUESTIONS:
                if not said.questions:
                    return Ballot(said.scores, usage)
                given = await asyncio.gather(
                    *(engine.complete(_messages(asked), sampling=sampling) for asked in said.questions.values())
                )
                usage = sum((answer.usage for answer in given), usage)
                before = len(answers)
                answers |= {name: answer.text for name, answer in zip(said.questions, given, strict=True)}
                if len(answers) == before:  # it asks what was answered
                    break
                try:
                    said = await check(answers)
                except ValueError:  # it could not make anything of the answers
                    break
            return Ballot(None, usage)

        return await self._panel.ask(vote)

    @property
    def judgement(self) -> JudgeVotes | None:
        """The votes, once they were cast."""
        return self._panel.judgement


def _messages(asked: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    return [{"role": message["role"], "content": unspecial(cut(message["content"], _LONGEST))} for message in asked]
