"""Conversations as training sequences for supervised training: only the replies are trained on.

Invariant: the ids equal those that the gateway would have sent and sampled for the same conversation.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from clawgym.errors import TrainingError
from clawgym.gateway.calls import Refusal
from clawgym.gateway.render import Renderer
from clawgym.pool import Pool
from clawgym.pool.documents import conversations_of
from clawgym.pool.parquet import episodes_of, is_ours
from clawgym.trainers.batching import MaskedSequence

__all__ = ["WordShuffle", "conversations", "exported", "masked_sequence", "masked_sequences"]


def conversations(pool: Pool, channel: str, *, solved: bool = True) -> Iterator[dict[str, Any]]:
    """The conversations of a channel, as ``clawgym pool export --format messages`` writes them; only those that are
    ``solved``, or all."""
    for episode in pool.episodes(channel=channel, state="closed"):
        if episode.outcome == "solved" or not solved:
            turns = pool.turns(episode.id)
            tools = {sha: json.loads(pool.image(sha).data) for sha in {t.tools for t in turns} if sha}
            yield from conversations_of(episode, turns, tools)


def masked_sequences(source: Path, renderer: Renderer) -> Iterator[MaskedSequence]:
    """The solved episodes in a file that ``clawgym pool export`` wrote (messages or parquet), as training sequences.

    Parquet holds exact ids, which are not tokenised again. Raises :class:`~clawgym.errors.TrainingError` for a file
    that cannot be read; the message names the line."""
    if source.suffix == ".parquet":
        if not is_ours(source):
            raise TrainingError(f"{source}: not written by ClawGym: give a file that `clawgym pool export` wrote")
        columns = ["episode", "outcome", "row_ids", "row_mask"]
        for _, rows in episodes_of(source, columns):
            yield from (
                MaskedSequence(tuple(row["row_ids"]), tuple(row["row_mask"]))
                for row in rows
                if row["row_ids"] and row["outcome"] == "solved"
            )
        return
    for row in exported(source):
        yield masked_sequence(renderer, row["messages"], row.get("tools") or ())


def exported(source: Path) -> Iterator[dict[str, Any]]:
    """The solved conversations in a file of messages; none in one of Parquet, which holds ids. Raises
    :class:`~clawgym.errors.TrainingError` for a file that cannot be read; the message names the line."""
    if source.suffix == ".parquet":
        return
    try:
        lines = source.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TrainingError(f"sft.data {source}: cannot be read ({error}): name a file of exported episodes") from error
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            said, outcome = row["messages"], row.get("outcome")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TrainingError(f"{source}: line {number} has no messages ({error!r}): export it again") from error
        if not isinstance(said, list) or not all(isinstance(message, dict) for message in said):
            raise TrainingError(f"{source}: line {number}: messages is not a list of objects: export it again")
        if outcome in (None, "solved"):
            yield row


def masked_sequence(
    renderer: Renderer, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
) -> MaskedSequence:
    """One conversation as a training sequence whose replies are trained on. Raises
    :class:`~clawgym.errors.TrainingError` if the chat template cannot render it, or if it has no reply."""
    ids: list[int] = []
    mask: list[int] = []
    said: tuple[int, ...] = ()
    fresh: list[Any] = []
    try:
        for number, message in enumerate(messages):
            if message.get("role") != "assistant":
                fresh.append(dict(message))
                continue
            context = renderer.increment(said, fresh, tools) if said else renderer.prompt(fresh, tools)
            said = renderer.reply([dict(m) for m in messages[:number]], dict(message), tools)
            ids += (*context, *said)
            mask += [0] * len(context) + [1] * len(said)
            fresh = []
    except (Refusal, KeyError, TypeError, AttributeError) as error:  # also for a message that is not an object
        raise TrainingError(
            f"a conversation cannot be rendered ({error}): correct it, or use another template"
        ) from error
    if not said:
        raise TrainingError("a conversation has no message of the role assistant: leave it out")
    return MaskedSequence(tuple(ids), tuple(mask))


class WordShuffle:
    """Augmentation: replaces the words of a training sequence by other words, consistently, so that a policy must learn
    to copy instead of memorising. Only words that are one token, with and without a leading space, are replaced."""

    def __init__(self, renderer: Renderer, words: Iterable[str]) -> None:
        encode = renderer.encode
        self._forms: list[tuple[int, ...]] = []
        for word in words:
            forms = [encode(text) for text in (word, f" {word}", word.capitalize(), f" {word.capitalize()}")]
            if all(len(form) == 1 for form in forms[:2]):
                self._forms.append(tuple(form[0] if len(form) == 1 else -1 for form in forms))

    def __call__(self, row: MaskedSequence, rng: random.Random) -> MaskedSequence:
        """The sequence with its words replaced."""
        others = list(self._forms)
        rng.shuffle(others)
        table = {a: b for old, new in zip(self._forms, others, strict=True) for a, b in zip(old, new, strict=True)
                 if a >= 0 and b >= 0}  # fmt: skip
        return MaskedSequence(tuple(table.get(token, token) for token in row.ids), row.mask)
