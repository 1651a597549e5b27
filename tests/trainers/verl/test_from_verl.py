"""verl's own advantages and losses under the names ``verl:NAME``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from clawgym.registry import advantages, losses
from clawgym.trainers import algorithms
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.protocols import loss_of
from clawgym.trainers.verl.settings import loss_mode, verl_settings

core: Any = pytest.importorskip("verl.trainer.ppo.core_algos")
configs: Any = pytest.importorskip("verl.workers.config")
formulas: Any = pytest.importorskip("clawgym.trainers.verl.formulas")

B, T = 6, 5


def config(**about: Any) -> TrainConfig:
    return TrainConfig.model_validate({"trainer": "verl", "algorithm": about})


def tensors(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(B, T) log-probs with gradient, old log-probs, advantages and mask."""
    generator = torch.Generator().manual_seed(seed)
    logp, old, gain = torch.randn(3, B, T, generator=generator) * 0.4
    lengths = torch.randint(1, T + 1, (B,), generator=generator)
    return logp.requires_grad_(), old, gain, (torch.arange(T) < lengths[:, None]).float()


@pytest.mark.parametrize("name", ["vanilla", "gspo", "gpg", "cispo", "dro", "dppo_tv", "kl_cov", "clip_cov"])
def test_loss_of_verl_with_token_weights(name: str) -> None:
    """With weights of the mean over tokens it is verl's own loss in the mode token-mean."""
    about = config(loss=f"verl:{name}", dual_clip=3.0, loss_options={"dro_beta": 0.5})
    logp, old, gain, mask = tensors()
    importance = algorithms.importance_weights(old, old - 0.3 * gain)
    actor = configs.ActorConfig(
        strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.28,
        clip_ratio_c=3.0, policy_loss=configs.PolicyLossConfig(loss_mode=name, dro_beta=0.5),
    )  # fmt: skip
    torch.manual_seed(0)
    theirs, said = core.POLICY_LOSS_REGISTRY[name](old, logp, gain, mask, "token-mean", actor, importance)
    torch.manual_seed(0)
    padded = torch.where(mask.bool(), logp, torch.nan)
    ours, seen = loss_of(about.algorithm)(padded, old, gain, mask / mask.sum(), importance)
    torch.testing.assert_close(ours, theirs)
    a, b = (torch.autograd.grad(loss, logp)[0] for loss in (ours, theirs))
    torch.testing.assert_close(a, b)
    assert a.any()
    assert seen["ratio_mean"] > 0
    if "actor/pg_clipfrac" in said:
        assert seen["clip_fraction"].item() == pytest.approx(said["actor/pg_clipfrac"])


def test_loss_reaches_the_training_process() -> None:
    """Through the settings, with the weights of this rank."""
    about = config(loss="verl:gpg")
    logp, old, gain, mask = tensors()
    actor = configs.ActorConfig(
        strategy="fsdp", rollout_n=1, use_dynamic_bsz=True,
        policy_loss=configs.PolicyLossConfig(loss_mode=loss_mode(about)),
    )  # fmt: skip
    actor.global_batch_info["dp_size"] = 2
    votes = torch.rand(B, T, generator=torch.Generator().manual_seed(1))
    loss, said = formulas.policy_loss(
        old_log_prob=old, log_prob=logp, advantages=gain, response_mask=mask, config=actor, votes=votes,
        rollout_is_weights=torch.full((B, T), 0.5),
    )  # fmt: skip
    assert loss.item() == pytest.approx(
        float(-(mask * votes * gain * logp.detach()).sum())
    )  # 2 ranks, factors of a half
    assert "actor/approx_kl" in said
    assert json.loads(loss_mode(about))[0] == "verl:gpg"


@pytest.mark.parametrize("name", ["grpo", "grpo_passk", "rloo", "rloo_vectorized", "reinforce_plus_plus", "gpg"])
def test_advantage_of_verl(name: str) -> None:
    rewards, groups = torch.tensor([1.0, -1.0, 0.3, 1.0, 0.1, -0.4]), torch.tensor([7, 7, 7, 2, 2, 2])
    one = rewards.double()[:, None]
    theirs, _ = core.ADV_ESTIMATOR_REGISTRY[name](
        token_level_rewards=one.clone(), response_mask=torch.ones_like(one), index=groups.numpy(),
        config=TrainConfigOfVerl(),
    )  # fmt: skip
    ours = advantages.make(f"verl:{name}", rewards, groups)
    torch.testing.assert_close(ours.double(), theirs[:, 0], rtol=1e-5, atol=1e-6)
    assert ours.any()


class TrainConfigOfVerl(dict[str, Any]):
    gamma = 1.0


def test_group_of_one_and_zero_variance_group_have_no_advantage() -> None:
    rewards, groups = torch.tensor([0.1, 0.1, 0.1, 0.7, 1.0, 0.0]), torch.tensor([0, 0, 0, 1, 2, 2])
    for name in ("grpo", "grpo_passk"):
        found = advantages.make(f"verl:{name}", rewards, groups)
        assert found[:4].tolist() == [0.0] * 4
        assert found[4] > 0
    assert advantages.make("verl:grpo_passk", rewards[3:4], groups[3:4]).tolist() == [0.0]


def test_every_usable_name_can_be_called(tmp_path: Path) -> None:
    from clawgym.trainers.verl import from_verl

    rewards, groups = torch.tensor([1.0, 0.0, 0.5, 1.0]), torch.tensor([0, 0, 1, 1])
    logp, old, gain, mask = tensors()
    called = 0
    for name in map(str, core.ADV_ESTIMATOR_REGISTRY):
        try:
            from_verl._estimator(name)
        except from_verl.TrainingError:
            continue
        assert torch.isfinite(advantages.make(f"verl:{name}", rewards, groups)).all(), name
        called += 1
    for name in set(core.POLICY_LOSS_REGISTRY) - from_verl._OWN_MEAN:
        loss, _ = losses.get(f"verl:{name}")(logp, old, gain, mask, dro_beta=0.1)
        assert torch.isfinite(loss), name
        called += 1
    assert called >= 14
    verl_settings(config(loss="verl:gpg", advantage="verl:rloo"), Path("/m"), window=64, run=tmp_path, resume=None)
