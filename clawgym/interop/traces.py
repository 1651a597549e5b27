"""Exact tokens of a pool for other trainers: Agent Lightning, AReaL and SkyRL.

    lightning_spans(trace)                # agentlightning.Span, in the result of a LitAgent's rollout or in its store
    areal_trajectories(traces(pool))      # the tensors that a workflow of AReaL returns
    skyrl_output(traces(pool))            # the GeneratorOutput of a generator of SkyRL

Only the function that is called imports its package; ``areal_trajectories`` needs torch alone.

Invariants: ids are those that the engine received or sampled. Every sampled id is trained on once, with the log-prob
that the engine returned. Turns whose tokens are not exact are left out, with all turns that continue them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clawgym.errors import MissingDependency, TraceError
from clawgym.pool import sequences_of
from clawgym.records import TrainingSequence, Turn, prompt_ids

if TYPE_CHECKING:
    from clawgym.pool import Pool

__all__ = ["Trace", "areal_trajectories", "lightning_spans", "skyrl_output", "traces"]

_CALL = "openai.chat.completion"
"""The name of the spans that Agent Lightning takes for model calls."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The turns of one graded episode."""

    id: str
    group: str
    """Episodes of one group are compared with each other."""
    turns: tuple[Turn, ...]
    reward: float
    sample: int = 0
    """Index among the episodes of its group."""

    def sequences(self) -> list[TrainingSequence]:
        """Its training sequences. Raises :class:`TraceError` for one with images, which no other type here carries."""
        found = sequences_of(self.turns)
        if any(sequence.images for sequence in found):
            raise TraceError(f"episode {self.id} has images: leave it out, or train with clawgym train")
        return found


def traces(pool: Pool, *, channel: str | None = None) -> Iterator[Trace]:
    """The closed episodes of ``pool`` that have a reward and may be trained on, in the order in which they began.

    Episodes with an infrastructure error are left out. Penalties and process rewards are not part of the reward.
    """
    for episode in pool.episodes(channel=channel):
        if episode.state != "closed" or episode.outcome == "infra" or episode.trainable is False:
            continue
        if episode.reward is not None:
            turns = pool.turns(episode.id)
            yield Trace(episode.id, episode.group or episode.id, turns, episode.reward, episode.sample)


def lightning_spans(trace: Trace, *, rollout_id: str = "", attempt_id: str = "") -> list[Any]:
    """``agentlightning.Span`` of every turn that is trained on, then one with the reward.

    ``TracerTraceToTriplet`` makes triplets of them: the ids of prompt and response, the log-probs, and the reward with
    the last turn. Each triplet has the policy version in ``metadata["response"]["policy_version"]``, if it is known.
    The trainer of Agent Lightning reads ids and rewards alone.
    """
    try:
        from agentlightning import Span, emit_reward  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingDependency(f"Agent Lightning is needed ({error}): pip install agentlightning") from error

    trace_id = hashlib.sha256(trace.id.encode()).hexdigest()[:32]
    spans: list[Any] = []

    def add(name: str, attributes: dict[str, Any]) -> None:
        number = len(spans)  # spans follow each other without overlap: rewards are matched by time
        spans.append(
            Span.from_attributes(
                attributes=attributes,
                name=name,
                rollout_id=rollout_id,
                attempt_id=attempt_id,
                sequence_id=number + 1,
                trace_id=trace_id,
                start_time=number + 0.0,
                end_time=number + 0.5,
            )
        )

    for index in sorted({index for sequence in trace.sequences() for index in sequence.turn_of}):
        turn = trace.turns[index]
        attributes: dict[str, Any] = {
            "gen_ai.response.id": f"{trace.id}-{index}",  # of spans with the same id, only one is kept
            "prompt_token_ids": list(prompt_ids(trace.turns, index)),
            "response_token_ids": list(turn.sampled_ids),
            "logprobs.content": json.dumps([{"logprob": one} for one in turn.logprobs]),
        }
        if turn.policy_version is not None:
            attributes["gen_ai.response.policy_version"] = turn.policy_version
        add(_CALL, attributes)
    reward = emit_reward(trace.reward, propagate=False)
    add(reward.name, reward.attributes)
    return spans


def areal_trajectories(found: Iterable[Trace]) -> list[dict[str, Any]]:
    """One dictionary of tensors for each training sequence of T ids, as a workflow of AReaL returns it.

    ``input_ids``, ``loss_mask``, ``versions`` (int32), ``logprobs`` (float32) and ``attention_mask`` (bool) are (1, T),
    ``rewards`` is (1,). Where the mask is 0, the log-prob is 0 and the version -1. An unknown version is -1, too.
    The sequences of one episode are separate trajectories, each with the reward.
    """
    import torch

    def tensors(sequence: TrainingSequence, reward: float) -> dict[str, Any]:
        mask = torch.tensor(sequence.mask, dtype=torch.int32)
        logprobs = torch.zeros(len(mask), dtype=torch.float32)
        logprobs[mask.bool()] = torch.tensor(sequence.logprobs, dtype=torch.float32)
        versions = torch.full((len(mask),), -1, dtype=torch.int32)
        known = [-1 if version is None else version for version in sequence.policy_versions]
        versions[mask.bool()] = torch.tensor(known, dtype=torch.int32)
        values = {
            "input_ids": torch.tensor(sequence.ids, dtype=torch.int32),
            "loss_mask": mask,
            "logprobs": logprobs,
            "versions": versions,
            "attention_mask": torch.ones(len(mask), dtype=torch.bool),
            "rewards": torch.tensor(reward, dtype=torch.float32),
        }
        return {name: value.unsqueeze(0) for name, value in values.items()}

    return [tensors(sequence, trace.reward) for trace in found for sequence in trace.sequences()]


def skyrl_output(found: Iterable[Trace]) -> dict[str, Any]:
    """``skyrl.train.generators.GeneratorOutput`` with one row for each training sequence.

    A response begins at the first id that is trained on; ids that are not have loss mask 0 and log-prob 0. The rows of
    one episode are the steps of one trajectory: the last one has the reward, the others have 0. Train an episode of
    several rows with ``step_wise_trajectories``. The type has no policy versions.

    Raises :class:`TraceError` if there is no sequence.
    """
    try:
        from skyrl.train.generators.base import TrajectoryID  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingDependency(f"SkyRL is needed ({error}): pip install 'skyrl[skyrl-train]'") from error

    names = ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "stop_reasons", "rollout_logprobs")
    rows: dict[str, Any] = {name: [] for name in (*names, "trajectory_ids", "is_last_step")}
    for trace in found:
        sequences = trace.sequences()
        for sequence in sequences:
            start, logprobs = sequence.mask.index(1), iter(sequence.logprobs)
            mask = list(sequence.mask[start:])
            last = sequence is sequences[-1]
            rows["prompt_token_ids"].append(list(sequence.ids[:start]))
            rows["response_ids"].append(list(sequence.ids[start:]))
            rows["loss_masks"].append(mask)
            rows["rollout_logprobs"].append([next(logprobs) if one else 0.0 for one in mask])
            rows["rewards"].append(trace.reward if last else 0.0)
            ended = trace.turns[sequence.turns[-1]].finish_reason
            rows["stop_reasons"].append("length" if ended == "length" else "stop")
            rows["trajectory_ids"].append(TrajectoryID(trace.group, trace.sample))
            rows["is_last_step"].append(last)
    if not rows["response_ids"]:
        raise TraceError("there is no training sequence: collect episodes with token ids first")
    return {**rows, "rollout_metrics": None}
