"""Helpers for advantages: labels as indices, episode weights, means and standard deviations within sets.

:mod:`clawgym.trainers.algorithms` uses them.

Invariants: sums are taken in float64, so adding the same number to all rewards does not change an advantage. A set of
equal values is centred to exactly 0.
"""

from __future__ import annotations

import torch
from torch import Tensor


def z_score(values: Tensor, index: Tensor, weights: Tensor, std: bool, eps: float) -> Tensor:
    """(value - mean) / (std + eps) within each set of equal ``index``; ``weights`` (N,) sum to 1 in each set."""
    gain = centred(values, index, weights)
    if not std:
        return gain
    biased, square = sum_by(weights * gain.square(), index), sum_by(weights.square(), index)
    spread = (biased / (1 - square).clamp(min=1e-12)).sqrt()
    return torch.where(gain == 0, 0.0, gain / (spread[index] + eps))


def centred(values: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """value - mean of its set. Exactly 0 where all values of a set are equal: otherwise a rounding error, divided by a
    tiny standard deviation, would become a gradient."""
    size = distinct(index)
    low = values.new_zeros(size).scatter_reduce(0, index, values, "amin", include_self=False)
    high = values.new_zeros(size).scatter_reduce(0, index, values, "amax", include_self=False)
    return torch.where((low == high)[index], 0.0, values - sum_by(weights * values, index)[index])


def episode_weights(group: Tensor, episode: Tensor) -> Tensor:
    """(N,) 1 / (episodes of the group * steps of the episode). The weights sum to 1 in each group."""
    share = 1 / count_by(episode)
    return share / sum_by(share, group)[group]


def check_episodes(group: Tensor, episode: Tensor) -> None:
    if torch.unique(torch.stack([group, episode]), dim=1).shape[1] != distinct(episode):
        raise ValueError("an episode has steps in two groups: give each episode a unique id")


def checked(rewards: Tensor, **labels: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Rewards in float64 and labels as 0..n-1. Raises :class:`ValueError` for wrong shapes and non-finite rewards."""
    same_shape(rewards=rewards, **labels)
    if rewards.dim() != 1:
        raise ValueError(f"rewards {tuple(rewards.shape)}: give a one-dimensional tensor")
    wrong = (~torch.isfinite(rewards)).nonzero().flatten().tolist()
    if wrong:
        raise ValueError(f"rewards[{wrong[0]}] is {float(rewards[wrong[0]])}: leave out episodes that were not graded")
    return rewards.detach().double(), [index_of(label) for label in labels.values()]


def same_shape(**tensors: Tensor) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        found = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"{found}: give tensors of the same shape")


def index_of(labels: Tensor) -> Tensor:
    return torch.unique(labels, return_inverse=True)[1]


def distinct(index: Tensor) -> int:
    return int(index.max()) + 1 if index.numel() else 0


def sum_by(values: Tensor, index: Tensor) -> Tensor:
    return values.new_zeros(distinct(index)).index_add(0, index, values)


def count_by(index: Tensor) -> Tensor:
    """For each element, the size of its set, in float64."""
    return sum_by(torch.ones_like(index, dtype=torch.float64), index)[index]


def dtype_of(tensor: Tensor) -> torch.dtype:
    return tensor.dtype if tensor.is_floating_point() else torch.get_default_dtype()


def real(tensor: Tensor) -> Tensor:
    """``tensor`` in at least float32: half precision is too coarse for differences of log-probs."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
