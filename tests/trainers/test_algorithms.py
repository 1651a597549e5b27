"""Formulas compared with values computed by hand."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from clawgym import registry
from clawgym.trainers import algorithms as formulas

NAN = float("nan")


def floats(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def longs(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.long)


def close(got: Tensor, *wanted: float) -> None:
    torch.testing.assert_close(got.double(), floats(*wanted), rtol=1e-5, atol=1e-5)


def test_importing_trainers_needs_no_torch() -> None:
    code = "import sys, clawgym.trainers, clawgym.rewards; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- advantages


def test_grpo_uses_unbiased_std_of_each_group() -> None:
    rewards, groups = floats(1, 0, 0, 3, 5), longs(4, 4, 4, -1, -1)
    root = math.sqrt(1 / 3)
    wanted = (2 / 3 / root, -1 / 3 / root, -1 / 3 / root, -math.sqrt(0.5), math.sqrt(0.5))
    close(formulas.group_advantages(rewards, groups, eps=0), *wanted)
    close(formulas.group_advantages(rewards, groups, std=False), 2 / 3, -1 / 3, -1 / 3, -1, 1)


def test_eps_is_added_to_the_std() -> None:
    close(
        formulas.group_advantages(floats(0, 2), longs(0, 0), eps=1.0), -1 / (math.sqrt(2) + 1), 1 / (math.sqrt(2) + 1)
    )


@pytest.mark.parametrize("rewards", [floats(0.1, 0.1, 0.1), floats(7), floats(0.1, 0.1, 0.1).float()])
def test_groups_of_one_and_zero_variance_groups_have_advantage_zero(rewards: Tensor) -> None:
    groups = torch.zeros(len(rewards), dtype=torch.long)
    for advantages in (
        formulas.group_advantages(rewards, groups),
        formulas.group_advantages(rewards, groups, eps=0.0),
        formulas.rloo_advantages(rewards, groups),
        formulas.reinforce_pp_advantages(rewards, groups, eps=0.0),
    ):
        assert advantages.tolist() == [0.0] * len(rewards)
        assert advantages.dtype == rewards.dtype


def test_zero_is_a_control_without_a_gradient() -> None:
    assert registry.advantages.make("zero", floats(1, 0, 5), longs(0, 0, 1)).tolist() == [0, 0, 0]


def test_rloo_subtracts_the_mean_of_the_other_episodes() -> None:
    close(formulas.rloo_advantages(floats(1, 0, 4, 9), longs(0, 0, 0, 1)), 1 - 2, 0 - 2.5, 4 - 0.5, 0)


def test_reinforce_pp_divides_by_the_std_of_the_batch() -> None:
    # centred: 1, -1, 0, 3, -3; the sum of squares 20 over 5 - 1
    rewards, groups = floats(2, 0, 5, 6, 0), longs(0, 0, 1, 2, 2)
    close(formulas.reinforce_pp_advantages(rewards, groups, eps=0), *(x / math.sqrt(5) for x in (1, -1, 0, 3, -3)))


def test_step_is_compared_with_same_step_of_other_episodes() -> None:
    rewards = floats(1, 0, 1, 1, 0.5)
    got = formulas.step_advantages(rewards, longs(0, 0, 0, 0, 0), longs(0, 1, 0, 1, 2), longs(7, 7, 9, 9, 9), eps=0)
    # step 0: equals; step 1: 0 and 1; step 2: alone. The group: episode means 1/2 and 5/6, so 2/3; weights 1/4, 1/4,
    # 1/6, 1/6, 1/6.
    mean = 2 / 3
    spread = ((1 - mean) ** 2 + mean**2) / 4 + (2 * (1 - mean) ** 2 + (0.5 - mean) ** 2) / 6
    spread /= 1 - (2 / 16 + 3 / 36)
    close(got, 0, -math.sqrt(0.5), 0, math.sqrt(0.5), (0.5 - mean) / math.sqrt(spread))
    got = formulas.step_advantages(rewards, longs(0, 0, 0, 0, 0), longs(0, 1, 0, 1, 2), longs(7, 7, 9, 9, 9), std=False)
    close(got, 0, -0.5, 0, 0.5, 0.5 - mean)


def test_step_reached_by_one_episode_is_compared_with_its_group() -> None:
    got = formulas.step_advantages(floats(2, 2, 2, 2), longs(0, 0, 0, 0), longs(0, 0, 1, 2), longs(0, 1, 1, 1))
    assert got.tolist() == [0, 0, 0, 0]


def test_outcome_and_process_are_normalised_separately() -> None:
    outcome, groups, of = floats(1, 0), longs(3, 3), longs(0, 0, 1, 1)
    process = floats(10, 20, 0, 0)
    # one vote each: mean (15 + 0) / 2; weights 1/4
    a = math.sqrt(0.5)
    sd = math.sqrt((2.5**2 + 12.5**2 + 2 * 7.5**2) / 4 / (1 - 4 / 16))
    parts = [x / sd for x in (2.5, 12.5, -7.5, -7.5)]
    got = formulas.integrated_advantages(outcome, process, groups, of, coefficient=0.5, eps=0)
    close(got, *(o + 0.5 * p for o, p in zip((a, a, -a, -a), parts, strict=True)))
    got = formulas.integrated_advantages(outcome, process, groups, of, coefficient=0.5, clip=1.0, eps=0)
    close(got, *(o + 0.5 * max(-1, min(1, p)) for o, p in zip((a, a, -a, -a), parts, strict=True)))
    got = formulas.integrated_advantages(outcome, process, groups, of, coefficient=floats(0, 0, 0, 2), eps=0)
    close(got, a, a, -a, -a + 2 * parts[3])
    by_step = formulas.integrated_advantages(outcome, process, groups, of, steps=longs(0, 1, 0, 1), eps=0)
    close(by_step, 2 * a, 2 * a, -2 * a, -2 * a)


def test_unjudged_step_has_outcome_advantage_only() -> None:
    outcome, groups, of = floats(1, 0), longs(0, 0), longs(0, 0, 1)
    valid = torch.tensor([True, False, True])
    for steps in (None, longs(0, 1, 0)):
        got = formulas.integrated_advantages(outcome, floats(1, NAN, -1), groups, of, steps=steps, valid=valid, eps=0)
        close(got, math.sqrt(2), math.sqrt(0.5), -math.sqrt(2))
    none = formulas.integrated_advantages(
        outcome, floats(NAN, NAN, NAN), groups, of, valid=torch.zeros(3, dtype=torch.bool), eps=0
    )
    close(none, math.sqrt(0.5), math.sqrt(0.5), -math.sqrt(0.5))


# --- weights


def test_token_weights_by_token_episode_and_sequence() -> None:
    episodes, rows = longs(5, 5, 5, 8), longs(0, 1, 1, 2)
    close(formulas.token_weights(episodes, "token"), *[1 / 4] * 4)
    close(formulas.token_weights(episodes, "episode"), 1 / 6, 1 / 6, 1 / 6, 1 / 2)
    close(formulas.token_weights(episodes, "episode", rows=rows), 1 / 6, 1 / 6, 1 / 6, 1 / 2)
    close(formulas.token_weights(episodes, "sequence", rows=rows), 1 / 3, 1 / 6, 1 / 6, 1 / 3)
    close(formulas.token_weights(episodes, "seq-mean-token-sum", rows=rows), *[1 / 3] * 4)
    close(formulas.token_weights(episodes, "seq-mean-token-sum-norm", rows=rows, norm=8), *[1 / 24] * 4)


# --- losses


def test_clipped_policy_loss() -> None:
    ratio = floats(1.5, 1.5, 0.5, 0.5, 1.0, 9.0)
    gain = floats(1, -1, 1, -1, 2, 0)
    loss, seen = formulas.policy_loss(ratio.log(), floats(0, 0, 0, 0, 0, 0), gain, floats(1, 2, 3, 4, 5, 0))
    # 1: clipped at 1.28; 2 and 3: the worse of the two is the plain one; 4: clipped at 0.8
    assert loss.item() == pytest.approx(-1.28 + 2 * 1.5 - 3 * 0.5 + 4 * 0.8 - 5 * 2)
    assert seen["clip_fraction_low"].item() == pytest.approx(1 / 5)
    assert seen["clip_fraction_high"].item() == pytest.approx(1 / 5)
    assert seen["clip_fraction"].item() == pytest.approx(2 / 5)
    assert seen["ratio_mean"].item() == pytest.approx(1.0)  # the last has weight 0: padding
    assert seen["ratio_max"].item() == pytest.approx(1.5)
    assert seen["approx_kl"].item() == pytest.approx(sum(r - 1 - math.log(r) for r in (1.5, 1.5, 0.5, 0.5)) / 5)
    assert seen["tokens"].item() == 5
    assert not any(value.requires_grad for value in seen.values())


def test_dual_clip_bounds_loss_of_negative_advantage() -> None:
    ratio, gain = floats(10, 10, 2, 0.5), floats(-1, 1, -1, 0.5)
    loss, seen = formulas.policy_loss(ratio.log(), floats(0, 0, 0, 0), gain, floats(1, 1, 1, 1), dual_clip=3.0)
    assert loss.item() == pytest.approx(3 - 1.28 + 2 - 0.25)
    assert seen["dual_clip_fraction"].item() == pytest.approx(1 / 4)


def test_importance_scales_loss_without_gradient() -> None:
    logp, engine = floats(-1, -2).requires_grad_(), floats(-1.5, -1).requires_grad_()
    old = floats(-1, -2).requires_grad_()
    c = formulas.importance_weights(old, engine, cap=1.5)
    close(c, 1.5, math.exp(-1))
    assert not c.requires_grad
    loss, _ = formulas.policy_loss(logp, old, floats(1, 1), floats(0.5, 0.5), importance=c)
    assert loss.item() == pytest.approx(-0.5 * (1.5 + math.exp(-1)))
    loss.backward()
    assert logp.grad is not None
    close(logp.grad, -0.75, -0.5 * math.exp(-1))
    assert old.grad is None
    assert engine.grad is None


def test_importance_of_a_sequence_is_the_product_over_tokens() -> None:
    old, engine = floats(-1, -1, -1), floats(-1.2, -1.1, -0.5)
    close(
        formulas.importance_weights(old, engine, rows=longs(3, 3, 1)),
        *(math.exp(0.3), math.exp(0.3), math.exp(-0.5)),
    )
    close(formulas.importance_weights(old, engine, rows=longs(3, 3, 1), cap=1.1), 1.1, 1.1, math.exp(-0.5))


def test_masked_importance_rejects_what_is_above_the_cap() -> None:
    old, engine, rows = floats(-1, -1, -1), floats(-1.2, -1.1, -0.5), longs(3, 3, 1)
    close(formulas.importance_weights(old, engine, cap=1.15, masked=True), 0, math.exp(0.1), math.exp(-0.5))
    close(formulas.importance_weights(old, engine, cap=1.25, rows=rows, masked=True), 0, 0, math.exp(-0.5))
    whole = formulas.importance_weights(old, engine, cap=1.4, rows=rows, masked=True)
    close(whole, math.exp(0.3), math.exp(0.3), math.exp(-0.5))


SEQUENCES = ((0.3, -0.2, 0.1), (-0.4,), (0.05, 0.02), (0.6, 0.7))  # log-ratios of four training sequences
GAINS = (1.0, -0.5, 2.0, -1.0)


def flat_sequences() -> tuple[Tensor, Tensor, Tensor]:
    """(S,) log-ratios, advantages and sequences, in an order that mixes the sequences."""
    order = [5, 0, 7, 3, 1, 4, 2, 6]
    made = [(r, g, n) for n, (some, g) in enumerate(zip(SEQUENCES, GAINS, strict=True)) for r in some]
    gaps, gains, rows = zip(*(made[n] for n in order), strict=True)
    return floats(*gaps), floats(*gains), longs(*(9 - n for n in rows))


def test_gspo_equals_the_objective_of_the_paper() -> None:
    """Value and gradient of equation 5, with the sequence's ratio (equation 7) differentiated as it is."""
    gaps, gains, rows = flat_sequences()
    low, high = 0.1, 0.2
    logp = gaps.clone().requires_grad_()
    weights = formulas.token_weights(rows, "sequence", rows=rows).double()
    got, seen = formulas.gspo_loss(logp, torch.zeros(8).double(), gains, weights, None, rows, low=low, high=high)
    total, other = torch.zeros((), dtype=torch.float64), gaps.clone().requires_grad_()
    for row in range(4):
        mine = [n for n in range(8) if rows[n] == 9 - row]
        ratio = torch.ones((), dtype=torch.float64)
        for n in mine:
            ratio = ratio * other[n].exp()
        ratio = ratio ** (1 / len(mine))
        bounded = min(max(ratio, floats(1 - low)[0]), floats(1 + high)[0])
        total = total - min(ratio * GAINS[row], bounded * GAINS[row]) / 4
    torch.testing.assert_close(got, total)
    a, b = (torch.autograd.grad(*pair)[0] for pair in ((got, logp), (total, other)))
    torch.testing.assert_close(a, b)
    # Clipped: sequence 1, whose ratio 0.67 is below 0.9 and its advantage negative. Of the others with a negative
    # advantage, 3 is above 1.2, where the clip does not apply.
    assert seen["clip_fraction_low"].item() == seen["clip_fraction"].item() == pytest.approx(1 / 8)
    assert seen["ratio_max"].item() == pytest.approx(math.exp(0.65))
    assert (a == 0).sum() == 1


def test_gspo_uses_rows_of_padded_tensors_and_needs_sequences_of_flat_ones() -> None:
    gaps, gains = torch.zeros(4, 3).double(), torch.zeros(4, 3).double()
    weights = torch.zeros(4, 3).double()
    for n, some in enumerate(SEQUENCES):
        gaps[n, : len(some)], gains[n, : len(some)], weights[n, : len(some)] = floats(*some), GAINS[n], n + 1
    padded, _ = formulas.gspo_loss(gaps.where(weights > 0, NAN), torch.zeros(4, 3), gains, weights)
    mask = weights > 0
    rows = torch.arange(4)[:, None].expand(4, 3)[mask]
    flat, _ = formulas.gspo_loss(gaps[mask], torch.zeros(8), gains[mask], weights[mask], None, rows)
    torch.testing.assert_close(padded, flat)
    with pytest.raises(ValueError, match="give sequences"):
        formulas.gspo_loss(gaps[mask], torch.zeros(8), gains[mask], weights[mask])


def test_cispo_weighs_the_gradient_by_the_truncated_ratio() -> None:
    ratios, gains, weights = floats(0.1, 1.5, 6.0, 8.0, 9.0), floats(1, -1, 2, -1, 5), floats(1, 2, 3, 4, 0)
    logp, old = floats(-0.1, -0.2, -0.3, -0.4, -9).requires_grad_(), floats(-0.1, -0.2, -0.3, -0.4, -9) - ratios.log()
    c = floats(1, 0.5, 1, 2, 1)
    loss, seen = formulas.cispo_loss(logp, old, gains, weights, c)
    wanted, slopes = 0.0, []
    for ratio, gain, weight, factor, own in zip(
        (0.1, 1.5, 5.0, 5.0), gains, weights, c, (-0.1, -0.2, -0.3, -0.4), strict=False
    ):
        slopes.append(-float(weight * factor * gain) * ratio)
        wanted += slopes[-1] * own
    assert loss.item() == pytest.approx(wanted)
    loss.backward()
    assert logp.grad is not None
    close(logp.grad, *slopes, 0)
    assert seen["clip_fraction"].item() == pytest.approx(2 / 4)
    assert seen["ratio_max"].item() == pytest.approx(8)
    assert formulas.cispo_loss(logp, old, gains, weights, c, cap=9.0)[1]["clip_fraction"].item() == 0


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_expected_gradient_of_kl_estimators(estimator: Any) -> None:
    """Over all actions of a softmax, k2 has the gradient of KL(pi || first); k3 that of KL(first || pi)."""
    logits = floats(2.0, 0.5, -1.0, -2.0).requires_grad_()
    first = floats(-1.0, 0.2, 1.0, 1.5).log_softmax(-1)
    logp = logits.log_softmax(-1)
    p = logp.exp()
    forward = torch.autograd.grad((p * (logp - first)).sum(), logits, retain_graph=True)[0]
    reverse = torch.autograd.grad((first.exp() * (first - logp)).sum(), logits, retain_graph=True)[0]
    got = torch.autograd.grad((p.detach() * formulas.kl(logp, first, estimator)).sum(), logits)[0]
    torch.testing.assert_close(got, forward if estimator == "k2" else reverse)
    assert (forward - reverse).norm() > 0.5 * forward.norm()


def test_overflowing_ratios_stay_finite() -> None:
    logp = torch.tensor([0.0, -300.0], requires_grad=True)
    loss, seen = formulas.policy_loss(logp, torch.tensor([-300.0, 0.0]), torch.tensor([-1.0, 1.0]), torch.ones(2))
    loss.backward()
    assert logp.grad is not None
    assert all(torch.isfinite(x).all() for x in (loss, logp.grad, *seen.values()))
    assert torch.isfinite(formulas.kl(torch.tensor([-300.0]), torch.tensor([0.0]))).all()
    for other in (formulas.gspo_loss, formulas.cispo_loss):
        loss, seen = other(
            logp, torch.tensor([-300.0, 0.0]), torch.tensor([-1.0, 1.0]), torch.ones(2), None, longs(0, 1)
        )
        assert all(torch.isfinite(x).all() for x in (loss, torch.autograd.grad(loss, logp)[0], *seen.values()))


def test_kl_estimators() -> None:
    logp, other = floats(-1, -2), floats(-2, -1)
    close(formulas.kl(logp, other, "k1"), 1, -1)
    close(formulas.kl(logp, other, "k2"), 0.5, 0.5)
    close(formulas.kl(logp, other, "k3"), math.exp(-1), math.e - 2)
    assert formulas.kl(logp.bfloat16(), other.bfloat16()).dtype == torch.float32


def test_entropy_of_uniform_certain_and_masked_logits() -> None:
    logits = torch.tensor([[1.0] * 4, [0.0, -1e4, -1e4, -1e4], [0.0, 0.0, -math.inf, -math.inf]], requires_grad=True)
    got = formulas.entropy(logits)
    close(got, math.log(4), 0, math.log(2))
    got.sum().backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


# --- distillation


def test_distillation_advantage_is_clipped() -> None:
    teacher, old = floats(-1, -5, -0.5), floats(-1.25, -1, -4).requires_grad_()
    got = formulas.distillation_advantages(teacher, old)
    close(got, 0.25, -1, 1)
    assert not got.requires_grad
    close(formulas.distillation_advantages(teacher, old, clip=9.0), 0.25, -4, 3.5)


def test_combined_ignores_tokens_without_teacher() -> None:
    rl, opd = floats(1, 2, 3), floats(0.5, NAN, -1)
    has_teacher = torch.tensor([True, False, True])
    close(formulas.combined(rl, opd, w_rl=2.0, w_opd=0.5, has_teacher=has_teacher), 2.25, 4, 5.5)
    close(formulas.combined(rl, floats(1, 1, 1)), 2, 3, 4)


def test_top_k_reverse_kl_with_a_tail() -> None:
    p, q = floats(0.5, 0.2, 0.2, 0.1), floats(0.25, 0.25, 0.4, 0.1)
    ids = longs(2, 0)
    got = formulas.topk_reverse_kl(p.log()[None], ids[None], q.log()[ids][None])
    close(got, 0.2 * math.log(0.2 / 0.4) + 0.5 * math.log(0.5 / 0.25) + 0.3 * math.log(0.3 / 0.35))


def test_top_k_over_whole_vocabulary_equals_full_kl() -> None:
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0), requires_grad=True)
    teacher = torch.randn(5, 7, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    got = formulas.topk_reverse_kl(logits, torch.arange(7).expand(5, 7), teacher)
    logp = logits.log_softmax(-1)
    whole = (logp.exp() * (logp - teacher)).sum(-1)
    torch.testing.assert_close(got, whole, rtol=1e-4, atol=1e-5)
    mine, theirs = (torch.autograd.grad(x.sum(), logits, retain_graph=True)[0] for x in (got, whole))
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_top_k_kl_is_finite_when_both_exclude_an_id() -> None:
    logits = torch.tensor([[0.0, -math.inf, -1.0]], requires_grad=True)
    got = formulas.topk_reverse_kl(logits, longs(0, 1)[None], torch.tensor([[-0.5, -math.inf]]))
    assert torch.isfinite(got).all()
    assert torch.isfinite(torch.autograd.grad(got.sum(), logits)[0]).all()


@pytest.mark.parametrize("scale", [1.0, 4.0, 12.0])  # top-K mass from a tenth to all of it
def test_top_k_tail_is_accurate_in_float32(scale: float) -> None:
    logits, other = scale * torch.randn(2, 16, 2000, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    logits.requires_grad_()
    teacher, ids = (logits.detach() + other / scale).log_softmax(-1).topk(20)
    exact, single = (
        formulas.topk_reverse_kl(logits.to(kind), ids, teacher.to(kind)) for kind in (torch.float64, torch.float32)
    )
    torch.testing.assert_close(single.double(), exact, rtol=1e-3, atol=1e-4)
    a, b = (torch.autograd.grad(loss.sum(), logits)[0] for loss in (exact, single))
    torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-4)


def test_top_k_overlap() -> None:
    close(formulas.topk_overlap(longs(1, 2, 3, 4)[None], longs(9, 3, 1, 8)[None]), 0.5)
    close(formulas.topk_overlap(longs(1, 2)[None], longs(2, 1)[None]), 1)


# --- critic


def naive_gae(
    episodes: list[tuple[list[float], list[float]]], gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """Normalised advantages and returns of episodes of (rewards, values), by the sums of the definition."""
    gains, returns, shares = [], [], []
    for rewards, values in episodes:
        after = [*values[1:], 0.0]
        deltas = [r + gamma * w - v for r, w, v in zip(rewards, after, values, strict=True)]
        for t, value in enumerate(values):
            gains.append(sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(deltas))))
            returns.append(gains[-1] + value)
            shares.append(1 / (len(episodes) * len(values)))
    mean = sum(s * g for s, g in zip(shares, gains, strict=True))
    var = sum(s * (g - mean) ** 2 for s, g in zip(shares, gains, strict=True)) / (1 - sum(s * s for s in shares))
    return [(g - mean) / (math.sqrt(var) + 1e-6) for g in gains], returns


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 1.0), (1.0, 0.5), (0.8, 0.3), (0.5, 0.0)])
def test_gae_against_its_sums(gamma: float, lam: float) -> None:
    episodes = [([0.0, 0.25, 1.0], [0.5, -0.5, 0.75]), ([-1.0], [0.125]), ([0.5, -2.0], [1.0, 1.5])]
    rewards, values = (floats(*(x for one in episodes for x in one[n])) for n in (0, 1))
    advantages, returns = formulas.gae_advantages(rewards, values, longs(7, 7, 7, 2, 5, 5), gamma=gamma, lam=lam)
    wanted = naive_gae(episodes, gamma, lam)
    close(advantages, *wanted[0])
    close(returns, *wanted[1])


def test_gae_of_a_batch_without_variance_is_zero() -> None:
    """What the critic gets wrong is no signal, however small; with one episode that differs there is a signal."""
    values, episodes = floats(-0.9, -1.2, -1.1, -0.7), longs(0, 0, 1, 2)
    for gamma in (1.0, 0.9):
        same, returns = formulas.gae_advantages(floats(0, -1, -1, -1), values, episodes, gamma=gamma)
        assert same.tolist() == [0] * 4
        close(returns, -gamma, -1, -1, -1)
    assert formulas.gae_advantages(floats(0, -1, -1, 1), values, episodes)[0].all()
    assert formulas.gae_advantages(floats(0.5, -1.5, -1, -1), values, episodes)[0].all()


def test_gae_is_registered_with_its_options() -> None:
    assert [option.name for option in registry.advantages.options("gae")] == ["gamma", "lam"]
    assert [option.type for option in registry.advantages.options("gae")] == ["float", "float"]


@pytest.mark.parametrize("clip", [None, 0.3])
def test_value_loss_against_its_sum(clip: float | None) -> None:
    """Moved towards the return within and beyond the clip, beyond the return, and away from it."""
    values, old = [0.1, 0.9, 0.9, -0.6, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0]
    returns, weights = [1.0, 1.0, 0.2, 1.0, 0.0], [0.1, 0.2, 0.3, 0.4, 0.5]
    v = floats(*values).requires_grad_()
    loss, clipped = formulas.value_loss(v, floats(*old), floats(*returns), floats(*weights), clip=clip)
    total, slopes = 0.0, []
    for value, before, wanted, weight in zip(values, old, returns, weights, strict=True):
        near = value if clip is None else before + max(-clip, min(clip, value - before))
        plain, bounded = (value - wanted) ** 2, (near - wanted) ** 2
        total += weight * max(plain, bounded) / 2
        slopes.append(0.0 if bounded > plain else weight * (value - wanted))
    close(loss.detach()[None], total)
    loss.backward()
    assert v.grad is not None
    close(v.grad, *slopes)
    assert clipped.item() == pytest.approx(0 if clip is None else 1 / 5)


# --- errors


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: formulas.group_advantages(floats(1, 2), longs(0)), "rewards .2,., groups .1,."),
        (lambda: formulas.group_advantages(floats(1, NAN), longs(0, 0)), r"rewards\[1\] is nan: leave out"),
        (lambda: formulas.group_advantages(floats(1, 2)[None], longs(0, 0)[None]), "one-dimensional"),
        (lambda: formulas.step_advantages(floats(1, 2), longs(0, 0), longs(0, 0), longs(3, 3)), "same step twice"),
        (lambda: formulas.step_advantages(floats(1, 2), longs(0, 1), longs(0, 1), longs(3, 3)), "two groups"),
        (
            lambda: formulas.integrated_advantages(floats(1, 2), floats(1), longs(0, 0), longs(2)),
            r"outside 0\.\.1",
        ),
        (lambda: formulas.integrated_advantages(floats(1), floats(1, 2), longs(0), longs(0)), "for every step"),
        (lambda: formulas.token_weights(longs(0)[None]), r"flat tensor of trained tokens: episodes\[mask\]"),
        (lambda: formulas.token_weights(longs(0), "sequence"), "give rows"),
        (lambda: formulas.token_weights(longs(0), "seq-mean-token-sum-norm", rows=longs(0)), "positive norm"),
        (lambda: formulas.token_weights(longs(0), "seq-mean-token-sum", rows=longs(0), norm=2), "positive norm"),
        (lambda: formulas.token_weights(longs(0), "mean"), "choose one of token"),  # type: ignore[arg-type]
        (
            lambda: formulas.policy_loss(floats(0), floats(0), floats(0), floats(0), dual_clip=1.0),
            "above 1",
        ),
        (lambda: formulas.policy_loss(floats(0), floats(0), floats(0, 1), floats(0)), "advantages"),
        (lambda: formulas.cispo_loss(floats(0), floats(0), floats(0), floats(0), cap=0.0), "positive bound"),
        (
            lambda: formulas.gspo_loss(floats(0), floats(0), floats(0), floats(0), None, longs(0, 1)),
            "sequences .2,.: give tensors of the same shape",
        ),
        (
            lambda: formulas.gae_advantages(floats(1, 2, 3), floats(0, 0, 0), longs(0, 1, 0)),
            "apart: give them together",
        ),
        (lambda: formulas.gae_advantages(floats(1, 2), floats(0), longs(0, 1)), "values .1,."),
        (lambda: formulas.gae_advantages(floats(1, NAN), floats(0, 0), longs(0, 1)), r"rewards\[1\] is nan"),
        (lambda: formulas.value_loss(floats(0), floats(0), floats(0, 1), floats(0)), "returns .2,."),
        (lambda: formulas.kl(floats(0), floats(0), "k4"), "k1, k2 or k3"),  # type: ignore[arg-type]
    ],
)
def test_wrong_shapes_and_values_raise(call, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()


def test_empty_batches() -> None:
    none = longs()
    assert formulas.group_advantages(floats(), none).shape == (0,)
    assert formulas.step_advantages(floats(), none, none, none).shape == (0,)
    assert formulas.integrated_advantages(floats(1, 0), floats(), longs(0, 0), none).shape == (0,)
    assert formulas.token_weights(none).shape == (0,)
    assert [part.shape for part in formulas.gae_advantages(floats(), floats(), none)] == [(0,), (0,)]
    assert [part.item() for part in formulas.value_loss(*[floats()] * 4, clip=0.2)] == [0, 0]
    loss, seen = formulas.policy_loss(floats().requires_grad_(), floats(), floats(), floats())
    loss.backward()
    assert [value.item() for value in (loss, *seen.values())] == [0] * 9
    for other in (formulas.gspo_loss, formulas.cispo_loss):
        loss, seen = other(floats().requires_grad_(), floats(), floats(), floats(), None, none)
        loss.backward()
        assert not any(value.item() for value in (loss, *seen.values()))
