"""A batch of the pool as tensors: tokens with their advantages.

Invariants: one episode is one vote, however many rows of training it has; an advantage stands on the tokens of the turn
it was given for; log-probs are those of the ledger, never made up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from clawgym.pool import Pool
from clawgym.pool.states import Batch, BatchEpisode
from clawgym.records import Image, Sample
from clawgym.trainers.batching import Packed, Path, pack
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.credit import Attempt, Worth, figures_of, scores_of, turn_advantages

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
            teacher += teacher_of(member, sample, taught or {})
    figures = figures_of(attempts, config, seed=seed) | process
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
        tuple(scores_of(attempts, config, seed=seed)),
        config.rollout.temperature,
        figures,
    )


def teacher_of(member: BatchEpisode, sample: Sample, taught: Mapping[tuple[str, int], Sequence[float]]) -> list[float]:
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


def attempts_of(batch: Batch) -> list[Attempt]:
    """What credit depends on, of each episode of a batch."""
    return [attempt_of(member, group.id) for group in batch.groups for member in group.episodes]


def attempt_of(member: BatchEpisode, group: str) -> Attempt:
    """What credit depends on, of one episode of ``group``."""
    episode, samples = member.episode, member.samples
    turns = tuple(sorted({turn for sample in samples for turn in sample.turn_of}))
    process = member.process_rewards
    # What a row shows without training it, and what was judged, are turns of the agent too.
    main = sorted({turn for sample in samples for turn in sample.turns}.union(turns, process))
    return Attempt(
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
