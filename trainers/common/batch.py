"""A batch of the pool as tensors: tokens with their advantages.

Invariants: episodes are weighted equally, however many training sequences they have; an advantage applies to the tokens
of the turn that it was given for; log-probs are those that were recorded when the tokens were sampled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from clawgym.pool import Pool
from clawgym.pool.states import Batch, BatchEpisode
from clawgym.records import Image, TrainingSequence
from clawgym.trainers.batching import MaskedSequence, Packed, pack
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.credit import ScoredEpisode, Worth, figures_of, scores_of, turn_advantages

__all__ = [
    "TrainingBatch",
    "attempt_of",
    "attempts_of",
    "images_of",
    "make_batch",
    "teacher_of",
]


@dataclass(frozen=True)
class TrainingBatch:
    """R training sequences with S trained tokens in all, sequence after sequence."""

    episodes: tuple[BatchEpisode, ...]
    sequences: tuple[MaskedSequence, ...]
    """(R,)"""
    rows: tuple[Packed, ...]
    """``sequences``, packed so that common prefixes are computed once."""
    row: torch.Tensor
    """(S,) int64: the index in ``sequences`` of each trained token."""
    episode: torch.Tensor
    """(S,) int64: which of ``episodes``."""
    advantages: torch.Tensor
    """(S,) float32"""
    rollout_logp: torch.Tensor
    """(S,) float32: of the ledger."""
    teacher_logp: torch.Tensor
    """(S,) float32; NaN where no teacher spoke."""
    scores: tuple[float, ...]
    """(E,) what each of ``episodes`` was worth, in [0, 1]"""
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
        wanted = torch.zeros(len(self.sequences), dtype=torch.bool, device=self.row.device)
        wanted[list(rows)] = True
        return wanted[self.row].nonzero()[:, 0]


def images_of(batch: Batch, pool: Pool) -> dict[str, Image]:
    """By digest, what the rows of a batch show. Raises :class:`~clawgym.errors.PoolError` if it is not in the pool."""
    members = (e for group in batch.groups for e in group.episodes)
    return {sha: pool.image(sha) for sha in {sha for e in members for sample in e.sequences for sha in sample.images}}


def make_batch(
    batch: Batch,
    config: TrainConfig,
    *,
    seed: int,
    worth: Worth = 1.0,
    taught: Mapping[tuple[str, int], Sequence[float]] | None = None,
    images: Mapping[str, Image] | None = None,
    device: torch.device | str = "cpu",
) -> TrainingBatch:
    """The tensors of a batch. Groups whose episodes are all alike stay in it with advantage 0, and are counted.

    ``taught``: (episode, turn) -> the teacher's log-prob of each sampled id. ``images``: those of :func:`images_of`."""
    episodes = tuple(e for group in batch.groups for e in group.episodes)
    attempts = attempts_of(batch)
    by_turn, process = turn_advantages(attempts, config, seed=seed, worth=worth)

    sequences: list[MaskedSequence] = []
    row: list[int] = []
    owner: list[int] = []
    advantages: list[float] = []
    logps: list[float] = []
    teacher: list[float] = []
    for number, member in enumerate(episodes):
        for sample in member.sequences:
            row += [len(sequences)] * len(sample.logprobs)
            sequences.append(
                MaskedSequence(sample.ids, sample.mask, tuple((images or {})[sha] for sha in sample.images))
            )
            owner += [number] * len(sample.logprobs)
            logps += sample.logprobs
            advantages += [by_turn[number, turn] for turn in sample.turn_of]
            teacher += teacher_of(member, sample, taught or {})
    figures = figures_of(attempts, config, seed=seed) | process
    given = torch.tensor(advantages)
    figures["actor/advantage_abs_mean"] = float(given.abs().mean()) if len(given) else 0.0
    return TrainingBatch(
        episodes,
        tuple(sequences),
        tuple(pack(sequences, row_tokens=config.compute.row_tokens)),
        torch.tensor(row, device=device),
        torch.tensor(owner, device=device),
        given.to(device),
        torch.tensor(logps, device=device),
        torch.tensor(teacher, device=device),
        tuple(scores_of(attempts, config, seed=seed)),
        config.rollout.temperature,
        figures,
    )


def teacher_of(
    member: BatchEpisode, sample: TrainingSequence, taught: Mapping[tuple[str, int], Sequence[float]]
) -> list[float]:
    """One log-prob of its teacher per trained id of a row; NaN where there is none. ``taught``: see
    :func:`make_batch`. Raises :class:`ValueError` for a teacher of another length."""
    spoken: list[float] = []
    for turn, ids in groupby(sample.turn_of):
        count = len(list(ids))
        logprobs = taught.get((member.episode.id, turn), ())
        if len(logprobs) not in (0, count):
            raise ValueError(f"episode {member.episode.id}, turn {turn}: {len(logprobs)} of {count} ids are taught")
        spoken += logprobs or [math.nan] * count
    return spoken


def attempts_of(batch: Batch) -> list[ScoredEpisode]:
    """What credit depends on, of each episode of a batch."""
    return [attempt_of(member, group.id) for group in batch.groups for member in group.episodes]


def attempt_of(member: BatchEpisode, group: str) -> ScoredEpisode:
    """What credit depends on, of one episode of ``group``."""
    episode, samples = member.episode, member.sequences
    turns = tuple(sorted({turn for sample in samples for turn in sample.turn_of}))
    process = member.process_rewards
    # What a row shows without training it, and what was judged, are turns of the agent too.
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
