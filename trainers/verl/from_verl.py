"""verl's own advantages and losses in the form of ClawGym's, under the names ``verl:NAME``.

verl is imported when one is called, because its platform is set by environment variables of the run. Until then a name
is not checked; :func:`check_names` does that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from clawgym.errors import TrainingError
from clawgym.registry import did_you_mean
from clawgym.trainers import algorithms
from clawgym.trainers.config import TrainConfig

__all__ = ["PREFIX", "advantage", "check_names", "loss"]

PREFIX = "verl:"
_PASSED = {"token_level_rewards", "response_mask", "index", "config", "kwargs"}
"""The arguments that an estimator of verl gets here."""
_LENGTHS = {"opo": "the length of each response"}
"""Estimators that read more from these arguments than one outcome for each episode, and what."""
_OWN_MEAN = {"bypass_mode", "geo_mean", "sapo"}
"""Losses of verl that average over tokens by themselves, and so cannot take token weights."""


def advantage(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """The advantage of verl's registry called ``name``, as a :class:`~clawgym.trainers.protocols.Advantage`.

    An episode is one response of one token in verl. A group of one has advantage 0, as everywhere in ClawGym."""

    def call(rewards: Tensor, groups: Tensor) -> Tensor:
        from verl.trainer.config import AlgoConfig

        _, group, size = torch.unique(groups, return_inverse=True, return_counts=True)
        several = size[group] > 1
        found = torch.zeros_like(rewards)
        if several.any():
            outcome = rewards[several].double()[:, None]
            made, _ = _estimator(name)(
                token_level_rewards=outcome,
                response_mask=torch.ones_like(outcome),
                index=group[several].cpu().numpy(),
                config=AlgoConfig(adv_estimator=name),
            )
            # verl divides the rounding error of a zero-variance group by the epsilon: at most 1e-9 in float64.
            found[several] = made[:, 0].masked_fill(made[:, 0].abs() < 1e-9, 0.0).to(found.dtype)
        return found

    return call


def loss(name: str) -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
    """The loss of verl's registry called ``name``, as a :class:`~clawgym.trainers.protocols.Loss`.

    Options are those of verl's ``actor.policy_loss``, besides ClawGym's ``clip_low``, ``clip_high`` and ``dual_clip``.
    Metrics are those of ``ppo`` where they mean the same."""

    def call(
        logp: Tensor,
        old_logp: Tensor,
        advantages: Tensor,
        weights: Tensor,
        importance: Tensor | None = None,
        sequences: Tensor | None = None,
        *,
        clip_low: float = 0.2,
        clip_high: float = 0.28,
        dual_clip: float | None = None,
        clip_cov_ratio: float = 0.0002,
        clip_cov_lb: float = 1.0,
        clip_cov_ub: float = 5.0,
        kl_cov_ratio: float = 0.0002,
        ppo_kl_coef: float = 0.1,
        dro_beta: float | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        from verl.workers.config import ActorConfig, PolicyLossConfig

        about = PolicyLossConfig(
            loss_mode=name, clip_cov_ratio=clip_cov_ratio, clip_cov_lb=clip_cov_lb, clip_cov_ub=clip_cov_ub,
            kl_cov_ratio=kl_cov_ratio, ppo_kl_coef=ppo_kl_coef, dro_beta=dro_beta,
        )  # fmt: skip
        actor = ActorConfig(
            strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, clip_ratio=clip_low, clip_ratio_low=clip_low,
            clip_ratio_high=clip_high, clip_ratio_c=dual_clip or 1e9, policy_loss=about,
        )  # fmt: skip
        trained = weights != 0
        logp, old_logp, advantages = (
            torch.where(trained, x, torch.zeros_like(x)) for x in (logp, old_logp, advantages)
        )
        # The sum over tokens of verl's losses times these factors is the loss.
        total, said = _loss(name)(
            old_log_prob=old_logp,
            log_prob=logp,
            advantages=advantages,
            response_mask=trained.to(logp.dtype),
            loss_agg_mode="token-sum",
            config=actor,
            rollout_is_weights=weights if importance is None else weights * importance,
        )
        with torch.no_grad():
            _, seen = algorithms.policy_loss(logp, old_logp, advantages, weights)
        shown = {key: seen[key] for key in ("ratio_mean", "ratio_max", "approx_kl", "tokens")}
        shares = (("pg_clipfrac", "clip_fraction"), ("pg_clipfrac_lower", "dual_clip_fraction"))
        return total, shown | {
            ours: logp.new_tensor(said[f"actor/{theirs}"]) for theirs, ours in shares if f"actor/{theirs}" in said
        }

    return call


def check_names(config: TrainConfig) -> None:
    """Raise :class:`~clawgym.errors.TrainingError` for an advantage or a loss ``verl:NAME`` that verl does not have, or
    that ClawGym cannot use."""
    if config.algorithm.advantage.startswith(PREFIX):
        _estimator(config.algorithm.advantage.removeprefix(PREFIX))
    if config.algorithm.loss.startswith(PREFIX):
        _loss(config.algorithm.loss.removeprefix(PREFIX))


def _estimator(name: str) -> Callable[..., Any]:
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    def lacks(one: Any) -> str:
        """What the estimator called ``one`` needs that there is not."""
        parameters = inspect.signature(ADV_ESTIMATOR_REGISTRY[one]).parameters.values()
        needed = [p.name for p in parameters if p.default is p.empty and p.name not in _PASSED]
        return ", ".join(filter(None, [*needed, _LENGTHS.get(str(one), "")]))

    known = {str(one): one for one in ADV_ESTIMATOR_REGISTRY}
    usable = [one for one in known if not lacks(known[one])]
    why = f"it needs more than an outcome ({lacks(known[name])})" if name in known else ""
    _check(f"algorithm.advantage: {PREFIX}{name}", name, list(known), usable, why)
    return ADV_ESTIMATOR_REGISTRY[known[name]]


def _loss(name: str) -> Callable[..., Any]:
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    usable = [one for one in POLICY_LOSS_REGISTRY if one not in _OWN_MEAN]
    _check(f"algorithm.loss: {PREFIX}{name}", name, list(POLICY_LOSS_REGISTRY), usable, "it ignores token weights")
    return POLICY_LOSS_REGISTRY[name]


def _check(asked: str, name: str, known: list[str], usable: list[str], why: str) -> None:
    choose = f"choose one of {', '.join(PREFIX + one for one in sorted(usable))}"
    if name not in known:
        raise TrainingError(f"{asked}: verl has none of this name: {choose}.{did_you_mean(name, usable)}")
    if name not in usable:
        raise TrainingError(f"{asked}: {why}: {choose}")
