"""The votes of the model that the user chose as grader: how it is reached, asked several times, and counted.

Invariants: the model's endpoint is the user's choice and never the task's; an answer that cannot be read is no vote,
never 0; an endpoint that does not answer is an infrastructure error.
"""

from __future__ import annotations

import asyncio
import os
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from clawgym.engines.openai import OpenAIEngine, Prices
from clawgym.engines.protocol import Engine, Sampling
from clawgym.errors import BudgetExceeded, EngineError, GradingError
from clawgym.records import JudgeVotes, Usage

__all__ = ["BASE_URL", "KEY", "MODEL", "PRICES", "Ballot", "Panel"]

MODEL, BASE_URL, KEY = "CLAWGYM_GRADER_MODEL", "CLAWGYM_GRADER_BASE_URL", "CLAWGYM_GRADER_API_KEY"
"""Environment variables: the model, its endpoint and its key. The latter two default to ``OPENAI_BASE_URL`` and
``OPENAI_API_KEY``, which are used together or not at all."""
PRICES = "CLAWGYM_GRADER_PRICES"
"""Environment variable: US dollars per million prompt tokens and per million completion tokens, as in ``0.15,0.6``."""
_VOTES = 25
_TEMPERATURE = 0.7


@dataclass(frozen=True)
class Ballot:
    """One vote."""

    scores: Mapping[str, float] | None
    """Name of a criterion -> score; None if the model's answer could not be read."""
    usage: Usage = field(default_factory=Usage)


class Panel:
    """The model, and how often it is asked.

    Args:
        grader: the name of the grader, for messages.
        votes: 1 to 25.
        max_tokens: of one answer.

    Raises:
        GradingError: no model is set, or a value is out of range.
    """

    def __init__(self, grader: str, votes: int, max_tokens: int) -> None:
        if not 0 < votes <= _VOTES:
            raise GradingError(f"votes={votes}: give 1 to {_VOTES}")
        self.model = os.environ.get(MODEL, "")
        if not self.model:
            raise GradingError(
                f"the grader {grader!r} needs a model: set {MODEL} (and {BASE_URL}, {KEY} where it is not at OpenAI)"
            )
        self._votes, self._max_tokens = votes, max_tokens
        self._prices = _prices(os.environ.get(PRICES, ""))
        self.judgement: JudgeVotes | None = None
        """The votes, once they were cast."""

    def _at_endpoint(self) -> OpenAIEngine:
        url = os.environ.get(BASE_URL) or None
        # A key of another endpoint is not sent to this one: "none" where it was given without a key.
        key = os.environ.get(KEY) or ("none" if url else None)
        return OpenAIEngine(self.model, base_url=url, api_key=key, prices=self._prices)

    async def ask(self, vote: Callable[[Engine, Sampling], Awaitable[Ballot]]) -> dict[str, float]:
        """The median of the votes for each criterion; of two middle votes the lower one.

        Raises :class:`~clawgym.errors.EngineError` if fewer than half of the votes could be had, and
        :class:`ValueError` if fewer than half of those that could be had can be read.
        """
        engine = self._at_endpoint()
        try:
            asked = (
                vote(engine, Sampling(temperature=_TEMPERATURE, max_tokens=self._max_tokens, seed=number))
                for number in range(self._votes)
            )
            cast = await asyncio.gather(*asked, return_exceptions=True)
        finally:
            await engine.aclose()
        for error in cast:
            if isinstance(error, BaseException) and not isinstance(error, EngineError | BudgetExceeded):
                raise error
        given = [ballot for ballot in cast if isinstance(ballot, Ballot)]
        read = [ballot.scores for ballot in given if ballot.scores is not None]
        usage = sum((ballot.usage for ballot in given), Usage())
        votes = {name: tuple(scores[name] for scores in read) for name in (read[0] if read else ())}
        self.judgement = JudgeVotes(self._votes, votes, usage.prompt_tokens, usage.completion_tokens, usage.cost_usd)
        if 2 * len(given) < self._votes:
            raise _failure(cast)
        if 2 * len(read) < len(given):
            raise ValueError(f"{self.model}: {len(read)} of {len(given)} answers end with scores for every criterion")
        return {name: statistics.median_low(scores) for name, scores in votes.items()}


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


def _failure(cast: Sequence[object]) -> Exception:
    """The error to raise of votes that failed: one that a later try may cure where there is one."""
    failed = [answer for answer in cast if isinstance(answer, Exception)]
    for error in failed:
        if isinstance(error, EngineError) and error.status not in (400, 413, 422):
            return error
    error = failed[0]
    if isinstance(error, BudgetExceeded):  # the submission does not fit the model's window
        return EngineError(f"the grader's model refused the submission: {error}", status=413)
    return error
