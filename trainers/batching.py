"""Pack training sequences into rows and micro-batches. A prefix that several sequences share is computed once.

Invariant: a token attends to exactly the earlier tokens of its own sequence, at the same positions as during sampling,
however many sequences are packed into one row. A sequence with images has its own row and its own micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from clawgym.records import Image, common_prefix

__all__ = ["MicroBatch", "Packed", "MaskedSequence", "micro_batches", "pack"]


_PAIRS_PER_TOKEN = 512
"""Pairs of tokens in attention that cost as much as one token in the rest of a layer: fewer in a small model, more in a
large one (``benchmarks/train.py update``)."""


@dataclass(frozen=True, slots=True)
class MaskedSequence:
    """The part of a training sequence that a forward pass needs."""

    ids: tuple[int, ...]
    """(T,) token ids."""
    mask: tuple[int, ...]
    """(T,) 1 for an id that is trained on. The first is always 0."""
    images: tuple[Image, ...] = ()
    """In the order of their placeholders. A placeholder is one id, as it was recorded."""


@dataclass(frozen=True)
class Packed:
    """Several sequences in one row of T' tokens. A shared prefix is stored once."""

    ids: np.ndarray
    """(T',) int64"""
    positions: np.ndarray
    """(T',) int64: the position of each token in its own sequence."""
    attach: tuple[tuple[int, int, int], ...]
    """Runs of new tokens: (start, end, index in this row of the token that they continue, or -1)."""
    predicts: np.ndarray
    """(S',) int64: the index in this row whose output predicts each trained token."""
    targets: np.ndarray
    """(S',) int64: the id of each trained token."""
    places: np.ndarray
    """(S',) int64: the index of each trained token among all trained tokens of the batch, sequence by sequence."""
    images: tuple[Image, ...] = ()
    """The images of the row's only sequence."""

    @property
    def plain(self) -> bool:
        """Whether the row holds one sequence, so that ordinary causal attention applies."""
        return len(self.attach) == 1

    def seen(self) -> np.ndarray:
        """(T', T') bool: which tokens (columns) a token (row) attends to."""
        size = len(self.ids)
        seen = np.zeros((size, size), bool)
        for start, end, after in self.attach:
            if after >= 0:
                seen[start:end] = seen[after]
            seen[start:end, start:end] = np.tri(end - start, dtype=bool)
        return seen


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward pass: B rows of T tokens. Fields are as in :class:`Packed`."""

    ids: torch.Tensor
    """(B, T) int64; short rows are padded with token 0, which no other token attends to."""
    positions: torch.Tensor
    """(B, T) int64"""
    seen: torch.Tensor | None
    """(B, 1, T, T) bool attention mask, or ``None`` for ordinary causal attention."""
    predicts: torch.Tensor
    """(S,) int64: indices into the flattened (B * T)."""
    targets: torch.Tensor
    """(S,) int64"""
    places: torch.Tensor
    """(S,) int64: indices into the trained tokens of the whole batch."""
    images: tuple[Image, ...] = ()
    """The images of its only row. They must be processed (``features``) before a forward pass."""
    features: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Model inputs of the processed images; they replace ``positions`` and ``seen``."""

    def to(self, device: torch.device | str) -> MicroBatch:
        """A copy on another device."""
        return replace(
            self,
            ids=self.ids.to(device),
            positions=self.positions.to(device),
            seen=None if self.seen is None else self.seen.to(device),
            predicts=self.predicts.to(device),
            targets=self.targets.to(device),
            places=self.places.to(device),
            features={name: tensor.to(device) for name, tensor in self.features.items()},
        )


def pack(sequences: Sequence[MaskedSequence], *, row_tokens: int, share: bool = True) -> list[Packed]:
    """Pack ``sequences`` into rows of at most ``row_tokens`` tokens. A longer sequence gets its own row.

    Sequences with a common prefix are packed into the same row, where the prefix is stored and computed once. A
    sequence that would cost more in the row than alone starts a new row. With ``share=False``, each sequence is a row.
    Trained tokens are numbered sequence after sequence, in the given order.

    Raises :class:`ValueError` if a mask has a wrong length or trains the first id, which nothing predicts.
    """
    starts = np.cumsum([0, *(sum(sequence.mask) for sequence in sequences)])
    for number, sequence in enumerate(sequences):
        if len(sequence.ids) != len(sequence.mask) or (sequence.mask and sequence.mask[0]):
            raise ValueError(f"sequence {number}: the mask has a wrong length, or trains the first id: leave it out")
    rows: list[Packed] = []
    building: _RowBuilder | None = None
    for number in sorted(range(len(sequences)), key=lambda n: sequences[n].ids):
        sequence = sequences[number]
        alone = not share or sequence.images or (building is not None and building.images)
        if building is not None and not alone and building.fits(sequence, row_tokens):
            building.add(sequence, int(starts[number]))
            continue
        if building is not None:
            rows.append(building.done())
        building = _RowBuilder()
        building.add(sequence, int(starts[number]))
    if building is not None:
        rows.append(building.done())
    return rows


class _RowBuilder:
    """A row under construction. Sequences are added in sorted order, so the last one shares the most with the next."""

    def __init__(self) -> None:
        self.images: tuple[Image, ...] = ()
        self._size = 0
        self._parts: list[tuple[np.ndarray, ...]] = []
        """Of each sequence: ids, positions, predicts, targets and places, as in :class:`Packed`."""
        self._attach: list[tuple[int, int, int]] = []
        self._last: tuple[int, ...] = ()
        self._where = np.empty(0, np.int64)
        """The index in the row of each token of the last sequence."""

    def fits(self, sequence: MaskedSequence, row_tokens: int) -> bool:
        """Whether ``sequence`` fits into the row and costs less here than in its own row. A shared prefix saves
        computation, but attention is computed for all pairs of tokens of a row, masked or not."""
        shared, size = common_prefix(self._last, sequence.ids), self._size
        fresh = len(sequence.ids) - shared
        pairs = fresh * (2 * size + fresh) - len(sequence.ids) ** 2
        return size + fresh <= row_tokens and pairs <= shared * _PAIRS_PER_TOKEN

    def add(self, sequence: MaskedSequence, place: int) -> None:
        shared, start = common_prefix(self._last, sequence.ids), self._size
        self.images = sequence.images
        ids = np.array(sequence.ids, np.int64)
        self._size += len(ids) - shared
        if self._size > start:
            self._attach.append((start, self._size, int(self._where[shared - 1]) if shared else -1))
        self._where = np.concatenate([self._where[:shared], np.arange(start, self._size)])
        self._last = sequence.ids
        trained = np.flatnonzero(sequence.mask)
        places = np.arange(place, place + len(trained))
        self._parts.append((ids[shared:], np.arange(shared, len(ids)), self._where[trained - 1], ids[trained], places))

    def done(self) -> Packed:
        ids, positions, *trained = map(np.concatenate, zip(*self._parts, strict=True))
        return Packed(ids, positions, tuple(self._attach), *trained, images=self.images)


def micro_batches(rows: Sequence[Packed], *, tokens: int) -> Iterator[MicroBatch]:
    """Group rows of similar length into micro-batches of at most ``tokens`` tokens, padding included (or of one row).

    A row is never padded to more than twice its length. Rows with images come last, each in its own micro-batch."""
    yield from _grouped([row for row in rows if not row.images], tokens)
    yield from (_collate([row]) for row in rows if row.images)


def _grouped(rows: Sequence[Packed], tokens: int) -> Iterator[MicroBatch]:
    held: list[Packed] = []
    for row in sorted(rows, key=lambda row: (row.plain, -len(row.ids))):
        full = held and (len(held) + 1) * len(held[0].ids) > tokens
        if held and (full or row.plain != held[0].plain or 2 * len(row.ids) < len(held[0].ids)):
            yield _collate(held)
            held = []
        held.append(row)
    if held:
        yield _collate(held)


def _collate(rows: Sequence[Packed]) -> MicroBatch:
    size, count = len(rows[0].ids), len(rows)
    ids, positions = np.zeros((count, size), np.int64), np.zeros((count, size), np.int64)
    seen = None if rows[0].plain else np.zeros((count, 1, size, size), bool)
    for number, row in enumerate(rows):
        length = len(row.ids)
        ids[number, :length], positions[number, :length] = row.ids, row.positions
        if seen is not None:
            seen[number, 0, :length, :length] = row.seen()
            filled = np.arange(length, size)
            seen[number, 0, filled, filled] = True  # attention over no token would give NaN
    flat = np.concatenate([row.predicts + number * size for number, row in enumerate(rows)])
    others = (np.concatenate([getattr(row, name) for row in rows]) for name in ("targets", "places"))
    return MicroBatch(
        torch.from_numpy(ids),
        torch.from_numpy(positions),
        None if seen is None else torch.from_numpy(seen),
        torch.from_numpy(flat),
        *map(torch.from_numpy, others),
        images=rows[0].images,
    )
