"""Keys and values of ended sequences, kept for the prompts that begin with the same ids.

Blocks of :data:`BLOCK` tokens form a tree: a block is found by its parent and its ids, so what is found was computed
from exactly these ids, by the weights that the root stands for. Branches share the blocks before they part.

Invariant: a block is never older than its children (whoever uses a child uses its parents after it), so the
oldest block can always go.
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
    """``ids`` as bytes, four each."""
    return array("i", ids).tobytes()


_STRIDE = BLOCK * array("i").itemsize


@dataclass(frozen=True, slots=True)
class _Block:
    id: int
    root: int
    kv: torch.Tensor
    """(layers, 2, kv_heads, BLOCK, head_dim)"""


class PrefixStore:
    """Blocks, least recently used first. Not safe for threads: one worker owns it."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[_Key, _Block] = OrderedDict()
        self._ids = itertools.count(1)

    @property
    def tokens(self) -> int:
        """How many tokens are kept."""
        return BLOCK * len(self._blocks)

    def root(self) -> int:
        """A new root: for one set of weights."""
        return next(self._ids)

    def match(self, root: int, ids: bytes, limit: int) -> list[torch.Tensor]:
        """The blocks that ``ids`` (see :func:`packed`) begins with, of at most ``limit`` tokens together."""
        found, keys = self._walk(root, ids, limit // BLOCK)
        self._touch(keys)
        return [block.kv for block in found]

    def add(self, root: int, ids: bytes, kv: torch.Tensor, length: int) -> None:
        """Keep the full blocks among the first ``length`` tokens of ``kv`` (layers, 2, kv_heads, T, head_dim)."""
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
        """Let the oldest go until at most ``tokens`` tokens are kept."""
        while self.tokens > max(0, tokens):
            self._blocks.popitem(last=False)

    def drop(self, root: int) -> None:
        """Forget what the weights of ``root`` computed."""
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
