"""Sample one token for each row of logits, with its exact log-probability.

The log-probability is log softmax(logits / temperature) over the whole vocabulary, even with top-k and top-p. At
temperature 0 the most likely id is taken, with its log-probability at temperature 1.

The sampled id is a function of the row's logits and its uniform number (inverse transform sampling: the first id where
the cumulative probability exceeds the number). So other rows of the batch affect it by rounding only. In a large
vocabulary the cumulative probabilities are those of blocks of ids, and then those inside of one block: whole rows in
float64 would take longer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

__all__ = ["sample"]

_BLOCK = 64
"""Number of ids; the sizes of most vocabularies are multiples."""
_LARGE = 1024
"""Vocabularies from this size on are searched in blocks."""
_CANDIDATES = 1024
"""So many of the most likely ids are ordered at first, to find the nucleus of top-p."""


def sample(
    logits: torch.Tensor,
    temperature: Sequence[float],
    top_k: Sequence[int],
    top_p: Sequence[float],
    uniform: Sequence[float],
) -> tuple[list[int], list[float]]:
    """Sample an id, with its log-probability in nats, for each row of ``logits`` (N, V).

    ``top_k`` 0 and ``top_p`` 1 disable the cuts; ``uniform`` are numbers in [0, 1). The log-probability of a row with
    NaN or +inf logits is NaN.
    """
    device = logits.device
    z = logits.float()
    if any(t not in (0.0, 1.0) for t in temperature):
        z = z / torch.tensor([t or 1.0 for t in temperature], device=device)[:, None]
    top = z.amax(-1, keepdim=True)
    weights = (z - top).exp_()
    share = torch.tensor(uniform, dtype=torch.float64, device=device)[:, None]
    ids, total = _drawn(weights, share)
    cut = [i for i, (k, p) in enumerate(zip(top_k, top_p, strict=True)) if (k or p < 1.0) and temperature[i]]
    if cut:
        ids[cut] = _drawn(_cut(weights[cut], [top_k[i] for i in cut], [top_p[i] for i in cut]), share[cut])[0]
    if not all(temperature):
        greedy = torch.tensor([not t for t in temperature], device=device)[:, None]
        ids = torch.where(greedy, z.argmax(-1, keepdim=True), ids)
    ids = ids.clamp_(max=logits.shape[-1] - 1)  # NaN
    logprobs = (z.gather(-1, ids) - top).double() - total.log()
    return ids[:, 0].tolist(), logprobs[:, 0].tolist()


def _drawn(weights: torch.Tensor, share: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first ids where the running sum of ``weights`` (N, V) exceeds ``share`` of the sum, and the sum: (N, 1)."""
    if weights.shape[-1] < _LARGE:
        running = weights.cumsum(-1, dtype=torch.float64)
        whole = running[:, -1:]
        return _first_above(running, share * whole), whole
    if missing := -weights.shape[-1] % _BLOCK:
        weights = pad(weights, (0, missing))
    blocks = weights.unflatten(-1, (-1, _BLOCK))
    # A sum of positive numbers in float32 is as exact as they are; running sums of many would lose rare ids.
    running = blocks.sum(-1).cumsum(-1, dtype=torch.float64)
    whole = running[:, -1:]
    at = _below(share * whole, whole)
    block = _first_above(running, at)
    inside = blocks.gather(1, block[..., None].expand(-1, -1, _BLOCK))[:, 0].cumsum(-1, dtype=torch.float64)
    return block * _BLOCK + _first_above(inside, at - pad(running, (1, 0)).gather(1, block)), whole


def _below(at: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
    """``at``, or the number before ``end`` if rounding brought it there."""
    return torch.minimum(at, torch.nextafter(end, torch.zeros_like(end)))


def _first_above(running: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """The first place where ``running`` (N, M) exceeds ``at``, (N, 1). With NaN it may be M - 1."""
    at = _below(at, running[:, -1:])
    return torch.searchsorted(running, at, right=True).clamp_(max=running.shape[-1] - 1)


def _cut(weights: torch.Tensor, top_k: Sequence[int], top_p: Sequence[float]) -> torch.Tensor:
    """``weights`` (N, V), set to 0 outside of the ``top_k`` largest, and then outside of the ``top_p`` nucleus.

    Of equal weights those of the lower ids are kept.
    """
    device, size = weights.device, weights.shape[-1]
    most = torch.tensor([min(k or size, size) for k in top_k], device=device)[:, None]
    share = torch.tensor(top_p, dtype=torch.float64, device=device)[:, None]
    ordered = min(size, max(top_k) if all(top_k) else max(_CANDIDATES, *top_k))
    while True:
        largest = weights.topk(ordered).values
        running = (largest * (torch.arange(ordered, device=device) < most)).cumsum(-1, dtype=torch.float64)
        kept = torch.where(most > ordered, weights.sum(-1, True, dtype=torch.float64), running[:, -1:])
        nucleus = (running < share * kept).sum(-1, True) + 1
        count = torch.minimum(most, nucleus)
        if ordered == size or bool((count <= ordered).all()):
            break
        ordered = size
    least = largest.gather(1, count - 1)
    above, equal = weights > least, weights == least
    return weights * (above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= count - above.sum(-1, True))))
