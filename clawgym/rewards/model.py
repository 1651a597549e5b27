"""Judge ``model``: a model behind any engine gives m votes on a turn, and can write hints.

Invariants: the judged text is data (:mod:`clawgym.rewards._prompt`). A failed vote is invalid, never 0. The whole
judgement fails only if all votes fail.
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
from clawgym.records.judge import Judgeable, Judgement, Message, Setting
from clawgym.registry import judges
from clawgym.rewards._prompt import EXAMPLE, new_marker, render
from clawgym.rewards.rules import fraction_of
from clawgym.rewards.votes import hint_of, process_of, verdict_of

if TYPE_CHECKING:
    from clawgym.gateway.server import Gateway

__all__ = ["ModelJudge", "policy_engine"]

_VOLATILE = ("adaptations", "client", "host", "prices_usd_per_million")
"""Fields of an engine's entry in the run manifest that do not describe the model."""


class ModelJudge:
    """Asks ``engine`` for ``votes`` verdicts on each turn, concurrently, and for ``hints`` candidate hints.

    Each call has its own seed, derived from ``seed``, episode, turn and number. With ``pictures`` the prompt includes
    screenshots, for models with vision. ``weights`` names the weights behind the engine if the engine does not (the
    policy's version); it is part of :attr:`version`. The caller closes the engine.
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
        model = {name: value for name, value in engine.identity().items() if name not in _VOLATILE}
        shown = [render(replace(EXAMPLE, setting=setting), "0") for setting in get_args(Setting)]
        about = [model, weights, shown, render(EXAMPLE, "0", hint=True), temperature, max_tokens, pictures]
        self.version = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()
        """Hex SHA-256 of model, prompts and settings, without the seed and the number of votes."""

    async def judge(self, record: Judgeable) -> Judgement:
        """Judge one turn.

        A failed vote is invalid and has an empty text; a truncated answer is invalid too. Raises the first error if all
        votes failed and there is no hint.
        """
        marker = new_marker(record)
        calls = [self._ask(record, marker, number) for number in range(self._votes)]
        calls += [self._ask(record, marker, number, hint=True) for number in range(self._hints)]
        answers = await asyncio.gather(*calls, return_exceptions=True)  # waits for all, even if one fails
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

    async def judge_instead(self, record: Judgeable, reply: Message) -> float | None:
        """The mean of the valid votes, in [-1, 1], on another reply to the same request, by what the person said to
        the reply that they saw. None without a valid vote. Raises the first error if all votes failed."""
        marker = new_marker(record, reply)
        calls = (self._ask(record, marker, number, instead=reply) for number in range(self._votes))
        answers = await asyncio.gather(*calls, return_exceptions=True)
        failed = [answer for answer in answers if isinstance(answer, BaseException)]
        if len(failed) == len(answers):
            raise failed[0]
        return process_of([verdict_of(_whole(answer)) for answer in answers])

    async def _ask(
        self, record: Judgeable, marker: str, number: int, *, hint: bool = False, instead: Message | None = None
    ) -> Completion:
        seed = int(fraction_of(self._seed, record.episode, record.turn, number, hint) * 2**31)
        messages = render(record, marker, hint=hint, pictures=self._pictures, instead=instead)
        return await self._engine.complete(messages, sampling=replace(self._sampling, seed=seed))


def _written(answer: Completion | BaseException) -> str:
    return "" if isinstance(answer, BaseException) else answer.text


def _whole(answer: Completion | BaseException) -> str:
    """The text of a complete answer; empty if it was truncated."""
    return "" if isinstance(answer, BaseException) or answer.finish_reason != "stop" else answer.text


@asynccontextmanager
async def policy_engine(gateway: Gateway, *, channel: str = "judge") -> AsyncIterator[OpenAIEngine]:
    """The policy behind ``gateway``, as an engine for a judge.

    Its answers are recorded in the pool under ``channel``, which no trainer fetches, so the policy is never trained on
    its own verdicts. Open it for each training step, as a session accumulates history.
    """
    if channel == "train":
        raise ValueError("channel 'train' is trained on: choose another one")
    from clawgym.gateway.request import SessionRequest
    from clawgym.pool import EpisodeEnd

    opened = await gateway.open_session(SessionRequest(channel=channel))
    engine = OpenAIEngine("policy", base_url=gateway.base_url(opened), api_key=opened.secret)
    try:
        yield engine
    finally:
        await engine.aclose()
        await gateway.close_session(opened.id, EpisodeEnd(outcome=Outcome.SOLVED))


@judges.register("model")
class EndpointJudge(ModelJudge):
    """A model behind an OpenAI-compatible endpoint as a judge.

    Args:
        model: the model's name at the endpoint.
        base_url: URL of the endpoint.
        votes: verdicts on each turn.
        hints: candidate hints for each turn.
        max_tokens: most tokens of one answer.
        pictures: include screenshots in the prompt.
        concurrency: turns judged at once.
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
        # The deadline of a turn includes waiting for the engine, so the engine must accept all calls at once.
        limits = RateLimits(concurrent=concurrency * (votes + hints))
        engine = OpenAIEngine(model, base_url=base_url, limits=limits)
        super().__init__(engine, votes=votes, hints=hints, max_tokens=max_tokens, pictures=pictures)

    async def aclose(self) -> None:
        """Close the connections to the endpoint."""
        await self._engine.aclose()


@judges.register("policy")
class PolicyJudge:
    """The policy as its own judge, in sessions that are not trained on.

    Args:
        gateway: the gateway of the policy.
        votes: verdicts on each turn.
        hints: candidate hints for each turn.
        max_tokens: most tokens of one answer.
        pictures: include screenshots in the prompt.
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

    async def judge(self, record: Judgeable) -> Judgement:
        """See :class:`~clawgym.rewards.votes.Judge`."""
        weights = str(getattr(self._gateway.engine, "policy_version", ""))
        async with policy_engine(self._gateway) as engine:
            return await ModelJudge(engine, weights=weights, **self._about).judge(record)
