"""A plain forward pass, to compare the engine with."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from clawgym.engines.protocol import GenerateRequest, Sampling, TokenEngine


@dataclass
class Sampled:
    ids: list[int]
    logprobs: list[float]
    versions: set[int | None]
    finish_reason: str | None
    cached: int
    pieces: int


async def sampled(engine: TokenEngine, prompt: Sequence[int], **settings: Any) -> Sampled:
    """All that ``engine`` samples after ``prompt``."""
    rest = {k: settings.pop(k) for k in ("stop_ids", "adapter", "session") if k in settings}
    got = Sampled([], [], set(), None, 0, 0)
    async for tokens in engine.generate(GenerateRequest(prompt, Sampling(**settings), **rest)):
        assert got.finish_reason is None
        assert len(tokens.logprobs) in (0, len(tokens.ids))
        got.ids += tokens.ids
        got.logprobs += tokens.logprobs
        got.versions.add(tokens.policy_version)
        got.finish_reason, got.cached = tokens.finish_reason, tokens.cached_tokens
        got.pieces += 1
    return got


def log_softmax(model: Any, ids: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """(T, V) of a plain forward pass."""
    with torch.no_grad():
        return (model(torch.tensor([ids])).logits[0].float() / (temperature or 1.0)).log_softmax(-1)


def assert_exact(model: Any, prompt: Sequence[int], got: Sampled, temperature: float = 1.0) -> None:
    """Each log-prob is what ``model`` gives to its id, to 1e-4; at temperature 0 each id is the likeliest."""
    rows = log_softmax(model, [*prompt, *got.ids], temperature)[len(prompt) - 1 : -1]
    want = rows.gather(1, torch.tensor(got.ids)[:, None])[:, 0]
    assert torch.allclose(want, torch.tensor(got.logprobs), atol=1e-4, rtol=0)
    if temperature == 0:
        assert bool((want >= rows.amax(-1) - 1e-4).all())


async def until(condition: Any) -> None:
    """Wait for what another thread will bring about; the test's own time limit ends it."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.005)
