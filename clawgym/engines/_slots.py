"""Keys and values of running sequences, and the attention over them.

All tokens of one step, of all sequences, pass through the model as one row of shape (1, T), without padding. Only
attention has to distinguish sequences, so only attention is replaced: it is registered with transformers by name, and
receives the keyword ``slots`` of ``forward``, the :class:`Plan` of the step.

Decoding sequences are in slabs: tensors (layers, 2, rows, kv_heads, capacity, head_dim) whose rows are filled from the
front, so that one attention call reads all rows of a slab in place, up to the longest. Capacities are powers of two, so
a row has at most twice the memory that it needs. A sequence whose prompt is still being computed has its own buffer
(layers, 2, kv_heads, capacity, head_dim), and joins a slab afterwards.

Invariants: a row only reads what was written for it (the mask ends at its length). Slabs are initialised with zeros,
because values behind the mask are still multiplied by 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from clawgym.errors import EngineError

__all__ = [
    "ATTENTION",
    "Decode",
    "KVShape",
    "Plan",
    "Prefill",
    "Slab",
    "WholeSlab",
    "capacity_for",
    "register_attention",
]

ATTENTION = "clawgym_slots"
SMALLEST = 256
STEADY = 16
"""Fewest rows of a steady slab."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """The shape of one token's keys and values."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize

    def buffer(self, capacity: int) -> torch.Tensor:
        """(layers, 2, kv_heads, capacity, head_dim)"""
        return self._zeros(self.kv_heads, capacity)

    def rows(self, rows: int, capacity: int) -> torch.Tensor:
        """(layers, 2, rows, kv_heads, capacity, head_dim)"""
        return self._zeros(rows, self.kv_heads, capacity)

    def _zeros(self, *middle: int) -> torch.Tensor:
        shape = (self.layers, 2, *middle, self.head_dim)
        if self.device.type != "cpu" or 0 in shape:
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        # With numpy the kernel provides the zeros: unwritten pages take no time and no memory.
        room = numpy.zeros(math.prod(shape) * self.dtype.itemsize, numpy.uint8)
        return torch.from_numpy(room).view(self.dtype).view(shape)


def capacity_for(tokens: int, window: int) -> int:
    """The capacity of the slab for a sequence of ``tokens`` tokens."""
    return min(window, max(SMALLEST, 1 << (tokens - 1).bit_length()))


class _Placed(Protocol):
    """The attributes of a sequence that a slab uses; it sets ``row``."""

    length: int
    row: int


_S = TypeVar("_S", bound=_Placed)


class Slab(Generic[_S]):
    """Rows of the same capacity, filled from the front. With ``steady`` their number changes rarely, because CUDA
    graphs are recorded for it: rows stay until :meth:`compact`."""

    def __init__(self, shape: KVShape, capacity: int, *, steady: bool = False) -> None:
        self.capacity = capacity
        self.sequences: list[_S] = []
        self._shape, self.steady = shape, steady
        self.kv = shape.rows(0, capacity)
        self.seen, self.unseen = torch.tensor([0.0, float("-inf")], dtype=shape.dtype, device=shape.device)

    def add(self, sequence: _S, kv: torch.Tensor) -> None:
        """Copy the first ``sequence.length`` tokens of ``kv`` (layers, 2, kv_heads, T, head_dim) to a new row."""
        row = len(self.sequences)
        if row == self.kv.shape[2]:
            self._resize(max(STEADY, 4 * row) if self.steady else max(1, 2 * row))
        self.kv[:, :, row, :, : sequence.length].copy_(kv[:, :, :, : sequence.length])
        self.sequences.append(sequence)
        sequence.row = row

    def remove(self, sequence: _S) -> None:
        """Free the sequence's row; the last row moves there."""
        last = self.sequences.pop()
        if last is not sequence:
            self.kv[:, :, sequence.row, :, : last.length].copy_(self.kv[:, :, last.row, :, : last.length])
            self.sequences[sequence.row] = last
            last.row = sequence.row
        if not self.steady and 4 * len(self.sequences) <= self.kv.shape[2]:
            self._resize(2 * len(self.sequences))

    def compact(self) -> None:
        """Free the rows of a steady slab that no sequence uses."""
        if self.steady and len(self.sequences) < self.kv.shape[2]:
            self._resize(len(self.sequences))

    def view(self, sequence: _S) -> torch.Tensor:
        """The sequence's keys and values, in place: (layers, 2, kv_heads, capacity, head_dim)."""
        return self.kv[:, :, sequence.row]

    def _resize(self, rows: int) -> None:
        resized = self._shape.rows(rows, self.capacity)
        kept = len(self.sequences)
        if kept:
            used = max(s.length for s in self.sequences)
            resized[:, :, :kept, :, :used].copy_(self.kv[:, :, :kept, :, :used])
        self.kv = resized


class Decode:
    """Decodes one token for each of the rows of a slab from ``first`` on: tokens ``start`` to ``start + rows`` of the
    step."""

    _mask: torch.Tensor | None

    def __init__(self, slab: Slab[Any], start: int, positions: list[int], first: int = 0) -> None:
        rows, longest = len(positions), max(positions) + 1
        device = slab.kv.device
        self.span = slice(start, start + rows)
        self._rows = torch.arange(rows, device=device)
        self._positions = torch.tensor(positions, device=device)
        self._keys = slab.kv[:, 0, first : first + rows]
        self._values = slab.kv[:, 1, first : first + rows]
        self._longest = longest
        self._mask = None if min(positions) + 1 == longest else _mask(slab, longest, self._positions)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None):
        """Attention of N rows: q (heads, N, D), k and v (kv_heads, N, D) -> (N, heads, D)."""
        keys, values = self._keys[layer], self._values[layer]
        keys[self._rows, :, self._positions] = k.transpose(0, 1)
        values[self._rows, :, self._positions] = v.transpose(0, 1)
        # Query heads that share keys are treated as several queries, so keys are not repeated.
        grouped = q.unflatten(0, (k.shape[0], -1)).permute(2, 0, 1, 3)
        seen = slice(0, self._longest)
        out = scaled_dot_product_attention(
            grouped, keys[:, :, seen], values[:, :, seen], attn_mask=self._mask, scale=scale
        )
        return out.flatten(1, 2)


class WholeSlab(Decode):
    """Decodes one token for every row of a slab, used or not, over its whole capacity: no shape depends on
    ``positions`` (rows,), whose values may change between two runs."""

    def __init__(self, slab: Slab[Any], positions: torch.Tensor) -> None:
        self.span = slice(0, len(positions))
        self._rows = torch.arange(len(positions), device=positions.device)
        self._positions = positions
        self._keys, self._values = slab.kv[:, 0], slab.kv[:, 1]
        self._longest = slab.capacity
        self._mask = _mask(slab, slab.capacity, positions)


def _mask(slab: Slab[Any], longest: int, positions: torch.Tensor) -> torch.Tensor:
    """(rows, 1, 1, longest): 0 up to the position of each row, then minus infinity."""
    seen = torch.arange(longest, device=positions.device) <= positions[:, None]
    return torch.where(seen, slab.seen, slab.unseen)[:, None, None]


class Prefill:
    """Computes ``count`` tokens of a prompt from position ``begin``, which are at ``start`` in the step."""

    def __init__(self, kv: torch.Tensor, begin: int, count: int, start: int) -> None:
        self.span = slice(start, start + count)
        self._kv = kv
        self._begin, self._end = begin, begin + count
        self._mask: torch.Tensor | None = None
        if begin and count > 1:
            at = torch.arange(self._end, device=kv.device)
            mask = torch.zeros(count, self._end, dtype=kv.dtype, device=kv.device)
            self._mask = mask.masked_fill_(at > at[begin:, None], float("-inf"))

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None):
        """Attention of T tokens: q (heads, T, D), k and v (kv_heads, T, D) -> (T, heads, D)."""
        keys, values = self._kv[layer, 0], self._kv[layer, 1]
        keys[:, self._begin : self._end] = k
        values[:, self._begin : self._end] = v
        grouped = q.unflatten(0, (k.shape[0], -1))
        out = scaled_dot_product_attention(
            grouped,
            _for_heads(keys[:, : self._end], grouped.shape[1]),
            _for_heads(values[:, : self._end], grouped.shape[1]),
            attn_mask=self._mask,
            is_causal=self._begin == 0 and self._end > 1,
            scale=scale,
        )
        return out.flatten(0, 1).transpose(0, 1)


def _for_heads(shared: torch.Tensor, heads: int) -> torch.Tensor:
    """(kv_heads, T, D) -> (kv_heads, heads, T, D) for query heads that share keys or values.

    On a GPU a copy: with a stride of 0 and a mask, torch (2.11 at least) computes the last of 32 n + 1 queries with
    what is in memory behind the mask (https://github.com/pytorch/pytorch/issues/191937).
    """
    wide = shared[:, None].expand(-1, heads, -1, -1)
    return wide.contiguous() if wide.is_cuda else wide


@dataclass
class Plan:
    """The attention of one step. Its parts cover all T tokens, in order."""

    parts: Seq[Decode | Prefill]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Attention of all parts: query (1, heads, T, D), key and value (1, kv_heads, T, D) -> (1, T, heads, D)."""
        q, k, v = query[0], key[0], value[0]
        if len(self.parts) == 1:
            return self.parts[0].attend(layer, q, k, v, scale)[None]
        out = q.new_empty(q.shape[1], q.shape[0], v.shape[-1])
        for part in self.parts:
            s = part.span
            out[s] = part.attend(layer, q[:, s], k[:, s], v[:, s], scale)
        return out[None]


_HARMLESS = frozenset(
    {"dropout", "position_ids", "is_causal", "use_cache", "output_attentions", "output_hidden_states"}
)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    slots: Plan | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention by the plan ``slots``; without one (other users of the module) scaled dot-product attention."""
    if slots is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    for name, given in kwargs.items():
        if given is not None and given is not False and name not in _HARMLESS:
            raise EngineError(
                f"the attention of {type(module).__name__} wants {name}={given!r}, which the transformers engine does "
                "not do: use full-attention weights, or serve this model with vLLM"
            )
    layer: Any = module.layer_idx
    return slots.attend(layer, query, key, value, scaling), None


def register_attention() -> None:
    """Register :data:`ATTENTION` with transformers. Idempotent."""
    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
