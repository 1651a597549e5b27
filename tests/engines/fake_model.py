"""A model small enough to be worked out by hand: what the scripted servers sample from."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator, Sequence

VOCABULARY = 32


def logits(prefix: Sequence[int]) -> list[float]:
    """Of the next id, after ``prefix``."""
    seed = hashlib.sha256(repr(list(prefix)).encode()).digest()
    rng = random.Random(seed)
    return [rng.uniform(-3, 3) for _ in range(VOCABULARY)]


def log_softmax(values: Sequence[float]) -> list[float]:
    top = max(values)
    total = math.log(sum(math.exp(v - top) for v in values)) + top
    return [v - total for v in values]


def exact(prefix: Sequence[int], token: int, temperature: float = 1.0) -> float:
    """log softmax(logits / temperature)[token]."""
    return log_softmax([v / temperature for v in logits(prefix)])[token]


class Sampler:
    """Samples after ``prompt``; ``mode`` is what it gives for log-probs."""

    def __init__(self, prompt: Sequence[int], temperature: float, top_k: int, seed: int | None, mode: str) -> None:
        self.prefix = list(prompt)
        self.temperature = temperature
        self.top_k = top_k if top_k > 0 else VOCABULARY
        self.mode = mode
        self.rng = random.Random(seed)

    def step(self) -> tuple[int, float, list[tuple[int, float]]]:
        """The next id, its log-prob, and the most probable ids with theirs."""
        raw = logits(self.prefix)
        temperature = self.temperature or 1.0
        kept = sorted(range(VOCABULARY), key=lambda t: -raw[t])[: self.top_k if self.temperature else 1]
        weights = [math.exp(raw[t] / temperature) for t in kept]
        token = self.rng.choices(kept, weights)[0]
        match self.mode:
            case "raw":
                shown = log_softmax(raw)
            case "scaled":  # before the cut
                shown = log_softmax([v / temperature for v in raw])
            case "processed":  # after it
                cut = [v / temperature if t in kept else -math.inf for t, v in enumerate(raw)]
                shown = log_softmax(cut)
            case _:
                shown = raw
        self.prefix.append(token)
        top = sorted(((t, v) for t, v in enumerate(shown) if v > -math.inf), key=lambda pair: -pair[1])
        return token, shown[token], top

    def run(self, limit: int, stop: frozenset[int]) -> Iterator[tuple[int, float, list[tuple[int, float]], str | None]]:
        """Ids up to one of ``stop`` or ``limit``, the last with its reason."""
        for count in range(1, limit + 1):
            token, logprob, top = self.step()
            reason = "stop" if token in stop else "length" if count == limit else None
            yield token, logprob, top, reason
            if reason:
                return
