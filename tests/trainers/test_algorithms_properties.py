"""Properties of the formulas for any batch: invariances, weights, gradients, padding."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from clawgym.trainers import algorithms as formulas

REWARD = st.integers(-20, 20).map(lambda n: n / 10)
SEED = st.integers(0, 2**31)


def holds(*strategies: st.SearchStrategy, examples: int = 40) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return lambda test: settings(max_examples=examples, deadline=None)(given(*strategies)(test))


@dataclass
class Steps:
    """Episodes in groups, each with steps 0, 1, ..., in the order of a flat batch."""

    outcome: Tensor
    group_of: Tensor
    rewards: Tensor
    steps: Tensor
    episodes: Tensor

    @property
    def groups(self) -> Tensor:
        return self.group_of[self.episodes]


@st.composite
def batches(draw: st.DrawFn, most: int = 7) -> Steps:
    lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=most))
    n = len(lengths)
    groups = draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
    outcome = draw(st.lists(REWARD, min_size=n, max_size=n))
    rewards = draw(st.lists(REWARD, min_size=sum(lengths), max_size=sum(lengths)))
    return Steps(
        torch.tensor(outcome, dtype=torch.float64),
        torch.tensor(groups),
        torch.tensor(rewards, dtype=torch.float64),
        torch.cat([torch.arange(k) for k in lengths]),
        torch.repeat_interleave(torch.arange(n), torch.tensor(lengths)),
    )


def draws(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def same(a: Tensor, b: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# --- advantages


@holds(batches(), st.floats(-50, 50), st.floats(0.1, 50))
def test_advantages_are_invariant_to_shift_and_scale(batch: Steps, shift: float, scale: float) -> None:
    """With eps=0 the standard deviation removes the scale. RLOO and the forms without it keep the scale."""
    moved, steps = batch.outcome * scale + shift, batch.rewards * scale + shift
    at = (batch.groups, batch.steps, batch.episodes)
    for std, factor in ((True, 1.0), (False, scale)):
        a = formulas.group_advantages(moved, batch.group_of, std=std, eps=0.0)
        same(a, factor * formulas.group_advantages(batch.outcome, batch.group_of, std=std, eps=0.0), 1e-6)
        a = formulas.step_advantages(steps, *at, std=std, eps=0.0)
        same(a, factor * formulas.step_advantages(batch.rewards, *at, std=std, eps=0.0), 1e-6)
        a = formulas.integrated_advantages(moved, steps, batch.group_of, batch.episodes, std=std, eps=0.0)
        b = formulas.integrated_advantages(
            batch.outcome, batch.rewards, batch.group_of, batch.episodes, std=std, eps=0.0
        )
        same(a, factor * b, 1e-6)
    same(
        formulas.rloo_advantages(moved, batch.group_of),
        scale * formulas.rloo_advantages(batch.outcome, batch.group_of),
        1e-6,
    )
    same(
        formulas.reinforce_pp_advantages(moved, batch.group_of, eps=0.0),
        formulas.reinforce_pp_advantages(batch.outcome, batch.group_of, eps=0.0),
        1e-6,
    )


@holds(batches())
def test_groups_have_mean_zero_and_std_one(batch: Steps) -> None:
    advantages = formulas.group_advantages(batch.outcome, batch.group_of, eps=0.0)
    for group in batch.group_of.unique():
        rewards, mine = batch.outcome[batch.group_of == group], advantages[batch.group_of == group]
        if len(rewards.unique()) == 1:
            assert mine.abs().max() == 0
        else:
            assert mine.mean().abs() < 1e-9
            assert mine.std().item() == pytest.approx(1)


@holds(batches(), SEED)
def test_advantages_do_not_depend_on_order_or_labels(batch: Steps, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    e, n = (torch.randperm(len(x), generator=generator) for x in (batch.outcome, batch.rewards))
    renamed = torch.tensor([-7, 900, 3])
    for call in (
        formulas.group_advantages,
        formulas.rloo_advantages,
        formulas.reinforce_pp_advantages,
    ):
        same(call(batch.outcome[e], renamed[batch.group_of[e]]), call(batch.outcome, batch.group_of)[e])
    at = (renamed[batch.groups], batch.steps, batch.episodes * 13 - 5)
    straight = formulas.step_advantages(batch.rewards, batch.groups, batch.steps, batch.episodes)
    same(formulas.step_advantages(batch.rewards[n], *(x[n] for x in at)), straight[n])
    where = torch.argsort(e)  # the new index of each episode
    for steps in (None, batch.steps):
        straight = formulas.integrated_advantages(
            batch.outcome, batch.rewards, batch.group_of, batch.episodes, steps=steps
        )
        mixed = formulas.integrated_advantages(
            batch.outcome[e],
            batch.rewards[n],
            batch.group_of[e],
            where[batch.episodes[n]],
            steps=None if steps is None else steps[n],
        )
        same(mixed, straight[n])


@holds(batches())
def test_groups_are_independent(batch: Steps) -> None:
    here = batch.groups == batch.groups[0]
    alone = formulas.step_advantages(batch.rewards[here], batch.groups[here], batch.steps[here], batch.episodes[here])
    same(alone, formulas.step_advantages(batch.rewards, batch.groups, batch.steps, batch.episodes)[here])


@holds(batches(), st.booleans())
def test_step_advantages_match_definition(batch: Steps, std: bool) -> None:
    got = formulas.step_advantages(batch.rewards, batch.groups, batch.steps, batch.episodes, std=std)
    rows = list(zip(*(x.tolist() for x in (batch.rewards, batch.groups, batch.steps, batch.episodes)), strict=True))
    for (reward, group, step, _), value in zip(rows, got.tolist(), strict=True):
        bucket = [r for r, g, s, _ in rows if (g, s) == (group, step)]
        if len(bucket) > 1:
            share = [(r, 1 / len(bucket)) for r in bucket]
        else:
            members = {e for _, g, _, e in rows if g == group}
            steps_of = {e: sum(x == e for *_, x in rows) for e in members}
            share = [(r, 1 / len(members) / steps_of[e]) for r, g, _, e in rows if g == group]
        mean = sum(r * w for r, w in share)
        if len({r for r, _ in share}) == 1:
            assert value == 0
        else:
            variance = sum(w * (r - mean) ** 2 for r, w in share) / (1 - sum(w * w for _, w in share))
            assert value == pytest.approx((reward - mean) / (math.sqrt(variance) + 1e-6 if std else 1.0), abs=1e-6)


@holds(batches())
def test_all_forms_equal_grpo_for_one_step_episodes(batch: Steps) -> None:
    grpo = formulas.group_advantages(batch.outcome, batch.group_of)
    own, one = torch.arange(len(grpo)), torch.zeros(len(grpo), dtype=torch.long)
    same(formulas.step_advantages(batch.outcome, batch.group_of, one, own), grpo)
    zeros = torch.zeros_like(batch.outcome)
    same(formulas.integrated_advantages(zeros, batch.outcome, batch.group_of, own), grpo)
    # Every step has its own index: each bucket has one step, so the baseline is that of GRPO.
    same(formulas.step_advantages(batch.outcome, batch.group_of, own, own), grpo)


@holds(batches(), st.integers(2, 4))
def test_episodes_are_weighted_equally_in_baselines(batch: Steps, times: int) -> None:
    """Repeating the steps of the first episode changes no baseline."""
    again = torch.ones_like(batch.episodes)
    again[batch.episodes == 0] = times
    kept = torch.repeat_interleave(torch.arange(len(again)), again)
    args = (batch.outcome, batch.rewards, batch.group_of, batch.episodes)
    more = (batch.outcome, batch.rewards[kept], batch.group_of, batch.episodes[kept])
    same(formulas.integrated_advantages(*more, std=False), formulas.integrated_advantages(*args, std=False)[kept])


@holds(batches(), SEED)
def test_unjudged_steps_do_not_affect_others(batch: Steps, seed: int) -> None:
    valid = draws(seed, len(batch.rewards)) > 0
    args = (batch.group_of, batch.episodes)
    spoilt = torch.where(valid, batch.rewards, torch.full_like(batch.rewards, math.nan))
    got = formulas.integrated_advantages(batch.outcome, spoilt, *args, valid=valid)
    judged = formulas.integrated_advantages(batch.outcome, batch.rewards[valid], batch.group_of, batch.episodes[valid])
    same(got[valid], judged)
    same(got[~valid], formulas.group_advantages(batch.outcome, batch.group_of)[batch.episodes[~valid]])


@holds(batches(), st.floats(0, 3), st.floats(0, 3))
def test_process_term_is_bounded_by_clip(batch: Steps, coefficient: float, clip: float) -> None:
    got = formulas.integrated_advantages(
        batch.outcome, batch.rewards, batch.group_of, batch.episodes, coefficient=coefficient, clip=clip
    )
    alone = formulas.group_advantages(batch.outcome, batch.group_of)[batch.episodes]
    assert (got - alone).abs().max() <= coefficient * clip + 1e-9


# --- weights


@st.composite
def tokens(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """(S,) episode and row of each token; a row belongs to one episode."""
    rows = draw(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), min_size=1, max_size=8))
    lengths = torch.tensor([length for _, length in rows])
    episodes = torch.tensor([episode for episode, _ in rows])
    return episodes.repeat_interleave(lengths), torch.arange(len(rows)).repeat_interleave(lengths)


@holds(tokens())
def test_token_weights_sum_to_one_and_units_are_equal(batch: tuple[Tensor, Tensor]) -> None:
    episodes, rows = batch
    for mode, voters in (("token", torch.arange(len(rows))), ("episode", episodes), ("sequence", rows)):
        weights = formulas.token_weights(episodes, mode, rows=rows)  # type: ignore[arg-type]
        assert weights.sum().item() == pytest.approx(1, abs=1e-5)
        share = torch.stack([weights[voters == voter].sum() for voter in voters.unique()])
        same(share, torch.full_like(share, 1 / len(share)), 1e-6)
    assert torch.equal(formulas.token_weights(episodes), formulas.token_weights(episodes, "episode", rows=rows))


@holds(tokens(), SEED)
def test_micro_batch_losses_add_up(batch: tuple[Tensor, Tensor], seed: int) -> None:
    episodes, rows = batch
    x = draws(seed, 3, len(rows))
    weights = formulas.token_weights(episodes, rows=rows).double()
    whole, seen = formulas.policy_loss(x[0], x[1], x[2], weights)
    parts = [formulas.policy_loss(*x[:, rows == row], weights[rows == row]) for row in rows.unique()]
    same(torch.stack([loss for loss, _ in parts]).sum(), whole)
    for name in ("clip_fraction", "ratio_mean", "approx_kl"):
        same(sum(m[name] * m["tokens"] for _, m in parts) / seen["tokens"], seen[name], 1e-5)  # type: ignore[arg-type]


# --- losses


def reference_loss(ratio: float, gain: float, low: float, high: float, dual: float | None) -> float:
    loss = max(-ratio * gain, -min(max(ratio, 1 - low), 1 + high) * gain)
    return min(loss, -dual * gain) if dual is not None and gain < 0 else loss


@holds(SEED, st.integers(1, 12), st.sampled_from([None, 1.5, 3.0]))
def test_policy_loss_matches_plain_loop(seed: int, n: int, dual: float | None) -> None:
    logp, old, gain, weights = draws(seed, 4, n)
    got, _ = formulas.policy_loss(logp, old, gain, weights, clip_low=0.1, clip_high=0.4, dual_clip=dual)
    ratios = (logp - old).exp().tolist()
    each = [reference_loss(r, g, 0.1, 0.4, dual) for r, g in zip(ratios, gain.tolist(), strict=True)]
    assert got.item() == pytest.approx(sum(w * x for w, x in zip(weights.tolist(), each, strict=True)))


@holds(SEED, st.sampled_from([None, 1.5]), examples=10)  # a hundred forward passes each
def test_gradients_match_finite_differences(seed: int, dual: float | None) -> None:
    logp, old, gain, weights = draws(seed, 4, 6)
    ratio = (logp - old).exp()
    edges = torch.tensor([0.8, 1.28, dual or 0.8], dtype=torch.float64)
    assume((ratio[:, None] - edges).abs().min() > 1e-3)  # no derivative on an edge
    importance = draws(seed + 1, 6).exp()
    logp.requires_grad_()

    def loss(x: Tensor) -> Tensor:
        return formulas.policy_loss(x, old, gain, weights, dual_clip=dual, importance=importance)[0]

    assert torch.autograd.gradcheck(loss, logp)
    for kind in ("k1", "k2", "k3"):
        assert torch.autograd.gradcheck(lambda x, kind=kind: formulas.kl(x, old, kind), logp)
    logits = draws(seed, 3, 9).requires_grad_()
    assert torch.autograd.gradcheck(formulas.entropy, logits)
    ids = torch.topk(draws(seed + 2, 3, 9), 4).indices
    teacher = draws(seed + 3, 3, 9).log_softmax(-1).gather(-1, ids).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: formulas.topk_reverse_kl(x, ids, teacher.detach()), logits)
    formulas.topk_reverse_kl(logits, ids, teacher).sum().backward()
    assert teacher.grad is None


@holds(SEED, st.integers(1, 5), st.integers(1, 6), st.booleans())
def test_padded_and_flat_tensors_give_same_loss(seed: int, rows: int, width: int, spoil: bool) -> None:
    mask = draws(seed, rows, width) > 0
    logp, old, engine, gain = draws(seed + 1, 4, rows, width)
    episodes = torch.arange(rows)[:, None].expand(rows, width) // 2
    weights = torch.zeros(rows, width)
    weights[mask] = formulas.token_weights(episodes[mask])
    if spoil:  # values in the padding are ignored
        nan = torch.full_like(old, torch.nan)
        logp, old, engine, gain = (torch.where(mask, x, nan) for x in (logp, old, engine, gain))
    logp.requires_grad_()
    c = formulas.importance_weights(old, engine)
    loss, seen = formulas.policy_loss(logp, old, gain, weights, importance=c)
    flat_c = formulas.importance_weights(old[mask], engine[mask])
    flat, flat_seen = formulas.policy_loss(logp[mask], old[mask], gain[mask], weights[mask], importance=flat_c)
    same(loss, flat)
    for name in seen:
        same(seen[name], flat_seen[name], 1e-6)
    a, b = (torch.autograd.grad(x, logp, retain_graph=True)[0] for x in (loss, flat))
    same(a, b)
    for kind in ("k1", "k2", "k3"):
        same(formulas.kl(logp, old, kind)[mask], formulas.kl(logp[mask], old[mask], kind))


@holds(SEED)
def test_importance_is_capped_and_positive(seed: int) -> None:
    old, engine = draws(seed, 2, 8) * 5
    got = formulas.importance_weights(old, engine, cap=2.0)
    same(got, (old - engine).exp().clamp(max=2.0))
    own_rows = formulas.importance_weights(old, engine, cap=2.0, rows=torch.arange(8))
    same(own_rows, got)


# --- critic


@holds(batches(), SEED, st.floats(0, 1), st.floats(0, 1))
def test_gae_for_any_batch(batch: Steps, seed: int, gamma: float, lam: float) -> None:
    """Its recursion holds, episodes do not affect each other's returns, and true values leave nothing to train on."""
    values = draws(seed, len(batch.rewards))
    at = batch.episodes
    advantages, returns = formulas.gae_advantages(batch.rewards, values, at, gamma=gamma, lam=lam)
    gain = returns - values
    goes_on = torch.cat([at[1:] == at[:-1], torch.tensor([False])])
    after, later = (torch.where(goes_on, x.roll(-1), 0.0) for x in (values, gain))
    same(gain, batch.rewards + gamma * after - values + gamma * lam * later)
    own = torch.cat(
        [
            formulas.gae_advantages(batch.rewards[at == e], values[at == e], at[at == e], gamma=gamma, lam=lam)[1]
            for e in at.unique()
        ]
    )
    same(own, returns)
    assert advantages.isfinite().all()
    order = torch.sort(-at, stable=True).indices  # episodes backwards, each in its own order
    mixed, _ = formulas.gae_advantages(batch.rewards[order], values[order], at[order], gamma=gamma, lam=lam)
    same(mixed, advantages[order], 1e-6)
    _, sums = formulas.gae_advantages(batch.rewards, values, at, gamma=gamma)
    _, others = formulas.gae_advantages(batch.rewards, values + 1, at, gamma=gamma)
    same(sums, others)  # with lam=1 a return has no values in it
    nothing, _ = formulas.gae_advantages(batch.rewards, sums, at, gamma=gamma, lam=lam)
    same(nothing, torch.zeros_like(nothing), 1e-6)


@holds(SEED, st.floats(0.01, 2))
def test_clipped_value_loss_is_at_least_the_squared_error(seed: int, clip: float) -> None:
    values, old, returns, raw = draws(seed, 4, 6)
    weights = raw.abs()
    plain, none = formulas.value_loss(values, old, returns, weights)
    bounded, share = formulas.value_loss(values, old, returns, weights, clip=clip)
    assert bounded >= plain - 1e-12
    assert none == 0 <= share <= 1
    same(plain, (weights * (values - returns) ** 2).sum() / 2)
    same(formulas.value_loss(values, values, returns, weights, clip=clip)[0], plain)


# --- distillation


@holds(SEED, st.integers(1, 8))
def test_top_k_reverse_kl_is_between_zero_and_full_kl(seed: int, k: int) -> None:
    logits, teacher = draws(seed, 2, 4, 9) * 3
    logp, logq = logits.log_softmax(-1), teacher.log_softmax(-1)
    whole = (logp.exp() * (logp - logq)).sum(-1)
    order = torch.topk(logq, 9).indices
    got, finer = (formulas.topk_reverse_kl(logits, order[:, :n], logq.gather(-1, order[:, :n])) for n in (k, k + 1))
    assert (got > -1e-9).all()
    assert (got <= finer + 1e-9).all()
    assert (finer <= whole + 1e-9).all()
    own = torch.topk(logp, k).indices
    same(formulas.topk_reverse_kl(logits + 5, own, logp.gather(-1, own)), torch.zeros(4, dtype=torch.float64))


@holds(SEED, st.integers(1, 8))
def test_top_k_overlap_matches_sets(seed: int, k: int) -> None:
    a, b = (torch.topk(draws(seed + i, 3, 10), k).indices for i in range(2))
    got = formulas.topk_overlap(a, b)
    wanted = [len(set(x) & set(y)) / k for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    assert got.tolist() == pytest.approx(wanted)
    assert torch.equal(got, formulas.topk_overlap(b, a))


@holds(SEED, st.floats(0, 2), st.floats(0, 2))
def test_values_without_teacher_affect_neither_value_nor_gradient(seed: int, w_rl: float, w_opd: float) -> None:
    rl, opd, at = draws(seed, 3, 6)
    has_teacher = at > 0
    got = formulas.combined(
        rl, torch.where(has_teacher, opd, torch.nan), w_rl=w_rl, w_opd=w_opd, has_teacher=has_teacher
    )
    same(got[has_teacher], (w_rl * rl + w_opd * opd)[has_teacher])
    same(got[~has_teacher], w_rl * rl[~has_teacher])
    opd.requires_grad_()
    formulas.combined(rl, opd, w_rl=w_rl, w_opd=w_opd, has_teacher=has_teacher).sum().backward()
    assert opd.grad is not None
    assert not opd.grad[~has_teacher].any()
