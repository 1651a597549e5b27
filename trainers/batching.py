"""Training sequences as tensors. A prefix that several sequences share is computed once.

Invariant: a token attends to exactly the tokens that it saw when it was sampled, at the same positions: those before it
in its own sequence, however many sequences are packed into one row. A sequence with images has a row and a micro-batch
of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from clawgym.records import Image, common_prefix

__all__ = ["MicroBatch", "Packed", "MaskedSequence", "micro_batches", "pack"]


_PAIRS = 512
"""This many pairs of tokens in attention cost as much as one token in the rest of a layer. Fewer in a small model, more
in a large one (``benchmarks/train.py update``)."""


@dataclass(frozen=True, slots=True)
class MaskedSequence:
    """A training sequence, as far as a forward pass needs it."""

    ids: tuple[int, ...]
    """(T,)"""
    mask: tuple[int, ...]
    """(T,) 1 where an id is trained on; never the first."""
    images: tuple[Image, ...] = ()
    """In the order of their placeholders; each placeholder is one id, as it was recorded."""


@dataclass(frozen=True)
class Packed:
    """Several sequences in one row of T' tokens; a prefix that they share is stored once."""

    ids: np.ndarray
    """(T',) int64"""
    positions: np.ndarray
    """(T',) int64: the position of each token in its own sequence."""
    attach: tuple[tuple[int, int, int], ...]
    """Runs of new tokens: (first, one past the last, the token of this row that they continue or -1)."""
    predicts: np.ndarray
    """(S',) int64: the place in this row whose output predicts a trained token."""
    targets: np.ndarray
    """(S',) int64: that token."""
    places: np.ndarray
    """(S',) int64: its index among all trained tokens of the batch, sequence by sequence."""
    images: tuple[Image, ...] = ()
    """Of its only sequence."""

    @property
    def plain(self) -> bool:
        """Whether it holds one sequence, so that ordinary causal attention is right."""
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
    """What goes through the model at once: B rows of T tokens."""

    ids: torch.Tensor
    """(B, T) int64; short rows are filled up with token 0, which nobody sees."""
    positions: torch.Tensor
    """(B, T) int64"""
    seen: torch.Tensor | None
    """(B, 1, T, T) bool, or ``None`` where causal attention is right."""
    predicts: torch.Tensor
    """(S,) int64: into the flattened (B * T)."""
    targets: torch.Tensor
    """(S,) int64"""
    places: torch.Tensor
    """(S,) int64: into the trained tokens of the whole batch."""
    images: tuple[Image, ...] = ()
    """Of its only row; the model cannot run it before they are read."""
    features: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """What the model takes in place of ``positions`` and ``seen`` once they are."""

    def to(self, device: torch.device | str) -> MicroBatch:
        """On another device."""
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
    """Pack all ``sequences`` into rows of at most ``row_tokens`` tokens; a longer one gets a row of its own.

    Sequences with a common prefix are put side by side, so that the prefix is stored and computed once in each row. One
    that shares too little for the length of the row begins another. With ``share`` false, each sequence is a row.
    The trained tokens are numbered sequence after sequence, in the order given.
    Raises :class:`ValueError` for a sequence whose first id is trained: nothing predicts it.
    """
    starts = np.cumsum([0, *(sum(sequence.mask) for sequence in sequences)])
    for number, sequence in enumerate(sequences):
        if len(sequence.ids) != len(sequence.mask) or (sequence.mask and sequence.mask[0]):
            raise ValueError(f"sequence {number}: its mask has another length, or trains its first id: leave it out")
    rows: list[Packed] = []
    building: _Building | None = None
    for number in sorted(range(len(sequences)), key=lambda n: sequences[n].ids):
        sequence = sequences[number]
        alone = not share or sequence.images or (building is not None and building.images)
        if building is not None and not alone and building.welcomes(sequence, row_tokens):
            building.add(sequence, int(starts[number]))
            continue
        if building is not None:
            rows.append(building.done())
        building = _Building()
        building.add(sequence, int(starts[number]))
    if building is not None:
        rows.append(building.done())
    return rows


class _Building:
    """A row under construction; sequences come sorted, so the last one shares the most with the next."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.images: tuple[Image, ...] = ()
        self._positions: list[int] = []
        self._attach: list[tuple[int, int, int]] = []
        self._predicts: list[int] = []
        self._targets: list[int] = []
        self._places: list[int] = []
        self._last: tuple[int, ...] = ()
        self._where: list[int] = []
        """The place in the row of each token of the last sequence."""

    def welcomes(self, sequence: MaskedSequence, row_tokens: int) -> bool:
        """Whether ``sequence`` fits, and costs less here than in a row of its own. A shared prefix is computed once,
        but attention covers all pairs of a row, whether they see each other or not."""
        shared, size = common_prefix(self._last, sequence.ids), len(self.ids)
        fresh = len(sequence.ids) - shared
        pairs = fresh * (2 * size + fresh) - len(sequence.ids) ** 2
        return size + fresh <= row_tokens and pairs <= shared * _PAIRS

    def add(self, sequence: MaskedSequence, place: int) -> None:
        shared, start = common_prefix(self._last, sequence.ids), len(self.ids)
        self.images = sequence.images
        new = sequence.ids[shared:]
        self.ids += new
        self._positions += range(shared, len(sequence.ids))
        if new:
            self._attach.append((start, start + len(new), self._where[shared - 1] if shared else -1))
        self._where = [*self._where[:shared], *range(start, start + len(new))]
        self._last = sequence.ids
        trained = [at for at, wanted in enumerate(sequence.mask) if wanted]
        self._predicts += [self._where[at - 1] for at in trained]
        self._targets += [sequence.ids[at] for at in trained]
        self._places += range(place, place + len(trained))

    def done(self) -> Packed:
        arrays = (np.array(x, np.int64) for x in (self._predicts, self._targets, self._places))
        tokens = np.array(self.ids, np.int64), np.array(self._positions, np.int64)
        return Packed(*tokens, tuple(self._attach), *arrays, images=self.images)


def micro_batches(rows: Sequence[Packed], *, tokens: int) -> Iterator[MicroBatch]:
    """Rows of like length together, at most ``tokens`` in each micro-batch, filling included (or one row), and never
    filled up to more than twice their length. Rows with images come last, each alone."""
    yield from _grouped([row for row in rows if not row.images], tokens)
    yield from (_together([row]) for row in rows if row.images)


def _grouped(rows: Sequence[Packed], tokens: int) -> Iterator[MicroBatch]:
    held: list[Packed] = []
    for row in sorted(rows, key=lambda row: (row.plain, -len(row.ids))):
        full = held and (len(held) + 1) * len(held[0].ids) > tokens
        if held and (full or row.plain != held[0].plain or 2 * len(row.ids) < len(held[0].ids)):
            yield _together(held)
            held = []
        held.append(row)
    if held:
        yield _together(held)


def _together(rows: Sequence[Packed]) -> MicroBatch:
    size, count = len(rows[0].ids), len(rows)
    ids, positions = np.zeros((count, size), np.int64), np.zeros((count, size), np.int64)
    seen = None if rows[0].plain else np.zeros((count, 1, size, size), bool)
    for number, row in enumerate(rows):
        length = len(row.ids)
        ids[number, :length], positions[number, :length] = row.ids, row.positions
        if seen is not None:
            seen[number, 0, :length, :length] = row.seen()
            filled = np.arange(length, size)
            seen[number, 0, filled, filled] = True  # a token that sees nothing would be no number
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
