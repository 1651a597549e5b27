"""Training sequences as verl keeps them: from the pool to its queue, and back to the episodes that they are of.

Invariant: ids, log-probs and teachers are those of the pool; nothing is tokenised again, and nothing cut.
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
from clawgym.trainers.common.batch import attempt_of, teacher_of
from clawgym.trainers.common.teaching import Taught
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.credit import ScoredEpisode

__all__ = ["attempts_of", "beside", "imitation_of", "padded", "row_of"]


def row_of(
    member: BatchEpisode, sample: TrainingSequence, group: str, config: TrainConfig, taught: Taught
) -> tuple[dict[str, Any], dict[str, Any]]:
    """One training sequence as verl keeps it: tensors (P prompt and T response ids, the first of which is trained), and
    what is known about it."""
    start = sample.mask.index(1)
    length = len(sample.ids) - start
    logprobs, turns = torch.zeros(length), torch.full((length,), -1)
    trained = torch.tensor(sample.mask[start:], dtype=torch.bool)
    logprobs[trained] = torch.tensor(sample.logprobs)
    turns[trained] = torch.tensor(sample.turn_of)
    attempt = attempt_of(member, group)
    rewards = torch.zeros(length)
    rewards[-1] = attempt.score
    ids = torch.tensor(sample.ids)
    mask = trained.long()
    versions = [version for version in sample.policy_versions if version is not None] or [0]
    fields = {
        "prompts": ids[:start],
        "responses": ids[start:],
        "response_mask": mask,
        "loss_mask": mask,
        "input_ids": ids,
        "position_ids": torch.arange(len(ids)),
        "rollout_log_probs": logprobs,
        "rm_scores": rewards,
        "turns": turns,
        "num_turns": attempt.n_turns,
    }
    if config.distillation.hints:
        teacher = torch.full((length,), math.nan)
        teacher[trained] = torch.tensor(teacher_of(member, sample, taught))
        fields["teacher_log_probs"] = teacher
    tag = {
        "status": "success",
        "prompt_len": start,
        "response_len": length,
        "seq_len": len(ids),
        "min_global_steps": min(versions),
        "max_global_steps": max(versions),
        "sample": member.episode.sample,
        "episode": member.episode.id,
        "task": member.episode.task_id,
        "attempt": asdict(attempt),
    }
    return fields, tag


def imitation_of(path: MaskedSequence, weight: float) -> dict[str, torch.Tensor]:
    """A row to imitate, each of its trained ids with ``weight``; in all that episodes are learnt from it is empty."""
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


def beside(rows: Sequence[Any], others: Sequence[Sequence[Any]], ranks: int) -> list[Any]:
    """``rows`` in their order, and in the n-th mini-batch of them the n-th of ``others``, the same number on each rank.

    verl gives each rank a piece of a batch, and cuts each piece into mini-batches."""
    size, share = len(rows) // (ranks * len(others)), [len(more) // ranks for more in others]
    found: list[Any] = []
    for rank in range(ranks):
        for n, more in enumerate(others):
            first = (rank * len(others) + n) * size
            found += [*rows[first : first + size], *more[rank * share[n] : (rank + 1) * share[n]]]
    return found


def padded(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """(B, T) rows filled up with 0 behind the length that each has in ``like``."""
    rows, sizes = values.unbind(), [len(row) for row in like.unbind()]
    made = torch.zeros((len(sizes), max(sizes)), dtype=rows[0].dtype)
    for place, (row, size) in enumerate(zip(rows, sizes, strict=True)):
        made[place, :size] = row[:size]
    return made


def attempts_of(tags: Sequence[Mapping[str, Any]]) -> tuple[list[ScoredEpisode], torch.Tensor]:
    """The episodes that rows are of, in an order that does not depend on that of the rows; and of each row (B,) which
    one, -1 for those that only fill up."""
    known: dict[tuple[str, int], Mapping[str, Any]] = {}
    for tag in tags:
        if not tag.get("is_padding"):
            known[tag["attempt"]["group"], tag["sample"]] = tag["attempt"]
    places = {key: place for place, key in enumerate(sorted(known))}
    episode = [-1 if tag.get("is_padding") else places[tag["attempt"]["group"], tag["sample"]] for tag in tags]
    return [_attempt(known[key]) for key in places], torch.tensor(episode)


def _attempt(about: Mapping[str, Any]) -> ScoredEpisode:
    process = {int(turn): value for turn, value in about["process"].items()}
    return ScoredEpisode(
        **{**about, "turns": tuple(about["turns"]), "steps": tuple(about["steps"]), "process": process}
    )
