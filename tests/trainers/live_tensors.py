"""Count the bytes of the tensors that exist, by watching every operation of torch."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["LiveTensors"]


class LiveTensors(TorchDispatchMode):
    """While it is entered, every storage that an operation makes is counted until it is freed.

    A storage that several tensors share counts once. What a kernel allocates and frees inside is not seen."""

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.bytes = 0
        """Of the tensors that exist."""
        self.peak = 0
        self._seen: dict[int, Any] = {}
        for tensor in known:
            self._add(tensor)

    def restart(self) -> int:
        """Measure the peak from here on. Returns the bytes that exist now."""
        self.peak = self.bytes
        return self.bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf)
        return made

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._seen:
            return
        size = storage.nbytes()
        self._seen[key] = weakref.finalize(storage, self._free, key, size)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)

    def _free(self, key: int, size: int) -> None:
        del self._seen[key]
        self.bytes -= size
