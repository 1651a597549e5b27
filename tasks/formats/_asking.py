"""Questions of a set's own grader to a model, for the grader ``questions``.

Standard library only: it is mounted as ``asking.py`` beside the set's code, which runs in a sandbox without a network.
A question whose answer is not known yet ends the grading with :class:`Asks`; the grading is done again when it is.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["Asks", "KnownAnswers", "answers"]

_ATTEMPTS = 3
"""How often a grader may ask the same: sets ask again if they cannot read an answer."""
_ANSWERS = "/answers/answers.json"


class Asks(BaseException):
    """A grader asks a model. No ``Exception``, so that graders, which try again after one, do not catch it."""

    def __init__(self, questions: Mapping[str, Any]) -> None:
        super().__init__("a model is asked")
        self.questions = questions


class KnownAnswers:
    """The model, as far as its answers are known."""

    def __init__(self, known: Mapping[str, str]) -> None:
        self._known = known
        self._asked: dict[str, int] = {}

    def answer(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Raises :class:`Asks` for a question without an answer, and SystemExit for one that is asked too often."""
        text = json.dumps(messages, sort_keys=True)
        asked = self._asked[text] = self._asked.get(text, 0) + 1
        if asked > _ATTEMPTS:
            raise SystemExit("the grader could not read the model's answers")
        name = hashlib.sha256(f"{asked} {text}".encode()).hexdigest()
        if name not in self._known:
            raise Asks({name: messages})
        return self._known[name]


def answers() -> dict[str, str] | None:
    """Id of a question -> the model's answer; None if there is no model."""
    if not os.path.exists(_ANSWERS):
        return None
    with open(_ANSWERS, encoding="utf-8") as file:
        return json.load(file)
