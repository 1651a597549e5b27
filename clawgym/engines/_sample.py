"""Sample one token for each row of logits, with its exact log-probability.

The log-probability is log softmax(logits / temperature) over the whole vocabulary, even with top-k and top-p. At
temperature 0 the most likely id is taken, with its log-probability at temperature 1.

The sampled id is a function of the row's logits and its uniform number (inverse transform sampling: the first id where
the cumulative probability exceeds the number). So other rows of the batch affect it by rounding only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["sample"]


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
    running = weights.cumsum(-1, dtype=torch.float64)  # float32 would lose rare ids of a large vocabulary
    total = running[:, -1:]
    drawn = running
    cut = [i for i, (k, p) in enumerate(zip(top_k, top_p, strict=True)) if (k or p < 1.0) and temperature[i]]
    if cut:
        drawn = running.clone()
        drawn[cut] = _cut(weights[cut], [top_k[i] for i in cut], [top_p[i] for i in cut]).cumsum(
            -1, dtype=torch.float64
        )
    end = drawn[:, -1:]
    at = torch.tensor(uniform, dtype=torch.float64, device=device)[:, None] * end
    at = torch.minimum(at, torch.nextafter(end, torch.zeros_like(end)))  # the product may round up to the end
    ids = torch.searchsorted(drawn, at, right=True)
    if not all(temperature):
        greedy = torch.tensor([not t for t in temperature], device=device)[:, None]
        ids = torch.where(greedy, z.argmax(-1, keepdim=True), ids)
    ids = ids.clamp_(max=logits.shape[-1] - 1)
    logprobs = (z.gather(-1, ids) - top).double() - total.log()
    return ids[:, 0].tolist(), logprobs[:, 0].tolist()


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
