"""A batch of the pool as tensors: tokens with their advantages.

Invariants: one episode is one vote, however many rows of training it has; an advantage stands on the tokens of the turn
it was given for; log-probs are those of the ledger, never made up.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean

import torch

from clawgym.pool import Pool
from clawgym.pool.states import Batch, BatchEpisode
from clawgym.records import Image, Sample
from clawgym.trainers import algorithms
from clawgym.trainers.batching import Packed, Path, pack
from clawgym.trainers.config import TrainConfig

__all__ = ["TrainingBatch", "figures_of", "images_of", "make_batch"]

PROCESS = "judge"
"""The name under which turns have their process rewards in the pool."""


@dataclass(frozen=True)
class TrainingBatch:
    """R rows of training with S trained tokens in all, row after row."""

    episodes: tuple[BatchEpisode, ...]
    paths: tuple[Path, ...]
    """(R,)"""
    rows: tuple[Packed, ...]
    """``paths`` with their common beginnings put together."""
    row: torch.Tensor
    """(S,) int64: which row a trained token is of."""
    episode: torch.Tensor
    """(S,) int64: which of ``episodes``."""
    advantages: torch.Tensor
    """(S,) float32"""
    rollout_logp: torch.Tensor
    """(S,) float32: of the ledger."""
    teacher_logp: torch.Tensor
    """(S,) float32; NaN where no teacher spoke."""
    temperature: float
    figures: Mapping[str, float]

    @property
    def computed_tokens(self) -> int:
        """Tokens that go through the model in a forward pass, an image counted as one."""
        return sum(len(row.ids) for row in self.rows)

    def of_episodes(self, chosen: Sequence[int]) -> torch.Tensor:
        """(S',) the places of the trained tokens of some episodes."""
        wanted = torch.zeros(len(self.episodes), dtype=torch.bool, device=self.episode.device)
        wanted[list(chosen)] = True
        return wanted[self.episode].nonzero()[:, 0]

    def places_of(self, rows: Sequence[int]) -> torch.Tensor:
        """(S',) the places of the trained tokens of some rows, row after row."""
        wanted = torch.zeros(len(self.paths), dtype=torch.bool, device=self.row.device)
        wanted[list(rows)] = True
        return wanted[self.row].nonzero()[:, 0]


def images_of(batch: Batch, pool: Pool) -> dict[str, Image]:
    """By digest, what the rows of a batch show. Raises :class:`~clawgym.errors.PoolError` if it is not in the pool."""
    members = (e for group in batch.groups for e in group.episodes)
    return {sha: pool.image(sha) for sha in {sha for e in members for sample in e.samples for sha in sample.images}}


def make_batch(
    batch: Batch,
    config: TrainConfig,
    *,
    seed: int,
    worth: float = 1.0,
    taught: Mapping[tuple[str, int], Sequence[float]] | None = None,
    images: Mapping[str, Image] | None = None,
    device: torch.device | str = "cpu",
) -> TrainingBatch:
    """The tensors of a batch. Groups whose episodes are all alike stay in it with advantage 0, and are counted.

    ``worth`` in [0, 1]: what the process term counts for, beside ``reward.coefficient``. ``taught``: (episode, turn) ->
    the teacher's log-prob of each sampled id. ``images``: those of :func:`images_of`."""
    members = [(number, e) for number, group in enumerate(batch.groups) for e in group.episodes]
    episodes = tuple(e for _, e in members)
    scores = torch.tensor([score_of(e, config) for e in episodes])
    if config.reward.shuffle:
        order = list(range(len(scores)))
        random.Random(seed).shuffle(order)
        scores = scores[order]
    outcome = 2 * scores - 1
    groups = torch.tensor([number for number, _ in members])
    by_turn, process = _advantages(episodes, outcome, groups, config, worth)

    paths: list[Path] = []
    row: list[int] = []
    owner: list[int] = []
    advantages: list[float] = []
    logps: list[float] = []
    teacher: list[float] = []
    for number, member in enumerate(episodes):
        for sample in member.samples:
            row += [len(paths)] * len(sample.logprobs)
            paths.append(Path(sample.ids, sample.mask, tuple((images or {})[sha] for sha in sample.images)))
            owner += [number] * len(sample.logprobs)
            logps += sample.logprobs
            advantages += [by_turn[number, turn] for turn in sample.turn_of]
            teacher += _teacher(member, sample, taught or {})
    figures = figures_of(batch, scores.tolist()) | process
    given = torch.tensor(advantages)
    figures["actor/advantage_abs_mean"] = float(given.abs().mean()) if len(given) else 0.0
    return TrainingBatch(
        episodes,
        tuple(paths),
        tuple(pack(paths, row_tokens=config.compute.row_tokens)),
        torch.tensor(row, device=device),
        torch.tensor(owner, device=device),
        given.to(device),
        torch.tensor(logps, device=device),
        torch.tensor(teacher, device=device),
        config.rollout.temperature,
        figures,
    )


def _teacher(member: BatchEpisode, sample: Sample, taught: Mapping[tuple[str, int], Sequence[float]]) -> list[float]:
    """One log-prob per trained id of a row."""
    spoken: list[float] = []
    for turn, ids in groupby(sample.turn_of):
        count = len(list(ids))
        logprobs = taught.get((member.episode.id, turn), ())
        if len(logprobs) not in (0, count):
            raise ValueError(f"episode {member.episode.id}, turn {turn}: {len(logprobs)} of {count} ids are taught")
        spoken += logprobs or [math.nan] * count
    return spoken


def score_of(member: BatchEpisode, config: TrainConfig) -> float:
    """The outcome of an episode in [0, 1]; 0 where nothing was graded."""
    return float(member.episode.rewards.get(config.reward.score, member.episode.reward or 0.0))


def _advantages(
    episodes: Sequence[BatchEpisode], outcome: torch.Tensor, groups: torch.Tensor, config: TrainConfig, worth: float
) -> tuple[dict[tuple[int, int], float], dict[str, float]]:
    """The advantage of each (episode, turn) that has trained tokens; and figures of the process rewards."""
    turns = [(n, t) for n, e in enumerate(episodes) for t in sorted({t for s in e.samples for t in s.turn_of})]
    of_turn = torch.tensor([n for n, _ in turns])
    if config.reward.judge is None:
        plain = _outcome(outcome, groups, config)
        return {(n, t): float(plain[n]) for n, t in turns}, {}
    given = [episodes[n].turn_rewards.get(PROCESS, {}).get(t) for n, t in turns]
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
    position = _positions(turns) if config.reward.by_step else None
    mixed = algorithms.integrated_advantages(
        outcome,
        process,
        groups,
        of_turn,
        steps=position,
        valid=valid,
        coefficient=worth * config.reward.coefficient,
        clip=config.reward.clip,
        std=config.algorithm.advantage != "dr-grpo",
    )
    return {key: float(value) for key, value in zip(turns, mixed, strict=True)}, figures


def _outcome(outcome: torch.Tensor, groups: torch.Tensor, config: TrainConfig) -> torch.Tensor:
    match config.algorithm.advantage:
        case "rloo":
            return algorithms.rloo_advantages(outcome, groups)
        case "reinforce++":
            return algorithms.reinforce_pp_advantages(outcome, groups)
        case kind:
            return algorithms.group_advantages(outcome, groups, std=kind == "grpo")


def _positions(turns: Sequence[tuple[int, int]]) -> torch.Tensor:
    """(N,) the how-manieth trained turn of its episode each is."""
    seen: dict[int, int] = {}
    places = []
    for episode, _ in turns:
        places.append(seen.get(episode, 0))
        seen[episode] = places[-1] + 1
    return torch.tensor(places)


def figures_of(batch: Batch, scores: Sequence[float]) -> dict[str, float]:
    """Statistics over episodes and groups, under the names of the existing systems where they mean the same."""
    members = [e for group in batch.groups for e in group.episodes]
    sizes = [len(group.episodes) for group in batch.groups]
    by_group, at = [], 0
    for size in sizes:
        by_group.append(scores[at : at + size])
        at += size
    same = [max(g) - min(g) < 1e-9 for g in by_group]
    samples = [s for e in members for s in e.samples]
    count = len(by_group) or 1
    return {
        "rollout/submitted_trajectories": float(len(members)),
        "rollout/groups_used": float(len(by_group)),
        "rollout/total_samples": float(len(samples)),
        "rollout/avg_samples_per_trajectory": len(samples) / max(1, len(members)),
        "rollout/avg_reward_submitted": fmean(scores) if scores else 0.0,
        "rollout/group_all_zero_frac": sum(s and max(g) == 0 for s, g in zip(same, by_group, strict=True)) / count,
        "rollout/group_all_one_frac": sum(s and min(g) == 1 for s, g in zip(same, by_group, strict=True)) / count,
        "rollout/group_all_same_mid_frac": sum(s and 0 < g[0] < 1 for s, g in zip(same, by_group, strict=True)) / count,
        "rollout/group_mixed_frac": sum(not s for s in same) / count,
        "rollout/group_reward_var_mean": fmean(_variance(g) for g in by_group) if by_group else 0.0,
        "rollout/group_zero_var_frac": sum(same) / count,
        "rollout/avg_steps_per_trajectory": fmean(e.episode.n_turns for e in members) if members else 0.0,
        "rollout/sampled_tokens": float(sum(len(s.logprobs) for s in samples)),
        "rollout/truncated_frac": fmean(e.episode.outcome == "truncated" for e in members) if members else 0.0,
    }


def _variance(values: Sequence[float]) -> float:
    mean = fmean(values)
    return fmean((v - mean) ** 2 for v in values)
