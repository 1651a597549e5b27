"""From what episodes were worth to the advantage of each of their turns, the same for every trainer.

Invariants: one episode is one vote, however many training sequences it has; what was not judged has no process reward,
and its episode is learnt from by its outcome.
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

__all__ = ["ScoredEpisode", "Worth", "figures_of", "judged_of", "scores_of", "taught_advantages", "turn_advantages"]

Worth = float | Callable[[str], float]
"""In [0, 1]: what the process term counts for, beside ``reward.coefficient``; by setting, or for all alike."""


@dataclass(frozen=True, slots=True)
class ScoredEpisode:
    """What credit depends on of an episode: all but its tokens."""

    group: Hashable
    score: float
    """In [0, 1]; 0 where nothing was graded."""
    outcome: str
    n_turns: int
    n_rows: int
    n_tokens: int
    """Those that are trained."""
    turns: tuple[int, ...]
    """The turns that they are of, in their order."""
    process: Mapping[int, float] = field(default_factory=dict)
    """Turn -> reward, where there is one."""
    steps: tuple[int, ...] = ()
    """Of ``turns``: the how-manieth main turn of the episode each is. Left out: of those that are trained."""
    setting: str = "run"
    """Of its task (:data:`clawgym.rewards.states.Setting`), where the pool says it."""
    penalties: Mapping[str, float] = field(default_factory=dict)
    """Name -> what its outcome loses, 0 or less (:mod:`clawgym.rewards.penalties`)."""


def turn_advantages(
    attempts: Sequence[ScoredEpisode], config: TrainConfig, *, seed: int, worth: Worth = 1.0
) -> tuple[dict[tuple[int, int], float], dict[str, float]]:
    """The advantage of each (attempt, turn) with trained tokens; and figures of the process rewards.

    ``seed`` is for the control ``reward.shuffle`` alone."""
    losses = [sum(one.penalties.values()) for one in attempts]
    if config.reward.shuffle:
        random.Random(seed).shuffle(losses)  # in the order of the scores
    outcome = 2 * torch.tensor(scores_of(attempts, config, seed=seed)) - 1 + torch.tensor(losses)
    numbers: dict[Hashable, int] = {}
    groups = torch.tensor([numbers.setdefault(one.group, len(numbers)) for one in attempts])
    turns = [(n, t) for n, one in enumerate(attempts) for t in one.turns]
    if config.reward.judge is None:
        plain = _outcome_advantages(outcome, groups, config)
        return {(n, t): float(plain[n]) for n, t in turns}, {}
    given = [attempts[n].process.get(t) for n, t in turns]
    if config.reward.shuffle:
        given = _dealt_anew(given, seed)
    valid = torch.tensor([value is not None for value in given])
    process = torch.tensor([0.0 if value is None else float(value) for value in given])
    judged = process[valid]
    figures = {
        "reward/process_mean": float(judged.mean()) if len(judged) else 0.0,
        "reward/process_scored_frac": float(valid.float().mean()) if len(valid) else 0.0,
        "reward/process_zero_frac": float((judged == 0).float().mean()) if len(judged) else 0.0,
    }
    if config.algorithm.advantage == "binary":
        return dict(zip(turns, process.tolist(), strict=True)), figures
    shares = [worth(attempts[n].setting) if callable(worth) else worth for n, _ in turns]
    mixed = algorithms.integrated_advantages(
        outcome,
        process,
        groups,
        torch.tensor([n for n, _ in turns]),
        steps=_positions(attempts) if config.reward.by_step else None,
        valid=valid,
        coefficient=config.reward.coefficient * torch.tensor(shares),
        clip=config.reward.clip,
        std=config.algorithm.advantage != "dr-grpo",
        baseline=partial(_outcome_advantages, config=config),
    )
    return {key: float(value) for key, value in zip(turns, mixed, strict=True)}, figures


def taught_advantages(
    advantages: torch.Tensor, old_logp: torch.Tensor, teacher_logp: torch.Tensor, about: Distillation
) -> torch.Tensor:
    """Advantages with the teachers' part in them, elementwise; ``teacher_logp`` is NaN where no teacher spoke."""
    spoken = teacher_logp.isfinite()
    opd = algorithms.distillation_advantages(torch.where(spoken, teacher_logp, old_logp), old_logp, clip=about.clip)
    return algorithms.combined(advantages, opd, w_rl=about.w_rl, w_opd=about.w_opd, taught=spoken)


def judged_of(attempts: Iterable[ScoredEpisode]) -> list[Judged]:
    """What judge and verifier said of the attempts that were judged, to be held against each other."""
    return [
        Judged(one.setting, fmean(one.process.values()), min(1.0, max(0.0, one.score)), one.outcome == "solved")
        for one in attempts
        if one.process
    ]


def figures_of(attempts: Sequence[ScoredEpisode], config: TrainConfig, *, seed: int) -> dict[str, float]:
    """Statistics over episodes and groups, under the names of the existing systems where they mean the same."""
    by_group: dict[Hashable, list[float]] = {}
    scores = scores_of(attempts, config, seed=seed)
    for one, score in zip(attempts, scores, strict=True):
        by_group.setdefault(one.group, []).append(score)
    groups = list(by_group.values())
    same = [max(g) - min(g) < 1e-9 for g in groups]
    rows = sum(one.n_rows for one in attempts)
    count = len(groups) or 1
    lost = {
        f"reward/penalty_{name}": fmean(one.penalties.get(name, 0.0) for one in attempts) if attempts else 0.0
        for name in ("malformed", "length")
        if getattr(config.reward, name)
    }
    return lost | {
        "rollout/submitted_trajectories": float(len(attempts)),
        "rollout/groups_used": float(len(groups)),
        "rollout/total_samples": float(rows),
        "rollout/avg_samples_per_trajectory": rows / max(1, len(attempts)),
        "rollout/avg_reward_submitted": fmean(scores) if scores else 0.0,
        "rollout/group_all_zero_frac": sum(s and max(g) == 0 for s, g in zip(same, groups, strict=True)) / count,
        "rollout/group_all_one_frac": sum(s and min(g) == 1 for s, g in zip(same, groups, strict=True)) / count,
        "rollout/group_all_same_mid_frac": sum(s and 0 < g[0] < 1 for s, g in zip(same, groups, strict=True)) / count,
        "rollout/group_mixed_frac": sum(not s for s in same) / count,
        "rollout/group_reward_var_mean": fmean(_variance(g) for g in groups) if groups else 0.0,
        "rollout/group_zero_var_frac": sum(same) / count,
        "rollout/avg_steps_per_trajectory": fmean(one.n_turns for one in attempts) if attempts else 0.0,
        "rollout/sampled_tokens": float(sum(one.n_tokens for one in attempts)),
        "rollout/truncated_frac": fmean(one.outcome == "truncated" for one in attempts) if attempts else 0.0,
    }


def scores_of(attempts: Sequence[ScoredEpisode], config: TrainConfig, *, seed: int) -> list[float]:
    """What each of ``attempts`` is worth, in [0, 1]; ``seed`` as for :func:`turn_advantages`."""
    scores = [one.score for one in attempts]
    if config.reward.shuffle:
        random.Random(seed).shuffle(scores)
    return scores


def _outcome_advantages(outcome: torch.Tensor, groups: torch.Tensor, config: TrainConfig) -> torch.Tensor:
    about = config.algorithm
    return advantages.make(about.advantage, outcome, groups, **about.advantage_options)


def _dealt_anew(values: Sequence[float | None], seed: int) -> list[float | None]:
    """The same values, each on a judged place, in another order."""
    judged = [value for value in values if value is not None]
    random.Random(f"{seed}:process").shuffle(judged)
    left = iter(judged)
    return [None if value is None else next(left) for value in values]


def _positions(attempts: Sequence[ScoredEpisode]) -> torch.Tensor:
    """(N,) the how-manieth turn of its episode each trained turn is."""
    return torch.tensor([place for one in attempts for place in one.steps or range(len(one.turns))])


def _variance(values: Sequence[float]) -> float:
    mean = fmean(values)
    return fmean((v - mean) ** 2 for v in values)
