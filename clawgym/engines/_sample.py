"""Sample one token for each row of logits, with its exact log-probability.

The log-probability is log softmax(logits / temperature) over the whole vocabulary, even with top-k and top-p. At
temperature 0 the most likely id is taken, with its log-probability at temperature 1.

The sampled id is a function of the row's logits and its uniform number (inverse transform sampling: the first id where
the cumulative probability exceeds the number). So other rows of the batch affect it by rounding only. The cumulative
probabilities are those of blocks of ids, and then those inside of one block: whole rows in float64 would take longer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

__all__ = ["sample"]

BLOCK = 64
"""Number of ids; the sizes of most vocabularies are multiples."""


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
    blocks, running = _in_blocks(weights)
    total = running[:, -1:]
    cut = [i for i, (k, p) in enumerate(zip(top_k, top_p, strict=True)) if (k or p < 1.0) and temperature[i]]
    if cut:
        weights[cut] = _cut(weights[cut], [top_k[i] for i in cut], [top_p[i] for i in cut])
        blocks, running = _in_blocks(weights)
    at = torch.tensor(uniform, dtype=torch.float64, device=device)[:, None] * running[:, -1:]
    block, at = _first_above(running, at)
    inside = blocks.gather(1, block[..., None].expand(-1, -1, blocks.shape[-1]))[:, 0].cumsum(-1, dtype=torch.float64)
    ids = block * blocks.shape[-1] + _first_above(inside, at)[0]
    if not all(temperature):
        greedy = torch.tensor([not t for t in temperature], device=device)[:, None]
        ids = torch.where(greedy, z.argmax(-1, keepdim=True), ids)
    ids = ids.clamp_(max=logits.shape[-1] - 1)  # NaN
    logprobs = (z.gather(-1, ids) - top).double() - total.log()
    return ids[:, 0].tolist(), logprobs[:, 0].tolist()


def _in_blocks(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``weights`` (N, V) as (N, B, 64), filled up with 0, and the running sums of the blocks, (N, B) in float64.

    A sum of positive numbers in float32 is as exact as they are; running sums of many would lose rare ids.
    """
    if missing := -weights.shape[-1] % BLOCK:
        weights = pad(weights, (0, missing))
    blocks = weights.unflatten(-1, (-1, BLOCK))
    return blocks, blocks.sum(-1).cumsum(-1, dtype=torch.float64)


def _first_above(running: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first place where ``running`` (N, M) exceeds ``at`` (N, 1), both (N, 1), and ``at`` less what is before it.

    ``at`` that is not below the end, where rounding brought it, is taken as the number before the end.
    """
    end = running[:, -1:]
    at = torch.minimum(at, torch.nextafter(end, torch.zeros_like(end)))
    place = torch.searchsorted(running, at, right=True).clamp_(max=running.shape[-1] - 1)  # at the end only with NaN
    return place, at - pad(running, (1, 0)).gather(1, place)


def _cut(weights: torch.Tensor, top_k: Sequence[int], top_p: Sequence[float]) -> torch.Tensor:
    """``weights`` (N, V), set to 0 outside of the ``top_k`` largest, and then outside of the ``top_p`` nucleus."""
    device = weights.device
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    size = weights.shape[-1]
    rank = torch.arange(size, device=device)
    most = torch.tensor([k or size for k in top_k], device=device)[:, None]
    ordered = ordered * (rank < most)
    before = ordered.cumsum(-1, dtype=torch.float64) - ordered
    share = torch.tensor(top_p, dtype=torch.float64, device=device)[:, None] * ordered.sum(
        -1, True, dtype=torch.float64
    )
    ordered = ordered * ((before < share) | (rank == 0))
    return torch.zeros_like(weights).scatter_(-1, order, ordered)
