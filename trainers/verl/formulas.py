"""Our advantages under the name ``clawgym`` in verl, and our losses; imported by every process that learns.

Invariant: the numbers are those of the registered advantages and losses; nothing is computed here but shapes.

The vote of an episode must be counted over the whole batch, and verl hands a policy loss no weight of a token. So the
factor that verl multiplies each token's loss with (``rollout_is_weights``) carries both: the vote of the token times
its truncated importance. The other terms of :func:`loss` take the votes alone.
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
from clawgym.trainers.credit import ScoredEpisode, Worth, turn_advantages

__all__ = ["NAME", "advantages", "loss", "policy_loss", "token_votes"]

NAME = "clawgym"
"""``algorithm.adv_estimator``."""


@register_adv_est(NAME)
def advantages(
    *,
    response_mask: torch.Tensor,
    attempts: Sequence[ScoredEpisode],
    episode: torch.Tensor,
    turn: torch.Tensor,
    train: TrainConfig,
    seed: int,
    worth: Worth,
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


def token_votes(response_mask: torch.Tensor, episode: torch.Tensor, train: TrainConfig) -> torch.Tensor:
    """(B, T) what each token counts for, so that a sum over the batch is the loss; 0 where none is trained.

    With several mini-batches each has its share of the votes."""
    trained = response_mask.bool()
    rows = torch.arange(len(trained))[:, None].expand_as(trained)
    votes = torch.zeros(trained.shape)
    votes[trained] = algorithms.token_weights(
        episode[:, None].expand_as(trained)[trained], train.algorithm.aggregation, rows=rows[trained]
    )
    return votes * train.algorithm.minibatches


@lru_cache
def _loss_called(mode: str) -> partial[Any]:
    """The loss that :func:`loss_mode` wrote down."""
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
    """The loss of the rows (B, T) that this rank has of a micro-batch. Ranks are averaged later, so it is multiplied by
    their number. ``rollout_is_weights``: votes, times the truncated importance."""
    ranks = config.global_batch_info.get("dp_size") or 1
    loss, said = _loss_called(config.policy_loss.loss_mode)(
        log_prob,
        old_log_prob,
        advantages,
        torch.where(response_mask.bool(), rollout_is_weights, torch.zeros_like(rollout_is_weights)) * ranks,
    )
    figures: dict[str, Any] = {f"actor/{name}": float(value) for name, value in said.items() if name != "tokens"}
    return loss, figures


def loss(
    config: Any, model_output: Mapping[str, torch.Tensor], data: Any, dp_group: Any = None
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """What verl minimises in place of its ``ppo_loss``, whose terms of KL and entropy know no votes: the policy's loss,
    KL to the first policy (k3), entropy and imitation, of the rows that this rank has of a micro-batch."""
    logp, entropy = (no_padding_2_padding(model_output[name], data) for name in ("log_probs", "entropy"))
    ranks = config.global_batch_info["dp_size"] = data["dp_size"]
    mean = {"loss_agg_mode": "token-mean", "dp_size": ranks, "batch_num_tokens": data["batch_num_tokens"]}
    fields = ["response_mask", "old_log_probs", "advantages", "rollout_is_weights", "votes"]
    fields += [name for name in ("ref_log_prob", "imitated") if name in data]
    rows = data.select(*fields).to_padded_tensor()
    mask = rows["response_mask"].bool()
    votes = torch.where(mask, rows["votes"], torch.zeros_like(rows["votes"])) * ranks
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
        total = total + config.kl_loss_coef * (votes * apart).sum()
        seen["actor/ref_kl"] = Metric(AggregationType.SUM, agg_loss(apart.detach(), mask, **mean))
    if config.entropy_coeff:
        total = total - config.entropy_coeff * (votes * torch.where(mask, entropy, torch.zeros_like(entropy))).sum()
    if "imitated" in fields:
        away = -ranks * (rows["imitated"] * torch.where(rows["imitated"] > 0, logp, torch.zeros_like(logp))).sum()
        total = total + away
        seen["actor/imitation"] = Metric(AggregationType.SUM, away.detach())
    seen["actor/entropy"] = Metric(AggregationType.SUM, agg_loss(entropy.detach(), mask, **mean))
    return total, seen
