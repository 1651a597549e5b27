"""Judge ``model``: a model behind any engine votes, m times, and may write hints.

Invariants: what is judged is data (:mod:`clawgym.rewards._prompt`); a vote that could not be had is invalid, never 0;
only where none could be had the whole judgement fails.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

from clawgym.engines.openai import OpenAIEngine, RateLimits
from clawgym.engines.protocol import Completion, Engine, Sampling
from clawgym.records import Outcome
from clawgym.registry import judges
from clawgym.rewards._prompt import EXAMPLE, new_marker, render
from clawgym.rewards.rules import fraction_of
from clawgym.rewards.states import Judgeable, Setting
from clawgym.rewards.votes import Judgement, hint_of, verdict_of

if TYPE_CHECKING:
    from clawgym.gateway.server import Gateway

__all__ = ["ModelJudge", "policy_engine"]

_VOLATILE = ("adaptations", "client", "host", "prices_usd_per_million")
"""In an engine's receipt, but not of the model."""


class ModelJudge:
    """Asks ``engine`` for ``votes`` verdicts on each turn, all at once, and for ``hints`` candidate hints.

    Each call has a seed of its own, made of ``seed``, episode, turn and number. With ``pictures`` the screens go along:
    for a model that sees. ``weights`` names the weights behind the engine where its receipt does not (the policy's
    version); it is part of :attr:`version`. The engine stays the caller's to close.
    """

    name = "model"

    def __init__(
        self,
        engine: Engine,
        *,
        votes: int = 3,
        hints: int = 0,
        temperature: float = 0.7,
        max_tokens: int = 1024,
        pictures: bool = False,
        seed: int = 0,
        weights: str = "",
    ) -> None:
        if votes < 1 or hints < 0:
            raise ValueError(
                f"votes={votes}, hints={hints}: one vote at least, and no fewer than 0 hints: correct them"
            )
        self._engine = engine
        self._votes, self._hints = votes, hints
        self._sampling = Sampling(temperature=temperature, max_tokens=max_tokens)
        self._pictures = pictures
        self._seed = seed
        model = {name: value for name, value in engine.receipt().items() if name not in _VOLATILE}
        shown = [render(replace(EXAMPLE, setting=setting), "0") for setting in get_args(Setting)]
        about = [model, weights, shown, render(EXAMPLE, "0", hint=True), temperature, max_tokens, pictures]
        self.version = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()
        """Hex SHA-256 of model, prompts and settings; not of seed and number of votes."""

    async def judge(self, asked: Judgeable) -> Judgement:
        """Raises the first error if no vote could be had at all, and no hint either. A vote that failed beside others
        is invalid, with an empty text; one whose answer was cut off is invalid."""
        marker = new_marker(asked)
        calls = [self._ask(asked, marker, number) for number in range(self._votes)]
        calls += [self._ask(asked, marker, number, hint=True) for number in range(self._hints)]
        answers = await asyncio.gather(*calls, return_exceptions=True)  # so that none runs on when one fails
        votes, hints = answers[: self._votes], answers[self._votes :]
        failed = [answer for answer in votes if isinstance(answer, BaseException)]
        accepted = tuple(h for answer in hints if (h := hint_of(_whole(answer), marker)) is not None)
        if len(failed) == len(votes) and not accepted:
            raise failed[0]
        return Judgement(
            votes=tuple(verdict_of(_whole(answer)) for answer in votes),
            texts=tuple(map(_written, votes)),
            judge=self.name,
            version=self.version,
            hints=accepted,
            hint_texts=tuple(map(_written, hints)),
        )

    async def _ask(self, asked: Judgeable, marker: str, number: int, *, hint: bool = False) -> Completion:
        seed = int(fraction_of(self._seed, asked.episode, asked.turn, number, hint) * 2**31)
        messages = render(asked, marker, hint=hint, pictures=self._pictures)
        return await self._engine.complete(messages, sampling=replace(self._sampling, seed=seed))


def _written(answer: Completion | BaseException) -> str:
    return "" if isinstance(answer, BaseException) else answer.text


def _whole(answer: Completion | BaseException) -> str:
    """The text of an answer that came to its own end: the last line of another one is not its last word."""
    return "" if isinstance(answer, BaseException) or answer.finish_reason != "stop" else answer.text


@asynccontextmanager
async def policy_engine(gateway: Gateway, *, channel: str = "judge") -> AsyncIterator[OpenAIEngine]:
    """The policy behind ``gateway`` as the engine of a judge.

    What it says is recorded in the pool under ``channel``, which no trainer fetches, so it never trains on its own
    verdicts. To open for each step of training: a session remembers what was said in it.
    """
    if channel == "train":
        raise ValueError("channel 'train' is trained on: choose another one")
    opened = await gateway.open_session(channel=channel)
    engine = OpenAIEngine("policy", base_url=gateway.base_url(opened), api_key=opened.secret)
    try:
        yield engine
    finally:
        await engine.aclose()
        await gateway.close_session(opened.id, outcome=Outcome.SOLVED)


@judges.register("model")
class EndpointJudge(ModelJudge):
    """A model behind an OpenAI-compatible endpoint votes, and may write hints.

    Args:
        model: the model, as its endpoint names it.
        base_url: the endpoint.
        votes: verdicts on each turn.
        hints: candidate hints of each turn.
        max_tokens: of one answer.
        pictures: show the model the screens, too.
        concurrency: turns that are judged at once.
    """

    def __init__(
        self,
        model: str,
        base_url: str | None = None,
        *,
        votes: int = 3,
        hints: int = 0,
        max_tokens: int = 1024,
        pictures: bool = False,
        concurrency: int = 16,
    ) -> None:
        # The time limit of a turn runs while its calls wait for a place at the engine: there is one for each.
        limits = RateLimits(concurrent=concurrency * (votes + hints))
        engine = OpenAIEngine(model, base_url=base_url, limits=limits)
        super().__init__(engine, votes=votes, hints=hints, max_tokens=max_tokens, pictures=pictures)

    async def aclose(self) -> None:
        """Close the connections to the endpoint."""
        await self._engine.aclose()


@judges.register("policy")
class PolicyJudge:
    """The policy as its own judge: each turn in a session of its own, which nobody trains on.

    Args:
        gateway: where the policy is sampled.
        votes: verdicts on each turn.
        hints: candidate hints of each turn.
        max_tokens: of one answer.
        pictures: show the policy the screens, too.
    """

    name = "policy"
    version = "policy"

    def __init__(
        self, gateway: Gateway, *, votes: int = 3, hints: int = 0, max_tokens: int = 1024, pictures: bool = False
    ) -> None:
        self._gateway = gateway
        self._about: dict[str, Any] = {
            "votes": votes,
            "hints": hints,
            "max_tokens": max_tokens,
            "pictures": pictures,
        }

    async def judge(self, asked: Judgeable) -> Judgement:
        """See :class:`~clawgym.rewards.votes.Judge`."""
        weights = str(getattr(self._gateway.engine, "policy_version", ""))
        async with policy_engine(self._gateway) as engine:
            return await ModelJudge(engine, weights=weights, **self._about).judge(asked)
