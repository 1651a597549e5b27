"""Find out by sampling which log-probabilities a server returns.

Training needs log softmax(logits / temperature) over the whole vocabulary (:class:`~clawgym.engines.protocol.Tokens`).
Servers differ and do not report it: vLLM returns log softmax(logits) unless started with ``--logprobs-mode
processed_logprobs``; SGLang divides by the temperature unless configured otherwise. At temperature 1 the two are equal.
So one token is sampled after the same prompt at temperatures 1 and 1/4. If the log-probs are scaled, the differences
between the most probable tokens are four times as large at 1/4.

Invariant: log-probs of unknown meaning are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from clawgym.engines.protocol import Sampling

__all__ = ["COLD", "TOP", "Scale", "is_exact", "scale_of"]

Scale = Literal["raw", "scaled", "unknown", "logits"]
"""``raw``: temperature ignored; ``scaled``: logits divided by it; ``logits``: not log-probs at all."""

COLD = 0.25
"""The second temperature."""
TOP = 5
"""Number of the most probable tokens that are compared."""
_NOISE = 0.05
"""Nats by which a log-prob may differ between two calls (half precision, other batches)."""


def scale_of(warm: Sequence[float], cold: Sequence[float]) -> Scale:
    """The scale, from log-probs of the most probable tokens at temperature 1 (``warm``) and :data:`COLD` (``cold``)."""
    for values in (warm, cold):
        if not all(math.isfinite(v) for v in values):
            return "unknown"
        if any(v > _NOISE for v in values) or sum(math.exp(v) for v in values) > 1 + _NOISE:
            return "logits"
    count = min(len(warm), len(cold), TOP)
    if count < 2:
        return "unknown"
    spreads = [max(v) - sorted(v, reverse=True)[count - 1] for v in (warm, cold)]
    if spreads[1] > 2 * spreads[0] and spreads[1] - spreads[0] > _NOISE:
        return "scaled"
    return "raw" if spreads[0] > _NOISE else "unknown"


def is_exact(scale: Scale, sampling: Sampling, *, cut_after: bool) -> bool:
    """Whether log-probs under ``sampling`` are exact: log softmax(logits / temperature) over the whole vocabulary.

    ``cut_after``: scaled log-probs are computed before top-p and top-k cut the vocabulary (SGLang), not after (vLLM).
    At temperature 0 they are never exact.
    """
    temperature = 1.0 if sampling.temperature is None else sampling.temperature
    if temperature <= 0 or scale == "logits":
        return False
    whole = sampling.top_p in (None, 1.0) and (sampling.top_k is None or sampling.top_k <= 0)
    match scale:
        case "raw":
            return temperature == 1.0
        case "scaled":
            return whole or cut_after
        case _:
            return temperature == 1.0 and (whole or cut_after)
