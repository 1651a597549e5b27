"""Training sequences as entries of verl's queue: from the pool into the queue, and from queue tags back to episodes.

Invariant: ids and log-probs are those of the pool. Nothing is tokenised again or truncated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from clawgym.pool.states import BatchEpisode
from clawgym.records import TrainingSequence
from clawgym.trainers.batching import MaskedSequence
from clawgym.trainers.common.batch import scored_episode, teacher_of
from clawgym.trainers.common.teaching import Teachers
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.credit import ScoredEpisode

__all__ = ["episodes_of_tags", "interleave", "imitation_entry", "pad_like", "queue_entry", "sequence_fields"]


def queue_entry(
    member: BatchEpisode, sample: TrainingSequence, group: str, config: TrainConfig, teachers: Teachers
) -> tuple[dict[str, Any], dict[str, Any]]:
    """One training sequence as an entry of verl's queue: tensor fields and a tag.

    The prompt has P ids; the response has T ids and starts with the first trained id."""
    start = sample.mask.index(1)
    length = len(sample.ids) - start
    logprobs, turns = torch.zeros(length), torch.full((length,), -1)
    trained = torch.tensor(sample.mask[start:], dtype=torch.bool)
    logprobs[trained] = torch.tensor(sample.logprobs)
    turns[trained] = torch.tensor(sample.turn_of)
    attempt = scored_episode(member, group)
    rewards = torch.zeros(length)
    rewards[-1] = attempt.score
    versions = [version for version in sample.policy_versions if version is not None] or [0]
    fields = {
        **sequence_fields(sample.ids, sample.mask),
        "rollout_log_probs": logprobs,
        "rm_scores": rewards,
        "turns": turns,
        "num_turns": attempt.n_turns,
    }
    if config.distillation.hints:
        teacher = torch.full((length,), math.nan)
        teacher[trained] = teacher_of(member, sample, teachers)
        fields["teacher_log_probs"] = teacher
    tag = {
        "status": "success",
        "prompt_len": start,
        "response_len": length,
        "seq_len": len(sample.ids),
        "min_global_steps": min(versions),
        "max_global_steps": max(versions),
        "sample": member.episode.sample,
        "episode": member.episode.id,
        "task": member.episode.task_id,
        "attempt": asdict(attempt),
    }
    return fields, tag


def sequence_fields(ids: Sequence[int], mask: Sequence[int]) -> dict[str, torch.Tensor]:
    """The fields of a training sequence that do not depend on rewards. ``mask`` is 1 for trained ids; there is at least
    one."""
    start, whole = mask.index(1), torch.tensor(ids)
    trained = torch.tensor(mask[start:]).long()
    return {
        "prompts": whole[:start],
        "responses": whole[start:],
        "response_mask": trained,
        "loss_mask": trained,
        "input_ids": whole,
        "position_ids": torch.arange(len(ids)),
    }


def imitation_entry(path: MaskedSequence, weight: float) -> dict[str, torch.Tensor]:
    """Queue fields of a sequence to imitate, with ``weight`` for each trained id. Its mask for the policy loss is 0."""
    start = path.mask.index(1)
    ids, none = torch.tensor(path.ids), torch.zeros(len(path.ids) - start)
    numbers = ("old_log_probs", "advantages", "rollout_is_weights", "votes", "ref_log_prob")
    return {
        "prompts": ids[:start],
        "responses": ids[start:],
        "input_ids": ids,
        "position_ids": torch.arange(len(ids)),
        "response_mask": none.long(),
        "loss_mask": none.long(),
        "imitated": weight * torch.tensor(path.mask[start:], dtype=torch.float32),
        **dict.fromkeys(numbers, none),
    }


def interleave(rows: Sequence[Any], others: Sequence[Sequence[Any]], ranks: int) -> list[Any]:
    """Add ``others[n]`` to the n-th mini-batch of ``rows``, the same number on each rank. The order of ``rows`` stays.

    verl gives each rank a contiguous part of a batch, and splits each part into mini-batches."""
    size, share = len(rows) // (ranks * len(others)), [len(more) // ranks for more in others]
    found: list[Any] = []
    for rank in range(ranks):
        for n, more in enumerate(others):
            first = (rank * len(others) + n) * size
            found += [*rows[first : first + size], *more[rank * share[n] : (rank + 1) * share[n]]]
    return found


def pad_like(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """(B, T) rows of ``values``, padded with 0 after the length of each row in ``like``."""
    rows, sizes = values.unbind(), [len(row) for row in like.unbind()]
    made = torch.zeros((len(sizes), max(sizes)), dtype=rows[0].dtype)
    for place, (row, size) in enumerate(zip(rows, sizes, strict=True)):
        made[place, :size] = row[:size]
    return made


def episodes_of_tags(tags: Sequence[Mapping[str, Any]]) -> tuple[list[ScoredEpisode], torch.Tensor]:
    """The episodes of queue entries, in an order that does not depend on the entries' order; and (B,) the index of each
    entry's episode, -1 for padding entries."""
    known: dict[tuple[str, int], Mapping[str, Any]] = {}
    for tag in tags:
        if not tag.get("is_padding"):
            known[tag["attempt"]["group"], tag["sample"]] = tag["attempt"]
    places = {key: place for place, key in enumerate(sorted(known))}
    episode = [-1 if tag.get("is_padding") else places[tag["attempt"]["group"], tag["sample"]] for tag in tags]
    return [_from_tag(known[key]) for key in places], torch.tensor(episode)


def _from_tag(about: Mapping[str, Any]) -> ScoredEpisode:
    process = {int(turn): value for turn, value in about["process"].items()}
    return ScoredEpisode(
        **{**about, "turns": tuple(about["turns"]), "steps": tuple(about["steps"]), "process": process}
    )
