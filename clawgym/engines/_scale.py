"""Which log-probs does a server give? Found out by asking, not by trusting a flag.

Training needs log softmax(logits / temperature) over the whole vocabulary (:class:`~clawgym.engines.protocol.Tokens`).
Servers differ, and say nothing: vLLM gives log softmax(logits) unless started with ``--logprobs-mode
processed_logprobs``, SGLang scales by the temperature unless told otherwise by its environment. At temperature 1 the
two are the same. So one token is sampled after the same prompt at temperature 1 and at 1/4: between the most probable
tokens, scaled log-probs lie four times as far apart the second time.

Invariant: log-probs whose meaning is not known are left out, never passed on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from clawgym.engines.protocol import Sampling

__all__ = ["COLD", "TOP", "Scale", "is_exact", "scale_of"]

Scale = Literal["raw", "scaled", "unknown", "logits"]
"""``raw``: temperature ignored; ``scaled``: logits divided by it first; ``logits``: no log-probs at all."""

COLD = 0.25
"""The other temperature."""
TOP = 5
"""How many of the most probable tokens are compared."""
_NOISE = 0.05
"""Nats by which the same log-prob may differ between two calls, in half precision and another batch."""


def scale_of(warm: Sequence[float], cold: Sequence[float]) -> Scale:
    """``warm`` and ``cold`` are the log-probs of the most probable tokens at temperature 1 and at :data:`COLD`."""
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
    """Whether the log-probs that come with ``sampling`` are those of the contract.

    ``cut_after``: scaled log-probs are taken before top-p and top-k cut the vocabulary (SGLang), not after (vLLM).
    At temperature 0 there is no distribution to speak of.
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
