"""Credit assignment: from the rewards of episodes to the advantage of each turn. All trainers use it.

Invariants: episodes are weighted equally, however many training sequences they have. A turn that was not judged has no
process reward; it is trained on with the outcome of its episode only.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean

import torch

from clawgym.registry import advantages
from clawgym.rewards.calibration import Judged
from clawgym.trainers import algorithms
from clawgym.trainers.config import Distillation, TrainConfig
from clawgym.trainers.traits import traits_of

__all__ = [
    "ScoredEpisode",
    "ProcessWeight",
    "batch_metrics",
    "judged_episodes",
    "scores_of",
    "token_advantages",
    "trained_episodes",
    "distilled_advantages",
    "turn_advantages",
    "turn_rewards",
]

ProcessWeight = float | Callable[[str], float]
"""Weight of the process reward in [0, 1], multiplied by ``reward.coefficient``: one number, or a function of the
setting of a task (:data:`clawgym.rewards.states.Setting`)."""


@dataclass(frozen=True, slots=True)
class ScoredEpisode:
    """The rewards of an episode and the turns they belong to, without its tokens."""

    group: Hashable
    score: float
    """The outcome reward in [0, 1]; 0 if nothing was graded."""
    outcome: str
    n_turns: int
    n_sequences: int
    n_tokens: int
    """Trained tokens."""
    turns: tuple[int, ...]
    """Turns with trained tokens, in order."""
    process: Mapping[int, float] = field(default_factory=dict)
    """Turn -> process reward, for judged turns."""
    steps: tuple[int, ...] = ()
    """For each of ``turns``, its index among the main turns of the episode. Empty: its index in ``turns``."""
    setting: str = "run"
    """The setting of the task (:data:`clawgym.rewards.states.Setting`)."""
    penalties: Mapping[str, float] = field(default_factory=dict)
    """Name -> penalty added to the outcome, 0 or less (:mod:`clawgym.rewards.penalties`)."""


def turn_advantages(
    scored: Sequence[ScoredEpisode], config: TrainConfig, *, seed: int, process_weight: ProcessWeight = 1.0
) -> tuple[dict[tuple[int, int], float], dict[str, float]]:
    """The advantage of each (index into ``scored``, turn) with trained tokens, and metrics of the process rewards.

    ``seed`` is used only by the control ``reward.shuffle``."""
    outcome = _outcomes(scored, config, seed=seed)
    numbers: dict[Hashable, int] = {}
    groups = torch.tensor([numbers.setdefault(one.group, len(numbers)) for one in scored])
    turns = _turns(scored)
    if not _has_process(config):
        plain = _outcome_advantages(outcome, groups, config).tolist()
        return {(n, t): plain[n] for n, t in turns}, {}
    process, valid, metrics = _process_rewards(scored, config, seed=seed)
    about = traits_of(config.algorithm.advantage)
    if not about.uses_outcome:
        return dict(zip(turns, process.tolist(), strict=True)), metrics
    weights = _process_weights(scored, config, process_weight)
    owners = torch.tensor([n for n, _ in turns])
    if config.reward.combine == "sum":
        mixed = algorithms.summed_advantages(
            outcome, process, groups, owners, _positions(scored),
            valid=valid, coefficient=weights, std=about.scales_process,
        )  # fmt: skip
        return dict(zip(turns, mixed.tolist(), strict=True)), metrics
    mixed = algorithms.integrated_advantages(
        outcome,
        process,
        groups,
        owners,
        steps=_positions(scored) if config.reward.by_step else None,
        valid=valid,
        coefficient=weights,
        clip=config.reward.clip,
        std=about.scales_process,
        baseline=partial(_outcome_advantages, config=config),
    )
    if about.scales_process and bool((weights * valid).any()):
        mixed = algorithms.batch_advantages(mixed, owners)
    return dict(zip(turns, mixed.tolist(), strict=True)), metrics


def token_advantages(
    by_turn: Mapping[tuple[int, int], float], episode: torch.Tensor, turn: torch.Tensor
) -> torch.Tensor:
    """(S,) float32: the advantage of each token, from those of its (episode, turn); NaN for a turn that has none.

    ``episode`` and ``turn`` (S,) int64."""
    if not by_turn:
        return torch.full(episode.shape, torch.nan)
    episodes, turns = torch.tensor(list(by_turn)).T
    table = torch.full((int(episodes.max()) + 1, int(turns.max()) + 1), torch.nan)
    table[episodes, turns] = torch.tensor(list(by_turn.values()))
    return table[episode, turn]


def turn_rewards(
    scored: Sequence[ScoredEpisode], config: TrainConfig, *, seed: int, process_weight: ProcessWeight = 1.0
) -> tuple[dict[tuple[int, int], float], dict[str, float]]:
    """The reward of each (index into ``scored``, turn) with trained tokens, for an advantage that uses values; and
    metrics of the process rewards. Arguments are those of :func:`turn_advantages`.

    A turn has its process reward, times ``reward.coefficient`` and ``process_weight``; 0 if it was not judged. The last
    turn of an episode also has the outcome with its penalties. All turns of an episode follow each other, in order."""
    turns, outcome = _turns(scored), _outcomes(scored, config, seed=seed).tolist()
    rewards, metrics = torch.zeros(len(turns)), {}
    if _has_process(config):
        process, _, metrics = _process_rewards(scored, config, seed=seed)
        rewards = _process_weights(scored, config, process_weight) * process
    last = dict(turns)
    found = zip(turns, rewards.tolist(), strict=True)
    return {(n, t): reward + (outcome[n] if last[n] == t else 0.0) for (n, t), reward in found}, metrics


def trained_episodes(scored: Sequence[ScoredEpisode], signal: Iterable[int], config: TrainConfig) -> tuple[int, ...]:
    """Indices of the episodes to train on: those of groups in which an episode has an advantage other than 0.

    The others are zero-variance groups: their gradient is 0, and counting them would only make the weights of the
    others smaller (DAPO, arXiv 2503.14476, section 3.2). With ``algorithm.kl`` or ``algorithm.entropy``, whose terms
    have a gradient on every token, all episodes are trained on; also with an advantage that uses values, which compares
    no episodes of a group.

    ``signal``: indices of the episodes with an advantage other than 0, or with a teacher.
    """
    if config.algorithm.kl or config.algorithm.entropy or traits_of(config.algorithm.advantage).uses_values:
        return tuple(range(len(scored)))
    groups = {scored[n].group for n in signal}
    return tuple(n for n, one in enumerate(scored) if one.group in groups)


def distilled_advantages(
    advantages: torch.Tensor, old_logp: torch.Tensor, teacher_logp: torch.Tensor, about: Distillation
) -> torch.Tensor:
    """Add the distillation term to advantages, elementwise. ``teacher_logp`` is NaN for tokens without a teacher."""
    known = teacher_logp.isfinite()
    opd = algorithms.distillation_advantages(torch.where(known, teacher_logp, old_logp), old_logp, clip=about.clip)
    return algorithms.combined(advantages, opd, w_rl=about.w_rl, w_opd=about.w_opd, has_teacher=known)


def judged_episodes(scored: Iterable[ScoredEpisode]) -> list[Judged]:
    """The judge's and the verifier's scores of the episodes that were judged, for calibration."""
    return [
        Judged(one.setting, fmean(one.process.values()), min(1.0, max(0.0, one.score)), one.outcome == "solved")
        for one in scored
        if one.process
    ]


def batch_metrics(scored: Sequence[ScoredEpisode], config: TrainConfig, *, seed: int) -> dict[str, float]:
    """Metrics over episodes and groups. Names follow existing systems where they mean the same."""
    by_group: dict[Hashable, list[float]] = {}
    scores = scores_of(scored, config, seed=seed)
    for one, score in zip(scored, scores, strict=True):
        by_group.setdefault(one.group, []).append(score)
    groups = list(by_group.values())
    same = [max(g) - min(g) < 1e-9 for g in groups]
    rows = sum(one.n_sequences for one in scored)
    count = len(groups) or 1
    lost = {
        f"reward/penalty_{name}": fmean(one.penalties.get(name, 0.0) for one in scored) if scored else 0.0
        for name in ("malformed", "length")
        if getattr(config.reward, name)
    }
    return lost | {
        "rollout/submitted_trajectories": float(len(scored)),
        "rollout/groups_used": float(len(groups)),
        "rollout/total_samples": float(rows),
        "rollout/avg_samples_per_trajectory": rows / max(1, len(scored)),
        "rollout/avg_reward_submitted": fmean(scores) if scores else 0.0,
        "rollout/group_all_zero_frac": sum(s and max(g) == 0 for s, g in zip(same, groups, strict=True)) / count,
        "rollout/group_all_one_frac": sum(s and min(g) == 1 for s, g in zip(same, groups, strict=True)) / count,
        "rollout/group_all_same_mid_frac": sum(s and 0 < g[0] < 1 for s, g in zip(same, groups, strict=True)) / count,
        "rollout/group_mixed_frac": sum(not s for s in same) / count,
        "rollout/group_reward_var_mean": fmean(_variance(g) for g in groups) if groups else 0.0,
        "rollout/group_zero_var_frac": sum(same) / count,
        "rollout/avg_steps_per_trajectory": fmean(one.n_turns for one in scored) if scored else 0.0,
        "rollout/sampled_tokens": float(sum(one.n_tokens for one in scored)),
        "rollout/truncated_frac": fmean(one.outcome == "truncated" for one in scored) if scored else 0.0,
    }


def scores_of(scored: Sequence[ScoredEpisode], config: TrainConfig, *, seed: int) -> list[float]:
    """The outcome reward of each episode, in [0, 1]; ``seed`` as for :func:`turn_advantages`."""
    scores = [one.score for one in scored]
    if config.reward.shuffle is True:
        random.Random(seed).shuffle(scores)
    return scores


def _outcome_advantages(outcome: torch.Tensor, groups: torch.Tensor, config: TrainConfig) -> torch.Tensor:
    about = config.algorithm
    return advantages.make(about.advantage, outcome, groups, **about.advantage_options)


def _turns(scored: Sequence[ScoredEpisode]) -> list[tuple[int, int]]:
    """(N,) the (index into ``scored``, turn) of each trained turn."""
    return [(n, t) for n, one in enumerate(scored) for t in one.turns]


def _outcomes(scored: Sequence[ScoredEpisode], config: TrainConfig, *, seed: int) -> torch.Tensor:
    """(E,) the outcome reward of each episode in [-1, 1], less its penalties."""
    losses = [sum(one.penalties.values()) for one in scored]
    if config.reward.shuffle is True:
        random.Random(seed).shuffle(losses)  # in the order of the scores
    return 2 * torch.tensor(scores_of(scored, config, seed=seed)) - 1 + torch.tensor(losses)


def _has_process(config: TrainConfig) -> bool:
    return config.reward.judge is not None or config.reward.milestones is not None


def _process_rewards(
    scored: Sequence[ScoredEpisode], config: TrainConfig, *, seed: int
) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """(N,) the process reward of each trained turn, 0 without one; (N,) bool, whether it has one; and metrics."""
    given = [scored[n].process.get(t) for n, t in _turns(scored)]
    if config.reward.shuffle:
        given = _shuffled(given, seed)
    valid = torch.tensor([value is not None for value in given], dtype=torch.bool)
    process = torch.tensor([0.0 if value is None else float(value) for value in given])
    judged = process[valid]
    return (
        process,
        valid,
        {
            "reward/process_mean": float(judged.mean()) if len(judged) else 0.0,
            "reward/process_scored_frac": float(valid.float().mean()) if len(valid) else 0.0,
            "reward/process_zero_frac": float((judged == 0).float().mean()) if len(judged) else 0.0,
        },
    )


def _process_weights(
    scored: Sequence[ScoredEpisode], config: TrainConfig, process_weight: ProcessWeight
) -> torch.Tensor:
    """(N,) the weight of the process reward of each trained turn."""
    shares = [
        process_weight(scored[n].setting) if callable(process_weight) else process_weight for n, _ in _turns(scored)
    ]
    return config.reward.coefficient * torch.tensor(shares)


def _shuffled(values: Sequence[float | None], seed: int) -> list[float | None]:
    """The values in another order; None stays in its place."""
    judged = [value for value in values if value is not None]
    random.Random(f"{seed}:process").shuffle(judged)
    rest = iter(judged)
    return [None if value is None else next(rest) for value in values]


def _positions(scored: Sequence[ScoredEpisode]) -> torch.Tensor:
    """(N,) the index of each trained turn in its episode."""
    return torch.tensor([place for one in scored for place in one.steps or range(len(one.turns))])


def _variance(values: Sequence[float]) -> float:
    mean = fmean(values)
    return fmean((v - mean) ** 2 for v in values)
