"""ClawGym's advantages and losses as plug-ins of verl; imported by every training process.

Invariant: values are those of the registered advantages and losses; this module only converts shapes.

Token weights depend on the whole batch, and verl passes no token weights to a policy loss. Therefore
``rollout_is_weights``, a factor of each token's loss in verl, holds the product of token weight and truncated
importance weight. The other terms of :func:`loss` use the token weights (queue field ``votes``) only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from verl.trainer.ppo.core_algos import agg_loss, register_adv_est
from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.padding import no_padding_2_padding

from clawgym.registry import losses
from clawgym.trainers import algorithms
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.credit import ProcessWeight, ScoredEpisode, turn_advantages

__all__ = ["NAME", "advantages", "loss", "policy_loss", "batch_token_weights"]

NAME = "clawgym"
"""The name of the advantage in verl's ``algorithm.adv_estimator``."""


@register_adv_est(NAME)
def advantages(
    *,
    response_mask: torch.Tensor,
    scored: Sequence[ScoredEpisode],
    episode: torch.Tensor,
    turn: torch.Tensor,
    train: TrainConfig,
    seed: int,
    process_weight: ProcessWeight,
    metrics: dict[str, float],
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, T) the advantage of each trained token, twice, since verl expects advantages and returns.

    ``response_mask`` (B, T); ``episode`` (B,) indices into ``scored``; ``turn`` (B, T) the turn of each trained token.
    Metrics of the process rewards are added to ``metrics``."""
    by_turn, said = turn_advantages(scored, train, seed=seed, process_weight=process_weight)
    metrics.update(said)
    given = torch.zeros(response_mask.shape)
    for row, place in response_mask.nonzero().tolist():
        given[row, place] = by_turn[int(episode[row]), int(turn[row, place])]
    return given, given


def batch_token_weights(response_mask: torch.Tensor, episode: torch.Tensor, train: TrainConfig) -> torch.Tensor:
    """(B, T) the weight of each token, 0 for untrained ones, so that a weighted sum over the batch is the loss.

    The weights are multiplied by the number of mini-batches, so that those of a mini-batch sum to about 1."""
    trained = response_mask.bool()
    rows = torch.arange(len(trained))[:, None].expand_as(trained)
    weights = torch.zeros(trained.shape)
    weights[trained] = algorithms.token_weights(
        episode[:, None].expand_as(trained)[trained], train.algorithm.aggregation, rows=rows[trained]
    )
    return weights * train.algorithm.minibatches


@lru_cache
def _loss_called(mode: str) -> partial[Any]:
    """The loss that :func:`~clawgym.trainers.verl.settings.loss_mode` wrote."""
    name, options = json.loads(mode)
    return partial(losses.get(name), **options)


def policy_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any,
    rollout_is_weights: torch.Tensor,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The policy loss of this rank's rows (B, T) of a micro-batch, multiplied by the number of ranks because verl
    averages over ranks. ``rollout_is_weights``: token weights times truncated importance weights."""
    ranks = config.global_batch_info.get("dp_size") or 1
    loss, said = _loss_called(config.policy_loss.loss_mode)(
        log_prob,
        old_log_prob,
        advantages,
        torch.where(response_mask.bool(), rollout_is_weights, torch.zeros_like(rollout_is_weights)) * ranks,
    )
    metrics: dict[str, Any] = {f"actor/{name}": float(value) for name, value in said.items() if name != "tokens"}
    return loss, metrics


def loss(
    config: Any, model_output: Mapping[str, torch.Tensor], data: Any, dp_group: Any = None
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """The loss that verl minimises in place of its ``ppo_loss``: policy loss, KL to the initial policy (k3), entropy
    and imitation, over this rank's rows of a micro-batch. verl's own KL and entropy terms ignore token weights."""
    logp, entropy = (no_padding_2_padding(model_output[name], data) for name in ("log_probs", "entropy"))
    ranks = config.global_batch_info["dp_size"] = data["dp_size"]
    mean = {"loss_agg_mode": "token-mean", "dp_size": ranks, "batch_num_tokens": data["batch_num_tokens"]}
    fields = ["response_mask", "old_log_probs", "advantages", "rollout_is_weights", "votes"]
    fields += [name for name in ("ref_log_prob", "imitated") if name in data]
    rows = data.select(*fields).to_padded_tensor()
    mask = rows["response_mask"].bool()
    weights = torch.where(mask, rows["votes"], torch.zeros_like(rows["votes"])) * ranks
    total, said = policy_loss(
        old_log_prob=rows["old_log_probs"],
        log_prob=logp,
        advantages=rows["advantages"],
        response_mask=mask,
        config=config,
        rollout_is_weights=rows["rollout_is_weights"],
    )
    seen = Metric.from_dict(said, AggregationType.MEAN)
    seen["actor/pg_loss"] = Metric(AggregationType.SUM, total.detach())
    if config.use_kl_loss:
        apart = torch.where(mask, algorithms.kl(logp, rows["ref_log_prob"], "k3"), torch.zeros_like(logp))
        total = total + config.kl_loss_coef * (weights * apart).sum()
        seen["actor/ref_kl"] = Metric(AggregationType.SUM, agg_loss(apart.detach(), mask, **mean))
    if config.entropy_coeff:
        total = total - config.entropy_coeff * (weights * torch.where(mask, entropy, torch.zeros_like(entropy))).sum()
    if "imitated" in fields:
        away = -ranks * (rows["imitated"] * torch.where(rows["imitated"] > 0, logp, torch.zeros_like(logp))).sum()
        total = total + away
        seen["actor/imitation"] = Metric(AggregationType.SUM, away.detach())
    seen["actor/entropy"] = Metric(AggregationType.SUM, agg_loss(entropy.detach(), mask, **mean))
    return total, seen
