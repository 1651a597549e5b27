"""Rows of training to tensors: what several rows begin with in common is computed once.

Invariant: a token sees exactly what it saw when it was sampled, at the position it had then: the tokens before it on
its own path, however many paths lie in one row of tensors. A path with images has a row, and a micro-batch, of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from clawgym.records import Image, common_prefix

__all__ = ["MicroBatch", "Packed", "Path", "micro_batches", "pack"]


_PAIRS = 512
"""So many pairs of tokens in attention cost what a token costs in all the rest of a layer: less in a small model, more
in a large one (``benchmarks/train.py update``)."""


@dataclass(frozen=True, slots=True)
class Path:
    """One row of training."""

    ids: tuple[int, ...]
    """(T,)"""
    mask: tuple[int, ...]
    """(T,) 1 where an id is trained; never the first."""
    images: tuple[Image, ...] = ()
    """In the order of their places, each of which is one id here, as in the ledger."""


@dataclass(frozen=True)
class Packed:
    """Some paths in one row of T' tokens: what two of them begin with in common stands there once."""

    ids: np.ndarray
    """(T',) int64"""
    positions: np.ndarray
    """(T',) int64: how many tokens come before it on its path."""
    attach: tuple[tuple[int, int, int], ...]
    """Runs of new tokens: (first, one past the last, the token of this row that they continue or -1)."""
    predicts: np.ndarray
    """(S',) int64: the place in this row whose output predicts a trained token."""
    targets: np.ndarray
    """(S',) int64: that token."""
    places: np.ndarray
    """(S',) int64: its place among all trained tokens of the batch, path after path."""
    images: tuple[Image, ...] = ()
    """Of its only path."""

    @property
    def plain(self) -> bool:
        """It is one path, so that ordinary causal attention is right."""
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


def pack(paths: Sequence[Path], *, row_tokens: int, share: bool = True) -> list[Packed]:
    """All ``paths`` in rows of at most ``row_tokens`` tokens (one that is longer has a row of its own).

    Paths that begin alike come to lie side by side, so that their common beginning is stored and computed once in each
    row; one that shares too little for the length of the row begins another. With ``share`` false, each path is a row.
    The trained tokens are numbered path after path, in the order given.
    Raises :class:`ValueError` for a path whose first id is trained: nothing predicts it.
    """
    starts = np.cumsum([0, *(sum(path.mask) for path in paths)])
    for number, path in enumerate(paths):
        if len(path.ids) != len(path.mask) or (path.mask and path.mask[0]):
            raise ValueError(f"path {number}: its mask has another length, or trains its first id: leave it out")
    rows: list[Packed] = []
    building: _Building | None = None
    for number in sorted(range(len(paths)), key=lambda n: paths[n].ids):
        path = paths[number]
        alone = not share or path.images or (building is not None and building.images)
        if building is not None and not alone and building.welcomes(path, row_tokens):
            building.add(path, int(starts[number]))
            continue
        if building is not None:
            rows.append(building.done())
        building = _Building()
        building.add(path, int(starts[number]))
    if building is not None:
        rows.append(building.done())
    return rows


class _Building:
    """A row under construction; paths come sorted, so the last one shares the most with the next."""

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
        """The place in the row of each token of the last path."""

    def welcomes(self, path: Path, row_tokens: int) -> bool:
        """Whether ``path`` fits, and costs less here than in a row of its own: what it shares is not computed again,
        but attention is over all pairs of a row, whether they see each other or not."""
        shared, size = common_prefix(self._last, path.ids), len(self.ids)
        fresh = len(path.ids) - shared
        pairs = fresh * (2 * size + fresh) - len(path.ids) ** 2
        return size + fresh <= row_tokens and pairs <= shared * _PAIRS

    def add(self, path: Path, place: int) -> None:
        shared, start = common_prefix(self._last, path.ids), len(self.ids)
        self.images = path.images
        new = path.ids[shared:]
        self.ids += new
        self._positions += range(shared, len(path.ids))
        if new:
            self._attach.append((start, start + len(new), self._where[shared - 1] if shared else -1))
        self._where = [*self._where[:shared], *range(start, start + len(new))]
        self._last = path.ids
        trained = [at for at, wanted in enumerate(path.mask) if wanted]
        self._predicts += [self._where[at - 1] for at in trained]
        self._targets += [path.ids[at] for at in trained]
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
