"""Prefix cache: keys and values of finished sequences, reused by prompts that start with the same ids.

Blocks of :data:`BLOCK` tokens form a tree. A block is found by its parent and its ids, so it was computed from exactly
these ids, with the weights of the root. Branches share their common prefix.

Invariant: no block is older than its children, as using a child also uses its parents afterwards. So the oldest block
can always be removed.
"""

from __future__ import annotations

import itertools
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["BLOCK", "PrefixStore", "packed"]

BLOCK = 16
_Key = tuple[int, bytes]


def packed(ids: Sequence[int]) -> bytes:
    """``ids`` as bytes, four per id."""
    return array("i", ids).tobytes()


_STRIDE = BLOCK * array("i").itemsize


@dataclass(frozen=True, slots=True)
class _Block:
    id: int
    root: int
    kv: torch.Tensor
    """(layers, 2, kv_heads, BLOCK, head_dim)"""


class PrefixStore:
    """Blocks, least recently used first. Not thread-safe: it belongs to one worker."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[_Key, _Block] = OrderedDict()
        self._ids = itertools.count(1)

    @property
    def tokens(self) -> int:
        """Number of cached tokens."""
        return BLOCK * len(self._blocks)

    def root(self) -> int:
        """A new root, for one version of the weights."""
        return next(self._ids)

    def match(self, root: int, ids: bytes, limit: int) -> list[torch.Tensor]:
        """The cached blocks at the start of ``ids`` (see :func:`packed`), at most ``limit`` tokens."""
        found, keys = self._walk(root, ids, limit // BLOCK)
        self._touch(keys)
        return [block.kv for block in found]

    def add(self, root: int, ids: bytes, kv: torch.Tensor, length: int) -> None:
        """Cache the full blocks of the first ``length`` tokens of ``kv`` (layers, 2, kv_heads, T, head_dim)."""
        found, keys = self._walk(root, ids, length // BLOCK)
        parent = found[-1].id if found else root
        for index in range(len(found), length // BLOCK):
            block = _Block(next(self._ids), root, kv[:, :, :, index * BLOCK : (index + 1) * BLOCK].clone())
            key = (parent, ids[index * _STRIDE : (index + 1) * _STRIDE])
            self._blocks[key] = block
            keys.append(key)
            parent = block.id
        self._touch(keys)

    def trim(self, tokens: int) -> None:
        """Remove the oldest blocks until at most ``tokens`` tokens are cached."""
        while self.tokens > max(0, tokens):
            self._blocks.popitem(last=False)

    def drop(self, root: int) -> None:
        """Remove all blocks below ``root``."""
        for key in [k for k, block in self._blocks.items() if block.root == root]:
            del self._blocks[key]

    def clear(self) -> None:
        self._blocks.clear()

    def _walk(self, root: int, ids: bytes, most: int) -> tuple[list[_Block], list[_Key]]:
        found: list[_Block] = []
        keys: list[_Key] = []
        parent = root
        for index in range(most):
            key = (parent, ids[index * _STRIDE : (index + 1) * _STRIDE])
            block = self._blocks.get(key)
            if block is None:
                break
            found.append(block)
            keys.append(key)
            parent = block.id
        return found, keys

    def _touch(self, keys: list[_Key]) -> None:
        for key in reversed(keys):
            self._blocks.move_to_end(key)
