"""Turns: one model call each, exact to the token, and the training sequences made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Role", "TrainingSequence", "Turn", "common_prefix", "continued", "prompt_ids"]

Role = Literal["main", "subagent", "compaction", "unknown"]
"""What a model call was for. ``unknown`` is never trained."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One model call, exact to the token, or marked with the ``flaw`` that keeps it out of training.

    A turn that continues another one holds only what is new: the engine was given the prompt and the sample
    of ``parent``, then ``context_ids``. So a continued history is a prefix by construction
    (:func:`prompt_ids` puts the whole together).
    """

    context_ids: tuple[int, ...] = ()
    """Given to the engine after the ids of ``parent``; the whole prompt where there is no parent."""
    sampled_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    """One per sampled id, in nats: log softmax(logits / temperature), over the whole vocabulary."""
    policy_version: int | None = None
    role: Role = "main"
    parent: int | None = None
    """Index in its episode of the turn that this one continues."""
    finish_reason: str = "stop"
    """``stop``, ``length``, ``tool_calls``, ``content_filter``, ``aborted`` (the agent left) or ``error``."""
    flaw: str | None = None
    """Why its tokens are not proved to be what was sampled (``text-only``, ``stripped``, ``constrained``, ...);
    training refuses it."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Temperature, top_p, ... that were in force."""
    images: tuple[str, ...] = ()
    """Hex SHA-256 of each image new in this turn's context, in order."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """``queued``, ``first_token``, ``total``: wall seconds since the request came."""
    malformed_calls: int = 0
    messages: tuple[Mapping[str, Any], ...] = ()
    """New in this turn (all of them where there is no parent), in OpenAI chat form."""
    reply: Mapping[str, Any] = field(default_factory=dict)
    """The assistant message as it was sent to the agent."""
    tools: str = ""
    """Hex SHA-256 of the tool definitions that were rendered into the prompt, kept beside images; empty without."""
    id: str = ""
    """The id that the agent was given with the answer (``chatcmpl-...``), to join its own transcript by."""

    def __post_init__(self) -> None:
        if self.flaw is None and len(self.logprobs) != len(self.sampled_ids):
            raise ValueError(
                f"{len(self.sampled_ids)} sampled ids with {len(self.logprobs)} log-probs: record both as the engine "
                "gave them, or name the flaw"
            )


def prompt_ids(turns: Sequence[Turn], index: int) -> tuple[int, ...]:
    """All ids that the engine was given for ``turns[index]``, in order."""
    parts: list[tuple[int, ...]] = [turns[index].context_ids]
    parent = turns[index].parent
    while parent is not None:
        if parent >= index:
            raise ValueError(f"turn {index} continues turn {parent}: a parent comes before its child")
        index = parent
        parts += [turns[index].sampled_ids, turns[index].context_ids]
        parent = turns[index].parent
    return tuple(token for part in reversed(parts) for token in part)


def continued(prompt: tuple[int, ...], histories: Mapping[int, tuple[int, ...]]) -> int | None:
    """The key of the longest of ``histories`` (index of a turn -> its prompt and sample) that ``prompt`` begins with;
    the latest of equals, ``None`` where there is none."""
    fits = [index for index, ids in histories.items() if ids and prompt[: len(ids)] == ids]
    return max(fits, key=lambda index: (len(histories[index]), index), default=None)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids two lists (or two tuples) begin with in common."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # whole slices are compared in C
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """One training sequence: the ids along a path of turns, from a first prompt to a last sample."""

    turns: tuple[int, ...]
    """Indices in the episode, first to last."""
    ids: tuple[int, ...]
    """(T,) as the engine saw and sampled them."""
    mask: tuple[int, ...]
    """(T,) 1 where an id was sampled and is trained on here; each sampled id is trained on in one sequence only."""
    logprobs: tuple[float, ...]
    """(S,) one per 1 of ``mask``, in order: never padded."""
    policy_versions: tuple[int | None, ...]
    """(S,)"""
    turn_of: tuple[int, ...]
    """(S,) index in the episode of the turn that sampled it."""
    images: tuple[str, ...] = ()
    """Hex SHA-256, in the order of their places in ``ids``."""
