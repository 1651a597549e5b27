"""Our formulas against verl's own, where the two mean the same.

On purpose ours differ in what follows, and the tests leave it out:

- A group of one: verl keeps the raw reward as advantage (GRPO, RLOO and the baseline of REINFORCE++), ours is 0.
- A group of equals: verl divides what rounding leaves by eps, ours is 0 exactly. Both deviations are unbiased.
- REINFORCE++: verl whitens over tokens, so that long answers count more in the deviation, and puts its eps below the
  root; ours whitens over episodes, with the eps beside it. With one token an answer they are the same.
- ``seq-mean-*`` divide by rows that have a trained token; our ids name such rows only. Rows are verl's voters, episodes
  are ours: the same where an episode is one row.
- k3: verl bounds the estimate itself by 10, ours the exponent by 20 only.
- Clip fractions count tokens that lost their gradient; verl's ``pg_clipfrac_lower`` is our ``dual_clip_fraction``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from clawgym.trainers import algorithms as formulas

core: Any = pytest.importorskip("verl.trainer.ppo.core_algos")
correction: Any = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")
configs: Any = pytest.importorskip("verl.workers.config")

B, T = 12, 7


@pytest.fixture(params=range(3))
def generator(request: pytest.FixtureRequest) -> torch.Generator:
    return torch.Generator().manual_seed(request.param)


@pytest.fixture
def mask(generator: torch.Generator) -> Tensor:
    lengths = torch.randint(1, T + 1, (B,), generator=generator)
    return (torch.arange(T) < lengths[:, None]).float()


def per_answer(token_level: Tensor, mask: Tensor) -> Tensor:
    """(B,) verl's advantage of each answer, checked to be the same at each of its tokens."""
    first = token_level[:, 0]
    torch.testing.assert_close(token_level, first[:, None] * mask)
    return first


def rewards_and_groups(generator: torch.Generator, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rewards = torch.rand(B, generator=generator)
    at_end = torch.zeros(B, T)
    at_end[torch.arange(B), mask.sum(1).long() - 1] = rewards
    groups = torch.arange(B) // 2 % 3  # each of four
    return rewards, at_end, groups[torch.randperm(B, generator=generator)]


@pytest.mark.parametrize("std", [True, False])
def test_grpo(generator: torch.Generator, mask: Tensor, std: bool) -> None:
    rewards, at_end, groups = rewards_and_groups(generator, mask)
    theirs, _ = core.compute_grpo_outcome_advantage(at_end, mask, groups.numpy(), norm_adv_by_std_in_grpo=std)
    torch.testing.assert_close(formulas.group_advantages(rewards, groups, std=std), per_answer(theirs, mask))


def test_intended_differences_from_verl() -> None:
    """If this fails, verl has changed: check the list above."""
    rewards, mask = torch.tensor([0.7, 0.1, 0.1, 0.1]), torch.ones(4, 1)
    groups = torch.tensor([0, 1, 1, 1])
    theirs, _ = core.compute_grpo_outcome_advantage(rewards[:, None], mask, groups.numpy())
    assert per_answer(theirs, mask)[0] == pytest.approx(0.7)
    assert formulas.group_advantages(rewards, groups).tolist() == [0, 0, 0, 0]
    theirs, _ = core.compute_rloo_outcome_advantage(rewards[:, None], mask, groups.numpy())
    assert per_answer(theirs, mask)[0] == pytest.approx(0.7)
    far = torch.tensor([-5.0]), torch.tensor([0.0])
    assert core.kl_penalty(*far, "k3").item() == 10 < formulas.kl(*far, "k3").item()


def test_rloo(generator: torch.Generator, mask: Tensor) -> None:
    rewards, at_end, groups = rewards_and_groups(generator, mask)
    theirs, _ = core.compute_rloo_outcome_advantage(at_end, mask, groups.numpy())
    torch.testing.assert_close(formulas.rloo_advantages(rewards, groups), per_answer(theirs, mask))


def test_reinforce_pp_with_a_baseline(generator: torch.Generator) -> None:
    mask = torch.ones(B, 1)
    rewards = torch.rand(B, generator=generator)
    groups = torch.arange(B) % 3
    theirs, _ = core.compute_reinforce_plus_plus_baseline_outcome_advantage(rewards[:, None], mask, groups.numpy())
    ours = formulas.reinforce_pp_advantages(rewards, groups)
    torch.testing.assert_close(ours, per_answer(theirs, mask), rtol=1e-4, atol=1e-5)


MODES = {
    "token-mean": ("token", None),
    "seq-mean-token-mean": ("sequence", None),
    "seq-mean-token-sum": ("seq-mean-token-sum", None),
    "seq-mean-token-sum-norm": ("seq-mean-token-sum-norm", 16.0),
}


def weights_of(mask: Tensor, mode: str, norm: float | None) -> Tensor:
    trained = mask.bool()
    rows = torch.arange(B)[:, None].expand(B, T)[trained]
    weights = torch.zeros(B, T)
    weights[trained] = formulas.token_weights(rows, mode, rows=rows, norm=norm)  # type: ignore[arg-type]
    return weights


@pytest.mark.parametrize("mode", MODES)
def test_aggregation(generator: torch.Generator, mask: Tensor, mode: str) -> None:
    mask[3] = 0  # a sequence without trained tokens has no weight
    losses = torch.randn(B, T, generator=generator)
    ours, norm = MODES[mode]
    theirs = core.agg_loss(losses, mask, mode, loss_scale_factor=norm)
    torch.testing.assert_close((weights_of(mask, ours, norm) * losses).sum(), theirs)


def test_episode_weights_equal_sequence_weights_for_one_sequence_each(mask: Tensor) -> None:
    torch.testing.assert_close(weights_of(mask, "episode", None), weights_of(mask, "sequence", None))


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("dual", [1.1, 3.0])
@pytest.mark.parametrize("corrected", [False, True])
def test_policy_loss(generator: torch.Generator, mask: Tensor, mode: str, dual: float, corrected: bool) -> None:
    logp, old, engine, gain = torch.randn(4, B, T, generator=generator) * 0.4
    logp.requires_grad_()
    config = configs.ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
        clip_ratio=0.2,
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        clip_ratio_c=dual,
    )
    importance, theirs_importance = None, None
    if corrected:
        importance = formulas.importance_weights(old, engine, cap=1.5)
        theirs_importance, _ = correction.compute_rollout_correction_weights(
            old - engine, mask, rollout_is="token", rollout_is_threshold=1.5
        )
        torch.testing.assert_close(importance * mask, theirs_importance)
    theirs, said = core.compute_policy_loss_vanilla(old, logp, gain, mask, mode, config, theirs_importance)
    weights = weights_of(mask, *MODES[mode])
    ours, seen = formulas.policy_loss(logp, old, gain, weights, dual_clip=dual, importance=importance)
    torch.testing.assert_close(ours, theirs)
    a, b = (torch.autograd.grad(loss, logp)[0] for loss in (ours, theirs))
    torch.testing.assert_close(a, b)
    assert seen["clip_fraction"].item() == pytest.approx(said["actor/pg_clipfrac"])
    assert seen["dual_clip_fraction"].item() == pytest.approx(said["actor/pg_clipfrac_lower"])


def test_importance_of_sequences(generator: torch.Generator, mask: Tensor) -> None:
    old, engine = torch.randn(2, B, T, generator=generator) * 0.3
    theirs, _ = correction.compute_rollout_correction_weights(
        old - engine, mask, rollout_is="sequence", rollout_is_threshold=2.0
    )
    trained = mask.bool()
    rows = torch.arange(B)[:, None].expand(B, T)[trained]
    ours = formulas.importance_weights(old[trained], engine[trained], rows=rows)
    torch.testing.assert_close(ours, theirs[trained])


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_masked_importance(generator: torch.Generator, mask: Tensor, level: str) -> None:
    old, engine = torch.randn(2, B, T, generator=generator) * 0.3
    kept, _ = correction.compute_rollout_rejection_mask(
        old - engine,
        mask,
        {"token": "token_k1", "sequence": "seq_sum_k1"}[level],
        f"{1 / 1.3}_1e9",  # the bounds are those of pi_rollout / pi_old
    )
    theirs, _ = correction.compute_rollout_correction_weights(
        old - engine, mask, rollout_is=level, rollout_is_threshold=1.3
    )
    trained = mask.bool()
    rows = torch.arange(B)[:, None].expand(B, T)[trained] if level == "sequence" else None
    ours = formulas.importance_weights(old[trained], engine[trained], cap=1.3, rows=rows, masked=True)
    torch.testing.assert_close(ours, (kept * theirs)[trained])
    assert (ours == 0).any()


def losses_of(
    generator: torch.Generator, mask: Tensor, theirs: Any, ours: Any, mode: str, **clips: float
) -> tuple[Any, Any]:
    """The loss of verl and ours on the same tensors, compared by value and gradient; the metrics of both."""
    logp, old, engine, gain = torch.randn(4, B, T, generator=generator) * 0.4
    logp.requires_grad_()
    config = configs.ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, **clips)
    importance = formulas.importance_weights(old, engine, cap=1.5)
    loss, said = theirs(old, logp, gain, mask, mode, config, importance)
    mine, seen = ours(logp, old, gain, weights_of(mask, *MODES[mode]), importance)
    torch.testing.assert_close(mine, loss)
    a, b = (torch.autograd.grad(x, logp)[0] for x in (mine, loss))
    torch.testing.assert_close(a, b)
    return said, seen


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_gspo(generator: torch.Generator, mask: Tensor, mode: str) -> None:
    ours = partial(formulas.gspo_loss, low=0.1, high=0.2)
    clips = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.2}
    said, seen = losses_of(generator, mask, core.compute_policy_loss_gspo, ours, mode, **clips)
    assert seen["clip_fraction"].item() == pytest.approx(said["actor/pg_clipfrac"])
    assert seen["clip_fraction"] > 0


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum"])
def test_cispo(generator: torch.Generator, mask: Tensor, mode: str) -> None:
    """verl has a lower bound too; at 1 - 1 it is none."""
    ours = partial(formulas.cispo_loss, cap=1.3)
    clips = {"clip_ratio_low": 1.0, "clip_ratio_high": 0.3}
    said, seen = losses_of(generator, mask, core.compute_policy_loss_cispo, ours, mode, **clips)
    assert seen["clip_fraction"].item() == pytest.approx(said["actor/pg_clipfrac"])


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl(generator: torch.Generator, kind: Any) -> None:
    logp, other = torch.randn(2, B, T, generator=generator) * 0.3
    torch.testing.assert_close(formulas.kl(logp, other, kind), core.kl_penalty(logp, other, kind))


def test_entropy(generator: torch.Generator) -> None:
    from verl.utils.torch_functional import entropy_from_logits  # type: ignore[import-not-found]

    logits = torch.randn(B, 50, generator=generator) * 3
    torch.testing.assert_close(formulas.entropy(logits), entropy_from_logits(logits))
