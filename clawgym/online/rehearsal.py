"""Replies of the first version to general requests, which training imitates beside those that users accepted.

What users talk about is a small part of what a model can do, and training on it alone loses the rest: a tiny model
learned a person's rules from corrections and began to stammer wherever nothing was said (docs/results/online.md). So it
rehearses what it could (learning without forgetting, arXiv 1606.09282, by samples).

Invariants: no request here is a canary of the gate (:mod:`clawgym.online.canaries`), in words or in topic. The replies
are sampled once, from the model without its adapter, and kept.
"""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

from clawgym.engines import GenerateRequest, Sampling, TokenEngine
from clawgym.gateway.render import Renderer
from clawgym.records.run_folder import write_atomic
from clawgym.trainers.batching import MaskedSequence
from clawgym.trainers.common.policy import Policy

__all__ = ["general_requests", "rehearsed_replies"]

_TOPICS = (
    "apples", "books", "bread", "cats", "clocks", "dreams", "forests", "gardens", "horses", "islands", "letters",
    "mountains", "music", "painting", "roads", "robots", "shoes", "soup", "stones", "sugar", "trains", "windows",
    "winter", "wolves",
)  # fmt: skip
_REQUESTS = (
    "Describe {}.", "What is interesting about {}?", "Write a few lines about {}.",
    "How would you explain {} to a colleague?", "I would like to learn about {}.", "Who works with {}?",
    "Write a postcard about {}.", "What do you know about {}?",
)  # fmt: skip
_COUNT = 72
_LONGEST = 160
"""Most tokens of a reply."""


def general_requests(count: int) -> list[str]:
    """``count`` requests, always the same ones."""
    rng = random.Random("rehearsal")
    return [rng.choice(_REQUESTS).format(_TOPICS[n % len(_TOPICS)]) for n in range(count)]


async def rehearsed_replies(file: Path, policy: Policy, renderer: Renderer) -> list[MaskedSequence]:
    """The replies in ``file``, or else those that ``policy`` gives without its adapter, which are written there.

    Replies that do not end within 160 tokens are left out. Raises :class:`~clawgym.errors.EngineError` if they cannot
    be sampled.
    """
    if file.exists():
        pairs = json.loads(file.read_bytes())
    else:
        engine = policy.engine()
        try:
            sampled = (_reply(engine, renderer, n, text) for n, text in enumerate(general_requests(_COUNT)))
            pairs = [pair for pair in await asyncio.gather(*sampled) if pair is not None]
        finally:
            await engine.aclose()
        write_atomic(file, json.dumps(pairs).encode())
    return [MaskedSequence((*prompt, *reply), (0,) * len(prompt) + (1,) * len(reply)) for prompt, reply in pairs]


async def _reply(engine: TokenEngine, renderer: Renderer, seed: int, text: str) -> tuple[list[int], list[int]] | None:
    prompt = renderer.prompt([{"role": "user", "content": text}], ())
    request = GenerateRequest(prompt, Sampling(1.0, max_tokens=_LONGEST, seed=seed), renderer.stop_ids)
    parts = [part async for part in engine.generate(request)]
    ended = parts[-1].finish_reason == "stop"
    return ([*prompt], [id for part in parts for id in part.ids]) if ended else None
