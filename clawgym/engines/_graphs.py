"""Decoding as CUDA graphs: one launch for a step of a slab, where the forward pass has some hundred.

A graph computes every row of a slab over its whole capacity, so that its shapes never change. Rows without a sequence
compute something that nobody reads.

Invariant: a graph is used only with the keys, values and weights at the addresses for which it was recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from clawgym.engines._lean import Lean
from clawgym.engines._slots import Plan, Slab, WholeSlab
from clawgym.engines.load import Run

__all__ = ["DecodeGraphs"]

_WARM_UPS = 2
"""Libraries choose kernels and allocate workspaces in their first calls, which a graph must not record."""


@dataclass(frozen=True, slots=True)
class _Recorded:
    kv: torch.Tensor
    replay: Callable[[], Any]
    ids: torch.Tensor
    positions: torch.Tensor
    ends: torch.Tensor
    logits: torch.Tensor
    """(rows, vocabulary)"""


class DecodeGraphs:
    """The graphs of one model. Belongs to the thread that runs it."""

    def __init__(self, run: Lean, model: torch.nn.Module) -> None:
        self._run, self._model = run, model
        self._recorded: dict[int, _Recorded] = {}
        self._pool: Any = None
        self._places = self._addresses()

    @classmethod
    def of(cls, run: Run, model: torch.nn.Module, device: torch.device) -> DecodeGraphs | None:
        """The graphs of a forward pass; None if it cannot be recorded."""
        return cls(run, model) if isinstance(run, Lean) and run.fixed and device.type == "cuda" else None

    def logits(self, slab: Slab[Any], ids: list[int], positions: list[int]) -> torch.Tensor:
        """(N, vocabulary) logits after one more token for each of the N sequences of ``slab``; its keys and values are
        written."""
        one = self._recorded.get(slab.capacity)
        if one is None or one.kv is not slab.kv:
            one = self._recorded[slab.capacity] = self._record(slab)
        idle = [0] * (len(one.ids) - len(ids))
        one.ids.copy_(torch.tensor(ids + idle))
        one.positions.copy_(torch.tensor(positions + idle))
        one.replay()
        return one.logits[: len(ids)].clone()  # graphs share memory: the next one may overwrite it

    def check_weights(self) -> None:
        """Drop the graphs if weights have moved."""
        found = self._addresses()
        if found != self._places:
            self._recorded.clear()
            self._places = found

    def clear(self) -> None:
        """Free the memory of all graphs."""
        self._recorded.clear()

    def _addresses(self) -> tuple[int, ...]:
        return tuple(parameter.data_ptr() for parameter in self._model.parameters())

    def _record(self, slab: Slab[Any]) -> _Recorded:
        rows, device = slab.kv.shape[2], slab.kv.device
        self._recorded.pop(slab.capacity, None)
        ids = torch.zeros(rows, dtype=torch.long, device=device)
        # The recorded step writes where the next token of each row will be written again.
        lengths = [s.length for s in slab.sequences] + [0] * (rows - len(slab.sequences))
        positions = torch.tensor(lengths, device=device)
        ends = torch.arange(rows, device=device)

        def step() -> torch.Tensor:
            return self._run(ids, positions, ends, Plan([WholeSlab(slab, positions)]))

        replay, logits = self._capture(step, device)
        return _Recorded(slab.kv, replay, ids, positions, ends, logits)

    def _capture(
        self, step: Callable[[], torch.Tensor], device: torch.device
    ) -> tuple[Callable[[], Any], torch.Tensor]:
        """A function that does what ``step`` does, and its result, which it overwrites."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        aside = torch.cuda.Stream(device)
        aside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UPS):
                step()
        torch.cuda.current_stream(device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # A trainer in another thread may allocate meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=aside, capture_error_mode="thread_local"):
            logits = step()
        return graph.replay, logits
