"""The formulas of training: advantages, token weights and losses as pure functions on tensors.

Shapes: E episodes, N steps (turns), S trained tokens (flat over a whole batch), V vocabulary, K kept ids. Functions
that are elementwise over S also take padded (B, T) tensors. Padding has weight 0, and the losses ignore all other
values there.

Invariants: episodes are weighted equally in every baseline. A group of one and a zero-variance group have advantage
exactly 0. No function keeps state. Advantages and importance weights carry no gradient. Labels (groups, episodes,
rows) are arbitrary integers; only their equality matters. Every function raises :class:`ValueError` if shapes do not
match or a reward is not finite.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from clawgym.registry import advantages, losses
from clawgym.trainers._baselines import (
    centred,
    check_episodes,
    checked,
    count_by,
    distinct,
    dtype_of,
    episode_weights,
    index_of,
    real,
    same_shape,
    sum_by,
    z_score,
)
from clawgym.trainers.traits import traits

__all__ = [
    "Aggregation",
    "batch_advantages",
    "centred_advantages",
    "cispo_loss",
    "combined",
    "distillation_advantages",
    "entropy",
    "gae_advantages",
    "group_advantages",
    "gspo_loss",
    "importance_weights",
    "integrated_advantages",
    "kl",
    "no_outcome_advantages",
    "policy_loss",
    "reinforce_pp_advantages",
    "rloo_advantages",
    "step_advantages",
    "summed_advantages",
    "token_weights",
    "topk_overlap",
    "topk_reverse_kl",
    "value_loss",
    "zero_advantages",
]

Aggregation = Literal["token", "episode", "sequence", "seq-mean-token-sum", "seq-mean-token-sum-norm"]

_MAX_LOG_RATIO = 20.0
"""Clamp of a log-ratio before ``exp``, in nats. It prevents an overflow of float32; policies that differ by more have
nothing in common."""


# --- advantages -------------------------------------------------------------------------------------------------------


@advantages.register("grpo")
def group_advantages(rewards: Tensor, groups: Tensor, *, std: bool = True, eps: float = 1e-6) -> Tensor:
    """GRPO: A_e = (r_e - mean_g) / (std_g + eps), with the unbiased standard deviation of the group g.

    ``rewards`` (E,), ``groups`` (E,) -> (E,).
    Source: DeepSeekMath (arXiv 2402.03300), section 4.1.2. Without the division: Dr. GRPO (arXiv 2503.20783).

    Args:
        std: whether to divide by the standard deviation. If False, A_e = r_e - mean_g.
        eps: added to the standard deviation.
    """
    values, (group,) = checked(rewards, groups=groups)
    return z_score(values, group, 1 / count_by(group), std, eps).to(dtype_of(rewards))


@advantages.register("dr-grpo")
@traits(scales_process=False)
def centred_advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    """GRPO without the division by the standard deviation (Dr. GRPO): A_e = r_e - mean_g. (E,), (E,) -> (E,).

    Source: arXiv 2503.20783.
    """
    return group_advantages(rewards, groups, std=False)


@advantages.register("binary")
@traits(uses_outcome=False)
def no_outcome_advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    """Binary RL: the majority of the judge's votes on a turn is its advantage; this function gives 0 for the outcome.

    ``rewards`` (E,), ``groups`` (E,) -> zeros (E,).

    Source: binary RL of arXiv 2603.10165.
    """
    return torch.zeros_like(rewards)


@advantages.register("zero")
def zero_advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    """A control: no policy gradient. Everything but the advantages stays, such as imitation. (E,), (E,) -> zeros (E,).

    A gain that remains with it is not due to the policy gradient.
    """
    return torch.zeros_like(rewards)


@advantages.register("rloo")
def rloo_advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    """RLOO: A_e = r_e - mean of the other episodes of its group = n / (n - 1) * (r_e - mean_g). (E,), (E,) -> (E,).

    Source: "Back to Basics" (arXiv 2402.14740), the RLOO estimator.
    """
    values, (group,) = checked(rewards, groups=groups)
    n = count_by(group)
    return (centred(values, group, 1 / n) * n / (n - 1).clamp(min=1)).to(dtype_of(rewards))


@advantages.register("reinforce++")
def reinforce_pp_advantages(rewards: Tensor, groups: Tensor, *, eps: float = 1e-6) -> Tensor:
    """REINFORCE++ with the group's mean as baseline, divided by the standard deviation over the batch.

    ``rewards`` (E,), ``groups`` (E,) -> (E,). The mean over the batch is 0 once the group means are subtracted.
    Source: REINFORCE++ (arXiv 2501.03262), the form with a baseline.

    Args:
        eps: added to the standard deviation.
    """
    values, (group,) = checked(rewards, groups=groups)
    gain = centred(values, group, 1 / count_by(group))
    spread = (gain.square().sum() / max(1, len(gain) - 1)).sqrt()
    return torch.where(gain == 0, 0.0, gain / (spread + eps)).to(dtype_of(rewards))


_Share = Annotated[float, Field(ge=0, le=1)]


@advantages.register("gae")
@traits(uses_values=True)
def gae_advantages(
    rewards: Tensor, values: Tensor, episodes: Tensor, *, gamma: _Share = 1.0, lam: _Share = 1.0
) -> tuple[Tensor, Tensor]:
    """GAE: generalised advantages of turns from the values of a critic, normalised over the batch as in PPO.

    ``rewards``, ``values``, ``episodes``: (N,) each, the turns of an episode together and in order -> advantages and
    returns, (N,) each.

    delta_t = r_t + gamma * V_{t+1} - V_t, with V = 0 after the last turn; A_t = sum_l (gamma * lam)^l * delta_{t+l}.
    The return, which the critic is trained on, is A_t + V_t. The advantages are then normalised
    (:func:`batch_advantages`). They are exactly 0 if the sum of the rewards from a turn on is the same for all turns,
    as in a batch in which every episode failed: normalised, they would be errors of the critic at full scale.

    Source: GAE (arXiv 1506.02438), equations 11 to 16; PPO (arXiv 1707.06347), equations 11 and 12. The zeros are our
    choice.

    Args:
        gamma: discount for each turn, in [0, 1].
        lam: weight of longer returns, in [0, 1]. With 1 and gamma 1, A_t is the sum of the rewards from t on, less V_t.
    """
    same_shape(rewards=rewards, values=values)
    given, (episode,) = checked(rewards, episodes=episodes)
    r, v, of = given.tolist(), values.detach().double().tolist(), episode.tolist()
    if len(of) and distinct(episode) != 1 + sum(a != b for a, b in pairwise(of)):
        raise ValueError("the turns of an episode are apart: give them together, in order")
    gains, sums = [0.0] * len(of), r.copy()
    for t in reversed(range(len(of))):
        goes_on = t + 1 < len(of) and of[t + 1] == of[t]
        after, later, rest = (v[t + 1], gains[t + 1], sums[t + 1]) if goes_on else (0.0, 0.0, 0.0)
        gains[t] = r[t] + gamma * after - v[t] + gamma * lam * later
        sums[t] += rest
    gain = torch.tensor(gains, dtype=torch.float64, device=rewards.device)
    returns = (gain + values.detach().double()).to(dtype_of(rewards))
    scaled = batch_advantages(gain, episodes) if len(set(sums)) > 1 else torch.zeros_like(gain)
    return scaled.to(dtype_of(rewards)), returns


def step_advantages(
    rewards: Tensor, groups: Tensor, steps: Tensor, episodes: Tensor, *, std: bool = True, eps: float = 1e-6
) -> Tensor:
    """Step-wise GRPO: compare the reward of a step with the same step of the other episodes of its group.

    ``rewards``, ``groups``, ``steps`` (index of the step in its episode), ``episodes``: (N,) each -> (N,).

    A bucket is the same step of all episodes of a group. In a bucket of two or more, A = (r - mean) / (std + eps),
    with the unbiased standard deviation. A step that only one episode reached is compared with all steps of its group,
    with episodes weighted equally: with w_i = 1 / (episodes of g * steps of the episode), mean_g = sum w_i r_i and
    var_g = sum w_i (r_i - mean_g)^2 / (1 - sum w_i^2). This is the unbiased variance if each episode has one step.

    Source: OpenClaw-RL (arXiv 2603.10165), step-wise standardisation. The baseline of a bucket of one is our addition.
    """
    values, (group, step, episode) = checked(rewards, groups=groups, steps=steps, episodes=episodes)
    check_episodes(group, episode)
    if len(torch.unique(torch.stack([episode, step]), dim=1)[0]) != len(values):
        raise ValueError("an episode has the same step twice: number the steps of an episode 0, 1, 2, ...")
    bucket = torch.unique(torch.stack([group, step]), dim=1, return_inverse=True)[1]
    n = count_by(bucket)
    in_bucket = z_score(values, bucket, 1 / n, std, eps)
    in_group = z_score(values, group, episode_weights(group, episode), std, eps)
    return torch.where(n > 1, in_bucket, in_group).to(dtype_of(rewards))


def integrated_advantages(
    outcome: Tensor,
    process: Tensor,
    groups: Tensor,
    episode_of_step: Tensor,
    *,
    steps: Tensor | None = None,
    valid: Tensor | None = None,
    coefficient: float | Tensor = 1.0,
    clip: float | None = None,
    std: bool = True,
    eps: float = 1e-6,
    baseline: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """Normalise outcome and process rewards separately, then add them.

    A_t = A_outcome + coefficient * clip(A_process, -clip, clip), for each step t. Shapes: ``outcome`` (E,), ``groups``
    (E,), ``process`` (N,), ``episode_of_step`` (N,) -> (N,).

    Rewards are normalised separately because in a sum of rewards the one with the larger variance dominates. In a
    zero-variance group the process reward alone would then decide, at full scale.

    Source: GDPO (arXiv 2601.05242), the first two steps. The third one is :func:`batch_advantages`.

    Args:
        outcome: the reward of each episode.
        process: the process reward of each step.
        groups: the group of each episode.
        episode_of_step: the index into ``outcome`` of the episode of each step.
        steps: (N,) index of the step in its episode. If given, A_process is :func:`step_advantages`. Otherwise all
            steps of a group are compared, with episodes weighted equally.
        valid: (N,) bool, False for a step without a process reward. Such a step has A_process 0 and is in no baseline;
            its ``process`` is ignored. All steps are valid by default.
        coefficient: weight of A_process; a number, or a tensor (N,).
        clip: bound of A_process, or None for no bound.
        std: whether to divide by the standard deviation.
        eps: added to the standard deviation.
        baseline: ``baseline(outcome, groups)`` -> (E,) computes A_outcome; :func:`group_advantages` by default.
    """
    _check_steps(outcome, process, episode_of_step, valid)
    judged = torch.ones_like(process, dtype=torch.bool) if valid is None else valid.bool()
    episode = episode_of_step[judged]
    if steps is not None:
        scaled = step_advantages(process[judged], groups[episode], steps[judged], episode, std=std, eps=eps)
    else:
        values, (group, of) = checked(process[judged], groups=groups[episode], episodes=episode)
        scaled = z_score(values, group, episode_weights(group, of), std, eps)
    if clip is not None:
        scaled = scaled.clamp(-clip, clip)
    added = torch.zeros_like(process, dtype=dtype_of(process))
    added[judged] = scaled.to(added.dtype)
    plain = group_advantages(outcome, groups, std=std, eps=eps) if baseline is None else baseline(outcome, groups)
    return plain[episode_of_step] + coefficient * added


def batch_advantages(advantages: Tensor, episodes: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Normalise sums of advantages over the batch: (A - mean) / (std + eps). (N,), (N,) -> (N,).

    Without it, the scale of the sum grows with the number of rewards. Mean and standard deviation are over the steps
    with an advantage other than 0, with episodes weighted equally. The other steps keep 0: they belong to zero-variance
    groups, which would otherwise be trained on by the mean of the other groups.

    Source: GDPO (arXiv 2601.05242), the third step; that zeros are kept is our choice.
    """
    values, _ = checked(advantages, episodes=episodes)
    used = values != 0
    one = torch.zeros_like(episodes[used])
    weights = episode_weights(one, index_of(episodes[used]))
    scaled = torch.zeros_like(values)
    scaled[used] = z_score(values[used], one, weights, True, eps)
    return scaled.to(dtype_of(advantages))


def summed_advantages(
    outcome: Tensor,
    process: Tensor,
    groups: Tensor,
    episode_of_step: Tensor,
    steps: Tensor,
    *,
    valid: Tensor | None = None,
    coefficient: float | Tensor = 1.0,
    std: bool = True,
    eps: float = 1e-6,
) -> Tensor:
    """Add outcome and process reward of each step, then normalise the sum by group and step (:func:`step_advantages`).

    R_t = O + coefficient * r_t; R_t = O for a step without a process reward. Shapes and arguments are those of
    :func:`integrated_advantages`; ``steps`` (N,) is the index of each step in its episode. -> (N,).

    Source: the integrated reward of OpenClaw-RL (arXiv 2603.10165), R_t = O + mean(r).
    """
    _check_steps(outcome, process, episode_of_step, valid)
    judged = torch.ones_like(process, dtype=torch.bool) if valid is None else valid.bool()
    added = coefficient * torch.where(judged, process, torch.zeros_like(process))
    total = outcome[episode_of_step].to(added.dtype) + added
    return step_advantages(total, groups[episode_of_step], steps, episode_of_step, std=std, eps=eps)


def _check_steps(outcome: Tensor, process: Tensor, episode_of_step: Tensor, valid: Tensor | None) -> None:
    if process.shape != episode_of_step.shape or (valid is not None and valid.shape != process.shape):
        raise ValueError(
            f"process {tuple(process.shape)}, episode_of_step {tuple(episode_of_step.shape)}"
            f"{'' if valid is None else f', valid {tuple(valid.shape)}'}: give one value of each for every step"
        )
    if len(episode_of_step) and not 0 <= int(episode_of_step.min()) <= int(episode_of_step.max()) < len(outcome):
        raise ValueError(f"episode_of_step is outside 0..{len(outcome) - 1}: give indices into outcome")


def distillation_advantages(teacher_logp: Tensor, old_logp: Tensor, *, clip: float = 1.0) -> Tensor:
    """On-policy distillation: A_s = clip(log pi_T(a_s | hinted) - log pi_old(a_s), -clip, clip). (S,), (S,) -> (S,).

    pi_T is the teacher: the policy with a hint in its context. ``clip`` is in nats. Without clipping, the mean of A is
    the negative reverse KL from the policy to the teacher.
    Source: OpenClaw-RL (arXiv 2603.10165), on-policy distillation, with a clipped difference.
    """
    same_shape(teacher_logp=teacher_logp, old_logp=old_logp)
    return (real(teacher_logp) - real(old_logp)).clamp(-clip, clip).detach()


def combined(
    rl: Tensor, opd: Tensor, *, w_rl: float = 1.0, w_opd: float = 1.0, has_teacher: Tensor | None = None
) -> Tensor:
    """w_rl * rl + w_opd * opd per token; only w_rl * rl for tokens without a teacher. (S,), (S,) -> (S,).

    Takes advantages or losses. ``has_teacher`` (S,) bool marks the tokens that have a teacher's log-prob (all by
    default). ``opd`` is ignored elsewhere.
    Source: OpenClaw-RL (arXiv 2603.10165), the combined objective.
    """
    same_shape(rl=rl, opd=opd, **({} if has_teacher is None else {"has_teacher": has_teacher}))
    if has_teacher is not None:
        opd = torch.where(has_teacher.bool(), opd, torch.zeros_like(opd))
    return w_rl * rl + w_opd * opd


# --- weights and losses -----------------------------------------------------------------------------------------------


def token_weights(
    episodes: Tensor, mode: Aggregation = "episode", *, rows: Tensor | None = None, norm: float | None = None
) -> Tensor:
    """Weights of trained tokens in a loss, which is ``(weights * per_token).sum()``. (S,) -> (S,) float32.

    ``episodes`` (S,) and ``rows`` (S,) name the episode and the training sequence of each token. Compute the weights
    once for a whole batch: the losses of micro-batches then add up. For padded tensors: ``weights = zeros(B, T)``,
    then ``weights[mask] = token_weights(episodes[mask])``.

    - ``token``: 1 / S (verl's ``token-mean``; DAPO, arXiv 2503.14476, equation 12).
    - ``episode``: 1 / (E * T_e), with T_e trained tokens in the episode. Episodes are weighted equally.
    - ``sequence``: 1 / (R * T_r), the same for the R training sequences (verl's ``seq-mean-token-mean``; GRPO, arXiv
      2402.03300, equation 3).
    - ``seq-mean-token-sum``: 1 / R, as in verl. The weights do not sum to 1; long sequences weigh more.
    - ``seq-mean-token-sum-norm``: 1 / (R * ``norm``), with a constant length ``norm`` in tokens (verl's
      ``loss_scale_factor``; Dr. GRPO, arXiv 2503.20783). The weights do not sum to 1.
    """
    if episodes.dim() != 1:
        raise ValueError(f"episodes {tuple(episodes.shape)}: give a flat tensor of trained tokens: episodes[mask]")
    if mode in ("sequence", "seq-mean-token-sum", "seq-mean-token-sum-norm"):
        if rows is None:
            raise ValueError(f"mode {mode!r} counts training sequences: give rows, one label for each token")
        same_shape(episodes=episodes, rows=rows)
    if mode == "token":
        weights = torch.full(episodes.shape, 1 / max(1, episodes.numel()), dtype=torch.float64, device=episodes.device)
    elif mode in ("episode", "sequence"):
        unit = index_of(episodes if rows is None or mode == "episode" else rows)
        weights = 1 / (count_by(unit) * distinct(unit))
    elif mode in ("seq-mean-token-sum", "seq-mean-token-sum-norm") and rows is not None:
        if (norm is None) == mode.endswith("-norm") or (norm is not None and norm <= 0):
            raise ValueError(f"mode {mode!r} with norm={norm}: give a positive norm with seq-mean-token-sum-norm only")
        unit = index_of(rows)
        weights = torch.ones_like(unit, dtype=torch.float64) / (distinct(unit) * (norm or 1.0))
    else:
        raise ValueError(f"unknown aggregation {mode!r}: choose one of {', '.join(Aggregation.__args__)}")
    return weights.float()


def importance_weights(
    old_logp: Tensor, rollout_logp: Tensor, *, cap: float = 2.0, rows: Tensor | None = None, masked: bool = False
) -> Tensor:
    """Importance weights between the trainer's and the engine's log-probs: min(pi_old / pi_rollout, cap).

    (S,), (S,) -> (S,), without gradient. This is truncated importance sampling (TIS). It is unbiased for ``cap`` ->
    infinity, with a high variance.

    Source: "Truncated Importance Sampling" (Ionides 2008); between engines: "Your Efficient RL Framework Secretly
    Brings You Off-Policy RL Training" (2025), verl's ``rollout_is`` ``token`` and ``sequence``; masked: "When Speed
    Kills Stability" (Liu et al. 2025), verl's ``rollout_rs`` ``token_k1`` and ``seq_sum_k1`` with one bound.

    Args:
        old_logp: log-probs of the trainer before the step.
        rollout_logp: log-probs that the engine reported.
        cap: bound of the weights.
        rows: (S,) the training sequence of each token, for flat tensors only. If given, the ratio is the product over
            the training sequence, the same for each of its tokens.
        masked: a ratio above ``cap`` has weight 0, not ``cap``: masked importance sampling (MIS).
    """
    same_shape(old_logp=old_logp, rollout_logp=rollout_logp)
    gap = (real(old_logp) - real(rollout_logp)).detach()
    if rows is not None:
        same_shape(old_logp=old_logp, rows=rows)
        row = index_of(rows)
        gap = sum_by(gap.double(), row)[row].to(gap.dtype)
    ratio = gap.clamp(max=_MAX_LOG_RATIO).exp()
    return ratio.masked_fill(ratio > cap, 0.0) if masked else ratio.clamp(max=cap)


@losses.register("ppo")
def policy_loss(
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
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped loss: sum_s w_s * c_s * max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A), r = pi / pi_old.

    All inputs (S,); returns a scalar loss and metrics. ``importance`` is c_s, from :func:`importance_weights`;
    ``sequences`` is not used. Gradients flow through ``logp`` only.

    Metrics are scalars without gradient, over tokens with non-zero weight: ``clip_fraction`` (tokens without gradient
    because of clipping) = ``clip_fraction_low`` + ``clip_fraction_high``; ``dual_clip_fraction``; ``ratio_mean``,
    ``ratio_max``; ``approx_kl``, the k3 estimate of KL(pi_old || pi); ``tokens``, the weight of these means when
    micro-batches are averaged.

    Source: PPO (arXiv 1707.06347), equation 7; two bounds: DAPO (arXiv 2503.14476), equation 10; dual clip:
    arXiv 1912.09729.

    Args:
        clip_low: r is clipped at 1 - clip_low.
        clip_high: r is clipped at 1 + clip_high.
        dual_clip: bound above 1; the loss of a token with a negative advantage is at most -dual_clip * A.
    """
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip={dual_clip}: give a bound above 1 (3 is usual), or None")
    trained, log_ratio, gain = _ratios(logp, old_logp, advantages, weights)
    ratio = log_ratio.exp()
    losses, clipped = _clipped(ratio, gain, clip_low, clip_high)
    bounded = torch.zeros_like(trained)
    if dual_clip is not None:
        bounded = (gain < 0) & (losses > -gain * dual_clip)
        losses = torch.where(bounded, -gain * dual_clip, losses)
    fractions = clipped | {"dual_clip_fraction": bounded}
    return _weighted(losses, weights, importance), _seen(trained, log_ratio, ratio, fractions)


@losses.register("gspo")
def gspo_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    weights: Tensor,
    importance: Tensor | None = None,
    sequences: Tensor | None = None,
    *,
    low: float = 3e-4,
    high: float = 4e-4,
) -> tuple[Tensor, dict[str, Tensor]]:
    """GSPO: PPO's clipped loss with one ratio for a whole training sequence, the geometric mean of its tokens' ratios.

    sum_s w_s * c_s * max(-r_s A, -clip(r_s, 1 - low, 1 + high) A). The value of r_s is exp(mean log pi / pi_old) over
    the tokens of its sequence with non-zero weight; its gradient is that of the token alone, r_s * grad log pi. With
    ``algorithm.aggregation: sequence`` and one advantage for each sequence, loss and gradient are those of the paper.

    Inputs and metrics are those of :func:`policy_loss`, without ``dual_clip_fraction``; ``ratio_mean`` and
    ``ratio_max`` are of r. Flat tensors need ``sequences``.

    Source: GSPO (arXiv 2507.18071), equations 5 to 7, in the form of equations 13 and 14 (GSPO-token).

    Args:
        low: r is clipped at 1 - low.
        high: r is clipped at 1 + high.
    """
    trained, log_ratio, gain = _ratios(logp, old_logp, advantages, weights)
    row = index_of(_sequence_of(logp, sequences)[trained])
    gaps = log_ratio.detach()[trained]
    mean = torch.zeros_like(log_ratio)
    mean[trained] = (sum_by(gaps.double(), row)[row] / count_by(row)).to(mean.dtype)
    ratio = (log_ratio - log_ratio.detach() + mean).exp()
    losses, clipped = _clipped(ratio, gain, low, high)
    return _weighted(losses, weights, importance), _seen(trained, log_ratio, ratio, clipped)


@losses.register("cispo")
def cispo_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    weights: Tensor,
    importance: Tensor | None = None,
    sequences: Tensor | None = None,
    *,
    cap: float = 5.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """CISPO: REINFORCE, weighted by the truncated ratio.

    sum_s w_s * c_s * -min(r, cap) * A * log pi, with r = pi / pi_old. min(r, cap) has no gradient, so every token keeps
    one.

    Inputs and metrics are those of :func:`policy_loss`, except that ``clip_fraction`` is the fraction of tokens with
    r > cap, which keep their gradient. ``sequences`` is not used.

    Source: CISPO (arXiv 2506.13585), equations 4 and 5, without a lower bound as there.

    Args:
        cap: bound of the ratio.
    """
    if cap <= 0:
        raise ValueError(f"cap={cap}: give a positive bound of the ratio (5 is the default)")
    trained, log_ratio, gain = _ratios(logp, old_logp, advantages, weights)
    ratio = log_ratio.detach().exp()
    losses = -ratio.clamp(max=cap) * gain * torch.where(trained, real(logp), torch.zeros_like(log_ratio))
    return _weighted(losses, weights, importance), _seen(
        trained, log_ratio, ratio, {"clip_fraction": trained & (ratio > cap)}
    )


def _ratios(logp: Tensor, old_logp: Tensor, advantages: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which tokens are trained (bool), their log-ratios (with gradient) and advantages; 0 for the others."""
    same_shape(logp=logp, old_logp=old_logp, advantages=advantages, weights=weights)
    trained = weights != 0
    logp, old = real(logp), real(old_logp).detach()
    log_ratio = torch.where(trained, logp - old, torch.zeros_like(logp)).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return trained, log_ratio, torch.where(trained, advantages, torch.zeros_like(advantages)).detach()


def _clipped(ratio: Tensor, gain: Tensor, low: float, high: float) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped loss of each token, and which tokens lost their gradient at which bound."""
    plain, clipped = -gain * ratio, -gain * ratio.clamp(1 - low, 1 + high)
    lost = clipped > plain
    return torch.maximum(plain, clipped), {
        "clip_fraction": lost,
        "clip_fraction_low": lost & (gain < 0),
        "clip_fraction_high": lost & (gain > 0),
    }


def _weighted(losses: Tensor, weights: Tensor, importance: Tensor | None) -> Tensor:
    """The sum of the losses of the tokens with non-zero weight, times weights and importance weights."""
    if importance is not None:
        same_shape(losses=losses, importance=importance)
        losses = losses * torch.where(weights != 0, importance, torch.zeros_like(importance)).detach()
    return (weights.detach() * losses).sum()


@torch.no_grad()
def _seen(trained: Tensor, log_ratio: Tensor, ratio: Tensor, fractions: dict[str, Tensor]) -> dict[str, Tensor]:
    """The metrics of a loss. ``fractions``: name -> bool tensor, whose mean over the trained tokens is logged."""
    tokens = trained.sum()
    n = tokens.clamp(min=1)
    return {name: some.sum() / n for name, some in fractions.items()} | {
        "ratio_mean": (ratio * trained).sum() / n,
        "ratio_max": (ratio * trained).amax() if ratio.numel() else ratio.new_zeros(()),
        "approx_kl": (log_ratio.exp() - 1 - log_ratio).sum() / n,
        "tokens": tokens,
    }


def _sequence_of(logp: Tensor, sequences: Tensor | None) -> Tensor:
    """The label of the training sequence of each token; by default, each row of a (B, T) tensor is one."""
    if sequences is None:
        if logp.dim() != 2:
            raise ValueError(
                f"logp {tuple(logp.shape)}: a flat tensor does not say where sequences end: give sequences, one label "
                "for each token"
            )
        return torch.arange(len(logp), device=logp.device)[:, None].expand_as(logp)
    same_shape(logp=logp, sequences=sequences)
    return sequences


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, *, clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """The loss of a critic: 1/2 * sum_t w_t * max((V - R)^2, (V_clipped - R)^2). (N,) each -> a scalar.

    V_clipped = V_old + clip(V - V_old, -clip, clip): a value that has moved away from V_old by more than ``clip``
    towards R has no gradient. Without ``clip``, the squared error. Also returns the fraction of turns that have none.
    Gradients flow through ``values`` only.

    Source: PPO (arXiv 1707.06347), equation 9; the clip is that of its first implementation ("Implementation Matters",
    arXiv 2005.12729, section 3).
    """
    same_shape(values=values, old_values=old_values, returns=returns, weights=weights)
    old, wanted = old_values.detach(), returns.detach()
    plain = (values - wanted).square()
    if clip is None:
        return (weights * plain).sum() / 2, torch.zeros((), device=values.device)
    bounded = (old + (values - old).clamp(-clip, clip) - wanted).square()
    clipped = (bounded > plain).float().mean() if len(values) else torch.zeros((), device=values.device)
    return (weights * torch.maximum(plain, bounded)).sum() / 2, clipped


def kl(logp: Tensor, other: Tensor, kind: Literal["k1", "k2", "k3"] = "k3") -> Tensor:
    """Estimates of KL(pi || other) from tokens sampled by pi, elementwise. (S,), (S,) -> (S,) in nats.

    With d = logp - other: k1 = d; k2 = d^2 / 2; k3 = exp(-d) - 1 + d. k1 and k3 are unbiased; k3 is never negative.
    As a loss, only k2 has the gradient of the KL in expectation. Source: "Approximating KL Divergence" (Schulman 2020).
    """
    same_shape(logp=logp, other=other)
    gap = real(logp) - real(other)
    if kind == "k1":
        return gap
    if kind == "k2":
        return gap.square() / 2
    if kind == "k3":
        return (-gap).clamp(max=_MAX_LOG_RATIO).exp() - 1 + gap
    raise ValueError(f"unknown estimator {kind!r}: choose k1, k2 or k3")


def entropy(logits: Tensor) -> Tensor:
    """Entropy of softmax(logits), in nats. (S, V) -> (S,). Ids with logit -inf add 0, also to the gradient."""
    logp = real(logits).log_softmax(-1)
    p = logp.exp()
    return -(p * logp.masked_fill(p == 0, 0.0)).sum(-1)


def topk_reverse_kl(logits: Tensor, ids: Tensor, teacher_logp: Tensor) -> Tensor:
    """Reverse KL to a teacher with K known log-probs, over K + 1 bins: these ids, and one bin for all other ids.

    ``logits`` (S, V) of the policy, ``ids`` (S, K) distinct in each row, ``teacher_logp`` (S, K) -> (S,) in nats:
    sum_k p_k (log p_k - log q_k) + p_tail (log p_tail - log q_tail). It is a lower bound of the full KL(p || q).
    Gradients flow through ``logits`` only. The probability of the tail is at least one rounding step (1.2e-7 in
    float32), so the result is finite even if the K ids hold all probability. Leave out tokens without a teacher.

    Source: SDFT (arXiv 2601.19897) and SDPO (arXiv 2601.20802), top-K distillation with a tail.
    """
    same_shape(ids=ids, teacher_logp=teacher_logp)
    logits = real(logits)
    log_p = logits.gather(-1, ids) - logits.logsumexp(-1, keepdim=True)
    log_q = teacher_logp.detach().to(log_p.dtype)
    step = torch.finfo(real(teacher_logp).dtype).eps
    log_p = torch.cat([log_p, _log_rest(log_p, step)], -1)
    log_q = torch.cat([log_q, _log_rest(log_q, step)], -1)
    gone = log_p.detach().exp() == 0
    return (log_p.exp() * (log_p.masked_fill(gone, 0.0) - log_q.masked_fill(gone, 0.0))).sum(-1)


def topk_overlap(a: Tensor, b: Tensor) -> Tensor:
    """Share of ids that two top-K sets have in common, in [0, 1]. (S, K), (S, K) -> (S,); ids distinct in each row.

    Source: OpenClaw-RL (arXiv 2603.10165) chooses among hints by |top-k(pi_old) & top-k(pi_T)|.
    """
    same_shape(a=a, b=b)
    return (a.unsqueeze(-1) == b.unsqueeze(-2)).any(-1).float().mean(-1)


def _log_rest(logp: Tensor, step: float) -> Tensor:
    """log(max(step, 1 - sum exp(logp))) over the last dimension, kept: (S, K) -> (S, 1)."""
    return (1 - logp.exp().sum(-1, keepdim=True)).clamp(min=step).log()
