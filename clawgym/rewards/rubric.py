"""Grader ``rubric``: a model judges what an agent left by named criteria, several times.

Invariants: the model is asked from the host, at an endpoint that the user chose and never the task; what the agent
wrote is data, fenced as :mod:`clawgym.rewards._prompt` does, and bounded; an answer that cannot be read is no vote,
never 0; an endpoint that does not answer is an infrastructure error.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from clawgym.engines.protocol import Completion, Engine, Sampling
from clawgym.errors import GradingError
from clawgym.records import JudgeVotes, Submission
from clawgym.registry import graders
from clawgym.rewards._panel import Ballot, Panel
from clawgym.rewards._prompt import cut, unspecial

__all__ = ["RubricGrader", "scores_of"]

_CRITERIA = 20
_CRITERION = 4000
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
        self._panel = Panel(self.name, votes, max_tokens)
        self.model = self._panel.model
        self._rubric = dict(rubric)
        about = [self.model, _template(), self._rubric, votes, max_tokens]
        self.version = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]

    async def grade(self, submission: Submission) -> dict[str, float]:
        """The median of the votes for each criterion.

        Raises :class:`~clawgym.errors.EngineError` if fewer than half of the votes could be had, and
        :class:`ValueError` if fewer than half of those that could be had can be read.
        """
        messages = render(submission, self._rubric, _marker(submission))

        async def vote(engine: Engine, sampling: Sampling) -> Ballot:
            answer = await engine.complete(messages, sampling=sampling)
            return Ballot(scores_of(answer, self._rubric), answer.usage)

        return await self._panel.ask(vote)

    @property
    def judgement(self) -> JudgeVotes | None:
        """The votes, once they were cast."""
        return self._panel.judgement


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
