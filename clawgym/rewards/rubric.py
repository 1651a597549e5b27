"""Grader ``rubric``: a model judges what an agent left by named criteria, several times.

Invariants: the model is asked from the host, at an endpoint that the user chose and never the task; what the agent
wrote is data, fenced as :mod:`clawgym.rewards._prompt` does, and bounded; an answer that cannot be read is no vote,
never 0; an endpoint that does not answer is an infrastructure error.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import secrets
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from clawgym.engines.openai import OpenAIEngine, Prices
from clawgym.engines.protocol import Completion, Engine, Sampling
from clawgym.errors import BudgetExceeded, EngineError, GradingError
from clawgym.records import JudgeVotes, Submission, Usage
from clawgym.registry import graders
from clawgym.rewards._prompt import cut, unspecial

__all__ = ["BASE_URL", "KEY", "MODEL", "PRICES", "RubricGrader", "scores_of"]

MODEL, BASE_URL, KEY = "CLAWGYM_GRADER_MODEL", "CLAWGYM_GRADER_BASE_URL", "CLAWGYM_GRADER_API_KEY"
"""Environment variables: the model, its endpoint and its key. The latter two default to ``OPENAI_BASE_URL`` and
``OPENAI_API_KEY``, which are used together or not at all."""
PRICES = "CLAWGYM_GRADER_PRICES"
"""Environment variable: US dollars per million prompt tokens and per million completion tokens, as in ``0.15,0.6``."""

_CRITERIA = 20
_CRITERION = 4000
_VOTES = 25
_TASK, _MESSAGE, _STEPS, _FILE, _ALL_FILES = 8000, 4000, 24_000, 12_000, 48_000
"""Most characters of the instruction; of the last message; of the transcript; of one file; of all files."""
_LISTED = 200
"""Files that are named."""
_ANSWER = "SCORES "


@graders.register("rubric")
class RubricGrader:
    """A model judges by named criteria; the model and its endpoint are set by CLAWGYM_GRADER_MODEL and _BASE_URL.

    Args:
        rubric: name of a criterion -> what fulfils it, at most 20.
        votes: how often the model is asked. The score of a criterion is the median; of two middle votes the lower one.
        max_tokens: of one answer.
    """

    name = "rubric"

    def __init__(self, rubric: dict[str, str], votes: int = 3, max_tokens: int = 1024) -> None:
        if not 0 < len(rubric) <= _CRITERIA or not all(
            name.strip() and 0 < len(text.strip()) <= _CRITERION for name, text in rubric.items()
        ):
            raise GradingError(f"a rubric has 1 to {_CRITERIA} criteria, each with a name and a text: correct it")
        if not 0 < votes <= _VOTES:
            raise GradingError(f"votes={votes}: give 1 to {_VOTES}")
        self.model = os.environ.get(MODEL, "")
        if not self.model:
            raise GradingError(
                f"the grader 'rubric' needs a model: set {MODEL} (and {BASE_URL}, {KEY} where it is not at OpenAI)"
            )
        self._rubric, self._votes = dict(rubric), votes
        self._prices = _prices(os.environ.get(PRICES, ""))
        self.judgement: JudgeVotes | None = None
        self._sampling = Sampling(temperature=0.7, max_tokens=max_tokens)
        self._engine: Callable[[], Engine] = self._at_endpoint
        about = [self.model, _template(), self._rubric, votes, max_tokens]
        self.version = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]

    def _at_endpoint(self) -> OpenAIEngine:
        url = os.environ.get(BASE_URL) or None
        # A key of another endpoint is not sent to this one: "none" where it was given without a key.
        key = os.environ.get(KEY) or ("none" if url else None)
        return OpenAIEngine(self.model, base_url=url, api_key=key, prices=self._prices)

    async def grade(self, submission: Submission) -> dict[str, float]:
        """The median of the votes for each criterion.

        Raises :class:`~clawgym.errors.EngineError` if fewer than half of the votes could be had, and
        :class:`ValueError` if fewer than half of those that could be had can be read.
        """
        marker = _marker(submission)
        messages = render(submission, self._rubric, marker)
        engine = self._engine()
        try:
            votes = (engine.complete(messages, sampling=self._with_seed(number)) for number in range(self._votes))
            answers = await asyncio.gather(*votes, return_exceptions=True)
        finally:
            await engine.aclose()
        given = [answer for answer in answers if isinstance(answer, Completion)]
        read = [scores for answer in given if (scores := scores_of(answer, self._rubric)) is not None]
        self.judgement = self._judgement(given, read)
        if 2 * len(given) < self._votes or not given:
            raise _failure(answers)
        if 2 * len(read) < len(given) or not read:
            raise ValueError(f"{self.model}: {len(read)} of {len(given)} answers end with scores for every criterion")
        return {name: statistics.median_low([scores[name] for scores in read]) for name in self._rubric}

    def _judgement(self, given: Sequence[Completion], read: Sequence[Mapping[str, float]]) -> JudgeVotes:
        usage = sum((answer.usage for answer in given), Usage())
        votes = {name: tuple(scores[name] for scores in read) for name in self._rubric}
        return JudgeVotes(self._votes, votes, usage.prompt_tokens, usage.completion_tokens, usage.cost_usd)

    def _with_seed(self, number: int) -> Sampling:
        return Sampling(temperature=self._sampling.temperature, max_tokens=self._sampling.max_tokens, seed=number)


def _prices(given: str) -> Prices | None:
    """Prices of tokens. Raises :class:`GradingError` if ``given`` is anything but empty or two numbers."""
    if not given:
        return None
    try:
        prompt, completion = map(float, given.split(","))
        return Prices(prompt, completion)
    except (ValueError, EngineError) as error:
        raise GradingError(
            f"{PRICES}={given!r}: give US dollars per million prompt and completion tokens, such as 0.15,0.6"
        ) from error


def _failure(answers: Sequence[object]) -> Exception:
    """The error to raise of votes that failed: one that a later try may cure where there is one."""
    failed = [answer for answer in answers if isinstance(answer, Exception)]
    for error in failed:
        if isinstance(error, EngineError) and error.status not in (400, 413, 422):
            return error
    error = failed[0]
    if isinstance(error, BudgetExceeded):  # the submission does not fit the model's window
        return EngineError(f"the grader's model refused the submission: {error}", status=413)
    return error


def scores_of(answer: Completion, rubric: Mapping[str, str]) -> dict[str, float] | None:
    """The scores in the last line of an answer.

    The line is ``SCORES`` and a JSON object with a number in [0, 1] for each criterion. None for anything else, and
    for an answer that was cut off. Never raises.
    """
    if answer.finish_reason != "stop":
        return None
    last = answer.text.strip().rpartition("\n")[2].strip()
    if not last.startswith(_ANSWER):
        return None
    try:
        given = json.loads(last.removeprefix(_ANSWER))
    except (ValueError, RecursionError):
        return None
    if not isinstance(given, dict) or given.keys() != rubric.keys():
        return None
    if any(isinstance(v, bool) or not isinstance(v, int | float) or not 0 <= v <= 1 for v in given.values()):
        return None
    found = {name: float(value) for name, value in given.items()}
    return found if all(map(math.isfinite, found.values())) else None


@cache
def _template() -> str:
    return files("clawgym.rewards").joinpath("prompts", "rubric.md").read_text("utf-8")


def _marker(submission: Submission) -> str:
    """16 hex digits at random that are nowhere in what the model is shown."""
    shown = json.dumps(list(_sections(submission)))
    while (marker := secrets.token_hex(8)) in shown:
        pass
    return marker


def render(submission: Submission, rubric: Mapping[str, str], marker: str) -> list[dict[str, str]]:
    """The messages of one vote: the rubric as the system's words, the submission as fenced data."""
    criteria = "\n".join(f"- {json.dumps(name)}: {' '.join(text.split())}" for name, text in rubric.items())
    example = json.dumps(dict.fromkeys(rubric, 0))
    system = _template().replace("{marker}", marker).replace("{criteria}", criteria).replace("{example}", example)
    parts = (f"<<{marker} {name}\n{unspecial(body)}\n{marker}>>" for name, body in _sections(submission))
    return [{"role": "system", "content": system}, {"role": "user", "content": "\n\n".join(parts)}]


def _sections(submission: Submission) -> Iterator[tuple[str, str]]:
    yield "TASK", cut(submission.instruction, _TASK)
    if submission.transcript:
        yield "TRANSCRIPT", cut("\n\n".join(map(_said, submission.transcript)), _STEPS)
    if submission.final_message:
        yield "LAST MESSAGE", cut(submission.final_message, _MESSAGE)
    names = [*sorted(submission.files, key=lambda path: (path in submission.inputs, path))]
    listed = [f"{json.dumps(path)} ({submission.files[path]} bytes)" for path in names[:_LISTED]]
    if len(names) > _LISTED:
        listed.append(f"... and {len(names) - _LISTED} more")
    yield "FILES", "\n".join(listed) or "(none)"
    room = _ALL_FILES
    for path in names[:_LISTED]:
        if room <= 0:
            break
        text = _text(submission.read(path, 4 * _FILE) or b"")
        if text is not None:
            shown = cut(text, min(_FILE, room))
            room -= len(shown)
            yield "FILE", f"{json.dumps(path)}\n{shown}"


def _text(data: bytes) -> str | None:
    """``data`` as text; None if it is none. A character may be cut in two at the end."""
    text = data.decode("utf-8", "replace")
    return None if "\0" in text or text.count("\ufffd") > 1 + len(text) // 100 else text


def _said(message: Mapping[str, Any]) -> str:
    lines = [f"[{message.get('role')}] {str(message.get('content') or '')[:_STEPS]}"]
    for call in message.get("tool_calls") or ():
        lines.append(f"call {call.get('name')} {json.dumps(call.get('arguments'), default=str)[:_MESSAGE]}")
    for result in message.get("results") or ():
        lines.append(f"result {str(result.get('content') or '')[:_MESSAGE]}")
    return "\n".join(lines)
