"""A batch of the pool as tensors: tokens with their advantages.

Invariants: episodes are weighted equally, however many training sequences they have; an advantage applies to the tokens
of the turn that it was given for; log-probs are those that were recorded when the tokens were sampled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from clawgym.pool.states import Batch, BatchEpisode, TrainingPool
from clawgym.records import Image, TrainingSequence
from clawgym.rewards.hints import Teacher
from clawgym.trainers.batching import MaskedSequence, Packed, pack
from clawgym.trainers.common.teaching import Teachers
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.credit import (
    ProcessWeight,
    ScoredEpisode,
    batch_metrics,
    scores_of,
    token_advantages,
    trained_episodes,
    turn_advantages,
    turn_rewards,
)
from clawgym.trainers.traits import traits_of

__all__ = [
    "TrainingBatch",
    "TurnRewards",
    "scored_episode",
    "scored_episodes",
    "images_of",
    "make_batch",
    "teacher_of",
]


@dataclass(frozen=True)
class TurnRewards:
    """The N turns with trained tokens, episode after episode and in order, for an advantage that uses values."""

    rewards: torch.Tensor
    """(N,) float32 (:func:`~clawgym.trainers.credit.turn_rewards`)."""
    episode: torch.Tensor
    """(N,) int64: the index of the episode of each turn."""
    turn: torch.Tensor
    """(S,) int64: the index of the turn of each trained token."""
    first: torch.Tensor
    """(N,) int64: the index of the first trained token of each turn."""


@dataclass(frozen=True)
class TrainingBatch:
    """R training sequences with S trained tokens in total, sequence after sequence."""

    episodes: tuple[BatchEpisode, ...]
    trained: tuple[int, ...]
    """Indices in ``episodes`` of those that are trained on (:func:`~clawgym.trainers.credit.trained_episodes`)."""
    sequences: tuple[MaskedSequence, ...]
    """(R,)"""
    rows: tuple[Packed, ...]
    """``sequences``, packed so that common prefixes are computed once."""
    row: torch.Tensor
    """(S,) int64: the index in ``sequences`` of each trained token."""
    episode: torch.Tensor
    """(S,) int64: the index in ``episodes`` of each trained token."""
    advantages: torch.Tensor
    """(S,) float32; 0 if ``turns`` is given, from which the learner computes them."""
    rollout_logp: torch.Tensor
    """(S,) float32: the log-probs that were recorded during sampling."""
    teacher_logp: torch.Tensor
    """(S,) float32; NaN for tokens without a teacher."""
    scores: tuple[float, ...]
    """(E,) the outcome reward of each episode, in [0, 1]."""
    temperature: float
    metrics: Mapping[str, float]
    teacher_ids: torch.Tensor | None = None
    """(S, K) int64: the ids that are most likely under the teacher; 0 for tokens without one. None unless
    ``distillation.loss`` is ``topk``."""
    teacher_top_logp: torch.Tensor | None = None
    """(S, K) float32: the teacher's log-probs of these ids."""
    turns: TurnRewards | None = None
    """For an advantage that uses values."""

    @property
    def computed_tokens(self) -> int:
        """Tokens of one forward pass over the batch; an image counts as one."""
        return sum(len(row.ids) for row in self.rows)

    def of_episodes(self, chosen: Sequence[int]) -> torch.Tensor:
        """(S',) the indices of the trained tokens of some episodes."""
        wanted = torch.zeros(len(self.episodes), dtype=torch.bool, device=self.episode.device)
        wanted[list(chosen)] = True
        return wanted[self.episode].nonzero()[:, 0]

    def places_of(self, rows: Sequence[int]) -> torch.Tensor:
        """(S',) the indices of the trained tokens of some training sequences, sequence after sequence."""
        wanted = torch.zeros(len(self.sequences), dtype=torch.bool, device=self.row.device)
        wanted[list(rows)] = True
        return wanted[self.row].nonzero()[:, 0]


def images_of(batch: Batch, pool: TrainingPool) -> dict[str, Image]:
    """The images of the training sequences of a batch, by SHA-256. Raises :class:`~clawgym.errors.PoolError` if one is
    not in the pool."""
    members = (e for group in batch.groups for e in group.episodes)
    return {sha: pool.image(sha) for sha in {sha for e in members for sample in e.sequences for sha in sample.images}}


def make_batch(
    batch: Batch,
    config: TrainConfig,
    *,
    seed: int,
    process_weight: ProcessWeight = 1.0,
    teachers: Teachers | None = None,
    images: Mapping[str, Image] | None = None,
    device: torch.device | str = "cpu",
) -> TrainingBatch:
    """Make the tensors of a batch. Zero-variance groups are in it, but not among its ``trained`` episodes.

    Args:
        batch: a batch that was fetched from the pool.
        config: the configuration of the run.
        seed: for the control ``reward.shuffle``.
        process_weight: the weight of the process reward.
        teachers: the teachers of turns, for distillation.
        images: the result of :func:`images_of`.
        device: where the tensors are put.
    """
    episodes = tuple(e for group in batch.groups for e in group.episodes)
    scored = scored_episodes(batch)
    with_values = traits_of(config.algorithm.advantage).uses_values
    of_turns = turn_rewards if with_values else turn_advantages
    by_turn, process = of_turns(scored, config, seed=seed, process_weight=process_weight)

    members = [(number, member, sample) for number, member in enumerate(episodes) for sample in member.sequences]
    sequences = [
        MaskedSequence(sample.ids, sample.mask, tuple((images or {})[sha] for sha in sample.images))
        for _, _, sample in members
    ]
    counts = torch.tensor([len(sample.logprobs) for _, _, sample in members], dtype=torch.int64)
    row = torch.arange(len(members)).repeat_interleave(counts)
    owner = torch.tensor([number for number, _, _ in members], dtype=torch.int64)[row]
    turn = _joined([sample.turn_of for _, _, sample in members], np.int64)
    spans = [span for _, member, sample in members for span in _spans(member, sample, teachers or {})]
    teacher = _logprobs(spans)
    given = torch.zeros(len(row)) if with_values else token_advantages(by_turn, owner, turn)
    metrics = batch_metrics(scored, config, seed=seed) | process
    metrics["actor/advantage_abs_mean"] = float(given.abs().mean()) if len(given) else 0.0
    signal = owner[(given != 0) | ~teacher.isnan()].unique().tolist()
    trained = trained_episodes(scored, signal, config)
    metrics["rollout/groups_trained"] = float(len({scored[n].group for n in trained}))
    ids, top = (t.to(device) for t in _top(spans)) if config.distillation.teaches_topk else (None, None)
    return TrainingBatch(
        episodes,
        trained,
        tuple(sequences),
        tuple(pack(sequences, row_tokens=config.compute.row_tokens)),
        row.to(device),
        owner.to(device),
        given.to(device),
        _joined([sample.logprobs for _, _, sample in members], np.float32).to(device),
        teacher.to(device),
        tuple(scores_of(scored, config, seed=seed)),
        config.rollout.temperature,
        metrics,
        ids,
        top,
        _turn_rewards(by_turn, owner, turn, device) if with_values else None,
    )


def _turn_rewards(
    rewards: Mapping[tuple[int, int], float], episode: torch.Tensor, turn: torch.Tensor, device: torch.device | str
) -> TurnRewards:
    """``episode`` and ``turn`` (S,) int64: those of each trained token."""
    (episodes, _), index = torch.unique(torch.stack([episode, turn]), dim=1, return_inverse=True)
    places, first = torch.arange(len(index)), torch.zeros_like(episodes)
    first.scatter_reduce_(0, index, places, "amin", include_self=False)
    values = torch.tensor([*rewards.values()])  # in the same order: episode after episode, turn after turn
    return TurnRewards(values.to(device), episodes.to(device), index.to(device), first.to(device))


def _joined(parts: Iterable[Any], dtype: type[np.generic]) -> torch.Tensor:
    """The numbers of all ``parts``, one after the other."""
    return torch.from_numpy(np.concatenate([np.empty(0, dtype), *(np.asarray(part, dtype) for part in parts)]))


def teacher_of(member: BatchEpisode, sample: TrainingSequence, teachers: Teachers) -> torch.Tensor:
    """(S,) float32: the teacher's log-prob of each trained id of a training sequence; NaN without a teacher.

    Raises :class:`ValueError` if a turn has a wrong number of log-probs."""
    return _logprobs(_spans(member, sample, teachers))


def _logprobs(spans: Iterable[tuple[int, Teacher | None]]) -> torch.Tensor:
    return _joined(
        (np.full(count, np.nan) if teacher is None else teacher.logprobs for count, teacher in spans), np.float32
    )


def _spans(member: BatchEpisode, sample: TrainingSequence, teachers: Teachers) -> Iterator[tuple[int, Teacher | None]]:
    """For each run of trained ids of one turn: how many they are, and their teacher."""
    turns = np.asarray(sample.turn_of, np.int64)
    starts = np.flatnonzero(np.diff(turns, prepend=-1)).tolist()
    for start, end in pairwise([*starts, len(turns)]):
        turn, count = sample.turn_of[start], end - start
        teacher = teachers.get((member.episode.id, turn))
        if teacher is not None and len(teacher.logprobs) != count:
            raise ValueError(
                f"episode {member.episode.id}, turn {turn}: {len(teacher.logprobs)} teacher log-probs for {count} ids"
            )
        yield count, teacher


def _top(spans: Sequence[tuple[int, Teacher | None]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(S, K) the most likely ids of the teachers, and their log-probs; 0 without a teacher."""
    k = max((teacher.top_ids.shape[1] for _, teacher in spans if teacher is not None), default=0)
    ids = np.zeros((sum(count for count, _ in spans), k), np.int64)
    logp, start = np.zeros(ids.shape, np.float32), 0
    for count, teacher in spans:
        if teacher is not None:
            ids[start : start + count], logp[start : start + count] = teacher.top_ids, teacher.top_logprobs
        start += count
    return torch.from_numpy(ids), torch.from_numpy(logp)


def scored_episodes(batch: Batch) -> list[ScoredEpisode]:
    """The rewards of each episode of a batch."""
    return [scored_episode(member, group.id) for group in batch.groups for member in group.episodes]


def scored_episode(member: BatchEpisode, group: str) -> ScoredEpisode:
    """The rewards of one episode of ``group``."""
    episode, samples = member.episode, member.sequences
    turns = tuple(sorted(set[int]().union(*(sample.turn_of for sample in samples))))
    process = member.process_rewards
    # Turns that are shown but not trained on, and judged turns, are turns of the agent too.
    main = sorted({turn for sample in samples for turn in sample.turns}.union(turns, process))
    return ScoredEpisode(
        group,
        episode.reward or 0.0,
        episode.outcome or "",
        episode.n_turns,
        len(samples),
        sum(len(sample.logprobs) for sample in samples),
        turns,
        process,
        tuple(map(main.index, turns)),
        str(episode.meta.get("setting") or "run"),
        episode.penalties,
    )
