"""verl's rollout servers as an engine for the gateway, and as a scorer of given ids.

Invariant: ids are passed through unchanged. Log-probs that a server does not return are never invented.
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
from clawgym.rewards.scoring import Scored, ScoreRequest
from clawgym.trainers.verl.timeline import Spans

if TYPE_CHECKING:
    from verl.workers.rollout.llm_server import LLMServerClient

__all__ = ["VerlScorer", "VerlEngine"]

_RETRY_SECONDS = 0.2
"""Seconds before a scoring request that a weight update interrupted is sent again."""


class VerlEngine:
    """A :class:`~clawgym.engines.protocol.TokenEngine` over all replicas of a run.

    Requests of one session go to the same replica, for its prefix cache. In the asynchronous modes verl interrupts a
    request when weights change and continues it with the new ones. The version is then that of the oldest token."""

    name = "verl"

    def __init__(self, client: LLMServerClient, tokenizer: str | Path, *, engine: str, context_window: int) -> None:
        self._client = client
        self._kind = engine
        self.tokenizer = str(tokenizer)
        self.context_window = context_window
        self.spans = Spans()
        """When requests were running."""
        self.policy_version = 0
        """The version of the weights; the judge ``policy`` uses them."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Tokens]:
        """See :meth:`~clawgym.engines.protocol.TokenEngine.generate`. Yields all tokens at once."""
        if request.images:
            raise EngineError("trainer: verl does not support images: remove them, or use trainer: local", status=400)
        if request.sampling.json_schema is not None:
            raise EngineError("trainer: verl does not support a JSON schema: ask for JSON in the prompt", status=400)
        prompt, asked = list(request.prompt_ids), self._asked(request)
        with self.spans.busy("serving"):
            output = await self._client.generate(request.session or "none", prompt_ids=prompt, sampling_params=asked)
        ids, logprobs = output.token_ids, output.log_probs
        if output.stop_reason in ("aborted", "abort") or not ids:
            raise EngineError("the server aborted this request: it is sent again", retryable=True)
        if logprobs is None or len(logprobs) != len(ids):
            raise EngineError(f"{len(ids)} ids without a log-prob each: check the settings of {self._kind}")
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
        if (seed := request.seed) is not None and self._kind != "sglang":  # SGLang has no seed per request
            asked["seed"] = seed
        return asked

    def identity(self) -> dict[str, Any]:
        """Name, engine and model, for a run manifest."""
        return {"name": self.name, "engine": self._kind, "model": self.tokenizer}

    async def aclose(self) -> None:
        """Nothing to close: the run owns the servers."""


class VerlScorer:
    """A :class:`~clawgym.rewards.scoring.Scorer` over all replicas, by prompt log-probs. Only for temperature 1.

    ``client`` must return all fields of a server's answer; the client of the asynchronous modes does not."""

    def __init__(self, client: LLMServerClient, *, context_window: int) -> None:
        self._client = client
        self._window = context_window

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Scored]:
        """See :meth:`~clawgym.rewards.scoring.Scorer.score`. All values are NaN if the ids exceed the context window.

        Raises :class:`ValueError` for another temperature, and :class:`~clawgym.errors.EngineError` if a server scores
        other ids than it was given."""
        for request in requests:
            if request.temperature != 1:
                raise ValueError(
                    f"temperature {request.temperature}: servers score at temperature 1 only: sample at it"
                )
        return list(await asyncio.gather(*map(self._score, requests)))

    async def _score(self, request: ScoreRequest) -> Scored:
        ids, count = [*request.prompt_ids, *request.sampled_ids], len(request.sampled_ids)
        if len(ids) >= self._window:  # a server must be able to sample one more id
            return Scored.nothing(request)
        read, own = await self._ask(ids, 0, count)
        if read[:, 0].tolist() != list(request.sampled_ids):
            raise EngineError("a server scored other ids than it was given: check its tokenizer and its version")
        best, values = (read[:, :0], own[:, :0]) if not request.top_k else await self._ask(ids, request.top_k, count)
        return Scored(own[:, 0], best, values)

    async def _ask(self, ids: list[int], top_k: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(S, K) ids and log-probs at the last ``count`` positions; for ``top_k=0`` the prompt's own ids, with K =
        1."""
        asked = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": top_k, "detokenize": False}
        while True:
            output = await self._client.generate(uuid.uuid4().hex, prompt_ids=ids, sampling_params=dict(asked))
            said = output.extra_fields
            if "prompt_logprobs" in said:
                # The entry for an id is at the position before it; the last position is a filler.
                here = slice(-count - 1, -1)
                found = np.asarray(said["prompt_ids"][here]), np.asarray(said["prompt_logprobs"][here], np.float32)
                return found[0].reshape(count, -1), found[1].reshape(count, -1)
            await asyncio.sleep(_RETRY_SECONDS)
