"""ClawGym's advantages and losses as plug-ins of verl; imported by every training process.

Invariant: values are those of the registered advantages and losses; this module only converts shapes.

Token weights depend on the whole batch, and verl passes no token weights to its losses. They are the queue field
``votes``. The field ``rollout_is_weights`` holds the importance weights, as in verl.
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
from clawgym.trainers.credit import ProcessWeight, ScoredEpisode, token_advantages, turn_advantages
from clawgym.trainers.protocols import logged_metrics

__all__ = ["NAME", "advantages", "batch_importance", "batch_token_weights", "loss", "policy_loss"]

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
    trained = response_mask.bool()
    given = torch.zeros(trained.shape)
    given[trained] = token_advantages(by_turn, episode[:, None].expand_as(turn)[trained], turn[trained])
    return given, given


def batch_token_weights(response_mask: torch.Tensor, episode: torch.Tensor, train: TrainConfig) -> torch.Tensor:
    """(B, T) the weight of each token, 0 for untrained ones, so that a weighted sum over the batch is the loss.

    The weights are multiplied by the number of mini-batches, so that those of a mini-batch sum to about 1."""
    trained = response_mask.bool()
    rows = torch.arange(len(trained))[:, None].expand_as(trained)
    weights = torch.zeros(trained.shape)
    weights[trained] = algorithms.token_weights(
        episode[:, None].expand_as(trained)[trained],
        train.algorithm.aggregation,
        rows=rows[trained],
        norm=train.loss_length,
    )
    return weights * train.algorithm.minibatches


def batch_importance(
    old_logp: torch.Tensor, rollout_logp: torch.Tensor, response_mask: torch.Tensor, train: TrainConfig
) -> torch.Tensor:
    """(B, T) the importance weight (:func:`~clawgym.trainers.algorithms.importance_weights`) of each trained token; 1
    for the others, and everywhere with ``algorithm.old: rollout``."""
    about, trained = train.algorithm, response_mask.bool()
    factors = torch.ones(trained.shape)
    if about.old == "recompute":
        rows = torch.arange(len(trained))[:, None].expand_as(trained)
        factors[trained] = algorithms.importance_weights(
            old_logp[trained],
            rollout_logp[trained],
            cap=about.importance_cap,
            rows=rows[trained] if about.importance.endswith("sequence") else None,
            masked=about.importance.startswith("masked"),
        ).to(factors.dtype)
    return factors


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
    votes: torch.Tensor,
    rollout_is_weights: torch.Tensor,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The policy loss of this rank's rows (B, T) of a micro-batch, multiplied by the number of ranks because verl
    averages over ranks. ``votes``: token weights; ``rollout_is_weights``: importance weights."""
    ranks = config.global_batch_info.get("dp_size") or 1
    loss, said = _loss_called(config.policy_loss.loss_mode)(
        log_prob,
        old_log_prob,
        advantages,
        torch.where(response_mask.bool(), votes, torch.zeros_like(votes)) * ranks,
        rollout_is_weights,
    )
    return loss, {f"actor/{name}": float(value) for name, value in logged_metrics(said).items()}


def loss(
    config: Any, model_output: Mapping[str, torch.Tensor], data: Any, dp_group: Any = None
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """The loss that verl minimises in place of its ``ppo_loss``: policy loss, KL to the initial policy, entropy and
    imitation, over this rank's rows of a micro-batch. verl's own KL and entropy terms ignore token weights."""
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
        votes=rows["votes"],
        rollout_is_weights=rows["rollout_is_weights"],
    )
    seen = Metric.from_dict(said, AggregationType.MEAN)
    seen["actor/pg_loss"] = Metric(AggregationType.SUM, total.detach())
    if config.use_kl_loss:
        term, apart = (
            torch.where(mask, algorithms.kl(logp, rows["ref_log_prob"], kind), torch.zeros_like(logp))
            for kind in (config.kl_loss_type, "k3")
        )
        total = total + config.kl_loss_coef * (weights * term).sum()
        seen["actor/ref_kl"] = Metric(AggregationType.SUM, agg_loss(apart.detach(), mask, **mean))
    if config.entropy_coeff:
        total = total - config.entropy_coeff * (weights * torch.where(mask, entropy, torch.zeros_like(entropy))).sum()
    if "imitated" in fields:
        away = -ranks * (rows["imitated"] * torch.where(rows["imitated"] > 0, logp, torch.zeros_like(logp))).sum()
        total = total + away
        seen["actor/imitation"] = Metric(AggregationType.SUM, away.detach())
    seen["actor/entropy"] = Metric(AggregationType.SUM, agg_loss(entropy.detach(), mask, **mean))
    return total, seen
