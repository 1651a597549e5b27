"""verl's rollout servers as an engine of ours, which the gateway samples from, and as a reader of ids.

Invariant: ids go in and come out as they are; what a server does not say of a token is not made up.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from clawgym.engines.protocol import GenerateRequest, Tokens
from clawgym.errors import EngineError
from clawgym.rewards.scoring import Scored
from clawgym.trainers.verl.timeline import Spans

if TYPE_CHECKING:
    from verl.workers.rollout.llm_server import LLMServerClient

__all__ = ["Reader", "Servers"]

_AGAIN = 0.2
"""Seconds until a reading that weights have interrupted is asked for again."""


class Servers:
    """A :class:`~clawgym.engines.protocol.TokenEngine` over all replicas of a run.

    Requests of one session go to one replica, which may have its beginning in memory. In the asynchronous modes verl
    ends a request when weights change and goes on with the new ones: then the version is the oldest of its tokens."""

    name = "verl"

    def __init__(self, client: LLMServerClient, tokenizer: str | Path, *, engine: str, context_window: int) -> None:
        self._client = client
        self._kind = engine
        self.tokenizer = str(tokenizer)
        self.context_window = context_window
        self.spans = Spans()
        """When requests were under way."""
        self.policy_version = 0
        """Of the weights that a judge, which is the policy, judges by."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Tokens]:
        """See :meth:`~clawgym.engines.protocol.TokenEngine.generate`; all tokens come at once."""
        if request.images:
            raise EngineError("this trainer reads no images: take them out, or use trainer: local", status=400)
        if request.sampling.json_schema is not None:
            raise EngineError("these servers do not constrain what is sampled: ask for JSON in the prompt", status=400)
        prompt, asked = list(request.prompt_ids), self._asked(request)
        with self.spans.busy("serving"):
            output = await self._client.generate(request.session or "none", prompt_ids=prompt, sampling_params=asked)
        ids, logprobs = output.token_ids, output.log_probs
        if output.stop_reason in ("aborted", "abort") or not ids:
            raise EngineError("the server ended this request: it is asked again", retryable=True)
        if logprobs is None or len(logprobs) != len(ids):
            raise EngineError(f"{len(ids)} ids came without a log-prob each: look at the settings of {self._kind}")
        ended = "stop" if ids[-1] in request.stop_ids else "length"
        version = output.extra_fields.get("min_global_steps")
        yield Tokens(tuple(ids), tuple(map(float, logprobs)), version, ended)

    def _asked(self, request: GenerateRequest) -> dict[str, Any]:
        asked: dict[str, Any] = {
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k or -1,
            "max_tokens": request.max_tokens(self.context_window),
            "logprobs": True,
            "stop_token_ids": sorted(request.stop_ids),
        }
        if request.sampling.seed is not None and self._kind != "sglang":  # which has no such setting
            asked["seed"] = request.sampling.seed
        return asked

    def identity(self) -> dict[str, Any]:
        """What samples."""
        return {"name": self.name, "engine": self._kind, "model": self.tokenizer}

    async def aclose(self) -> None:
        """The servers are the run's to end."""


class Reader:
    """A :class:`~clawgym.rewards.scoring.Scorer` over all replicas: they say what they think of each id of a prompt.

    At temperature 1 alone: nothing else can be asked of them. ``client`` must give back all that a server says; the one
    of the asynchronous modes does not."""

    def __init__(self, client: LLMServerClient, *, context_window: int) -> None:
        self._client = client
        self._window = context_window

    async def score(
        self, prompt_ids: Sequence[int], sampled_ids: Sequence[int], *, top_k: int = 0, temperature: float = 1.0
    ) -> Scored:
        """See :meth:`~clawgym.rewards.scoring.Scorer.score`; NaN where it does not fit into the context window.

        Raises :class:`ValueError` for another temperature, and :class:`~clawgym.errors.EngineError` for servers that
        read other ids than they were given."""
        if temperature != 1:
            raise ValueError(f"temperature {temperature}: servers read at temperature 1 alone: sample at it")
        ids, count = [*prompt_ids, *sampled_ids], len(sampled_ids)
        if len(ids) >= self._window:  # a server must have room for one more
            nothing = np.full((count, top_k), np.nan, np.float32)
            return Scored(np.full(count, np.nan, np.float32), np.full((count, top_k), -1), nothing)
        read, own = await self._ask(ids, 0, count)
        if read[:, 0].tolist() != list(sampled_ids):
            raise EngineError("a server has read other ids than it was given: look at its tokenizer and its version")
        best, values = (read[:, :0], own[:, :0]) if not top_k else await self._ask(ids, top_k, count)
        return Scored(own[:, 0], best, values)

    async def _ask(self, ids: list[int], top_k: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(S, K) ids and log-probs at the last ``count`` places; of the ids themselves for ``top_k`` 0."""
        asked = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": top_k, "detokenize": False}
        while True:
            output = await self._client.generate(uuid.uuid4().hex, prompt_ids=ids, sampling_params=dict(asked))
            said = output.extra_fields
            if "prompt_logprobs" in said:
                # What is said of an id stands at the place before it; the last place is a filler.
                here = slice(-count - 1, -1)
                found = np.asarray(said["prompt_ids"][here]), np.asarray(said["prompt_logprobs"][here], np.float32)
                return found[0].reshape(count, -1), found[1].reshape(count, -1)
            await asyncio.sleep(_AGAIN)
