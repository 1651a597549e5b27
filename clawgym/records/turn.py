"""Turns (one model call each, with exact token ids) and the training sequences made from them."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

__all__ = ["Role", "TrainingSequence", "Turn", "common_prefix", "continued", "ids_array", "prompt_ids"]

_HIGHEST_BYTE = 3 if sys.byteorder == "little" else 0
"""Offset in an int32."""

Role = Literal["main", "subagent", "compaction", "unknown"]
"""The purpose of a model call. Calls of role ``unknown`` are never trained on."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One model call, with exact token ids, or with a ``flaw`` that excludes it from training.

    A turn that continues another turn stores only the new part of its prompt. The engine's prompt is the prompt and the
    sample of ``parent``, followed by ``context_ids``; :func:`prompt_ids` joins them.

    Raises ValueError if there is no flaw and ``logprobs`` and ``sampled_ids`` differ in length.
    """

    context_ids: tuple[int, ...] = ()
    """The prompt's token ids after those of ``parent``; the whole prompt without a parent."""
    sampled_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    """One per sampled id, in nats: log softmax(logits / temperature), over the whole vocabulary."""
    policy_version: int | None = None
    role: Role = "main"
    parent: int | None = None
    """Index, in the episode, of the turn that this one continues."""
    finish_reason: str = "stop"
    """``stop``, ``length``, ``tool_calls``, ``content_filter``, ``aborted`` (the agent left) or ``error``."""
    flaw: str | None = None
    """Why the token ids may differ from what was sampled (``text-only``, ``stripped``, ``constrained``, ...), or that
    they were removed (``redacted``); such a turn is never trained on."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters: temperature, top_p, ..."""
    images: tuple[str, ...] = ()
    """Hex SHA-256 of each image that is new in this turn's context, in order."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """``queued``, ``first_token``, ``total``: wall seconds since the request arrived."""
    malformed_calls: int = 0
    """Number of tool calls in the reply that could not be parsed."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """The messages that are new in this turn (all of them without a parent), in OpenAI chat format."""
    reply: Mapping[str, Any] = field(default_factory=dict)
    """The assistant message as it was sent to the agent."""
    tools: str = ""
    """Hex SHA-256 of the tool definitions in the prompt, which are stored as the images are; empty without tools."""
    id: str = ""
    """The response id that the agent received (``chatcmpl-...``), to match the turn with the agent's transcript."""

    def __post_init__(self) -> None:
        if self.flaw is None and len(self.logprobs) != len(self.sampled_ids):
            raise ValueError(
                f"{len(self.sampled_ids)} sampled ids with {len(self.logprobs)} log-probs: record both as the engine "
                "returned them, or set flaw"
            )


def prompt_ids(turns: Sequence[Turn], index: int) -> tuple[int, ...]:
    """The token ids of the whole prompt of ``turns[index]``.

    Raises ValueError if a parent does not come before its child.
    """
    parts: list[tuple[int, ...]] = [turns[index].context_ids]
    parent = turns[index].parent
    while parent is not None:
        if parent >= index:
            raise ValueError(f"turn {index} continues turn {parent}: a parent comes before its child")
        index = parent
        parts += [turns[index].sampled_ids, turns[index].context_ids]
        parent = turns[index].parent
    return tuple(chain.from_iterable(reversed(parts)))


def ids_array(ids: Sequence[int]) -> array[int]:
    """Token ids as an ``array("i")``. Raises ValueError unless they are whole numbers from 0 to 2**31 - 1."""
    with suppress(TypeError, OverflowError):
        data = array("I", ids).tobytes()  # five times as fast as array("i", ids)
        if data[_HIGHEST_BYTE::4].isascii():
            return array("i", data)
    wrong = next((i for i in ids if not (isinstance(i, int) and 0 <= i < 2**31)), None)
    raise ValueError(f"token id {wrong!r} is not a whole number from 0 to 2**31 - 1")


def continued(prompt: tuple[int, ...], histories: Mapping[int, tuple[int, ...]]) -> int | None:
    """The key of the longest of ``histories`` that is a prefix of ``prompt``; ``None`` if there is none.

    ``histories``: index of a turn -> token ids of its prompt and sample. Of equal histories, the latest turn is chosen.
    """
    fits = [index for index, ids in histories.items() if ids and prompt[: len(ids)] == ids]
    return max(fits, key=lambda index: (len(histories[index]), index), default=None)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the common prefix of two lists, or two tuples."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # binary search: comparing slices is faster than a loop over items
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """One training sequence: the token ids along a path of turns, from the first prompt to the last sample.

    T is the number of ids, S the number of ids that are trained on.
    """

    turns: tuple[int, ...]
    """Indices of the turns in the episode, first to last."""
    ids: tuple[int, ...]
    """(T,) prompt and sampled ids, as the engine saw them."""
    mask: tuple[int, ...]
    """(T,) 1 for ids that were sampled and are trained on in this sequence. Each sampled id is trained on only once."""
    logprobs: tuple[float, ...]
    """(S,) log-probability of each id with mask 1, in order, without padding."""
    policy_versions: tuple[int | None, ...]
    """(S,) version of the policy that sampled each id."""
    turn_of: tuple[int, ...]
    """(S,) index in the episode of the turn that sampled each id."""
    images: tuple[str, ...] = ()
    """Hex SHA-256 of the images, in the order of their positions in ``ids``."""
