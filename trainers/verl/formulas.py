"""Our advantages and our loss under the name ``clawgym`` in verl; imported by every process that learns.

Invariant: the numbers are those of :mod:`clawgym.trainers.algorithms`; nothing is computed here but shapes.

verl hands a loss no weight of a token, and the vote of an episode must be counted over the whole batch. So the factor
that verl multiplies each token's loss with (``rollout_is_weights``) carries both: the weight of the token times its
truncated importance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from verl.trainer.ppo.core_algos import register_adv_est, register_policy_loss

from clawgym.trainers import algorithms
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.credit import Attempt, turn_advantages

__all__ = ["NAME", "advantages", "policy_loss", "token_factors"]

NAME = "clawgym"
"""``algorithm.adv_estimator`` and ``actor.policy_loss.loss_mode``."""


@register_adv_est(NAME)
def advantages(
    *,
    response_mask: torch.Tensor,
    attempts: Sequence[Attempt],
    episode: torch.Tensor,
    turn: torch.Tensor,
    train: TrainConfig,
    seed: int,
    worth: float,
    figures: dict[str, float],
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, T) the advantage of each trained token, twice: verl wants returns too.

    ``response_mask`` (B, T); ``episode`` (B,) indices into ``attempts``; ``turn`` (B, T) where a token is trained.
    ``figures`` gets those of the process rewards."""
    by_turn, said = turn_advantages(attempts, train, seed=seed, worth=worth)
    figures.update(said)
    given = torch.zeros(response_mask.shape)
    for row, place in response_mask.nonzero().tolist():
        given[row, place] = by_turn[int(episode[row]), int(turn[row, place])]
    return given, given


def token_factors(
    response_mask: torch.Tensor, episode: torch.Tensor, importance: torch.Tensor | None, train: TrainConfig
) -> torch.Tensor:
    """(B, T) what each token's loss is multiplied with, so that a sum over the batch is the loss.

    ``importance`` (B, T), where there is one. With several mini-batches each has its share of the votes."""
    trained = response_mask.bool()
    rows = torch.arange(len(trained))[:, None].expand_as(trained)
    factors = torch.zeros(trained.shape)
    factors[trained] = algorithms.token_weights(
        episode[:, None].expand_as(trained)[trained], train.algorithm.aggregation, rows=rows[trained]
    )
    if importance is not None:
        factors = factors * torch.where(trained, importance, torch.zeros_like(importance))
    return factors * train.algorithm.minibatches


@register_policy_loss(NAME)
def policy_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, dict[str, float]]:
    """The loss of the rows (B, T) that this rank has of a micro-batch. Ranks are averaged later, so it is multiplied by
    their number. Raises :class:`ValueError` without the factors of :func:`token_factors`."""
    if rollout_is_weights is None:
        raise ValueError("no factors came with this batch: train with `clawgym train --set trainer=verl`")
    ranks = config.global_batch_info.get("dp_size") or 1
    loss, said = algorithms.policy_loss(
        log_prob,
        old_log_prob,
        advantages,
        torch.where(response_mask.bool(), rollout_is_weights, torch.zeros_like(rollout_is_weights)) * ranks,
        clip_low=config.clip_ratio_low,
        clip_high=config.clip_ratio_high,
        dual_clip=None if math.isinf(config.clip_ratio_c) else config.clip_ratio_c,
    )
    return loss, {f"actor/{name}": float(value) for name, value in said.items() if name != "tokens"}
