"""Linear layers computed in lower precision, for sampling on a CPU.

The weights stay float32, and so does everything between the layers. A rounded copy of a weight is made when it is first
used, and again after the weight has changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch.nn.functional import linear

__all__ = ["Kernels", "adds_int8_exactly", "linear_in"]

Kernels = Literal["float32", "bfloat16", "int8"]
"""``int8``: the weights of each output channel, and the activations of each token, are multiples of 1/127 of the
largest of them."""
Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Activations (T, in), weight (out, in) and bias (out,) -> (T, out), all float32."""


def linear_in(kernels: Kernels) -> Linear:
    """A function that computes a linear layer."""
    return {"float32": linear, "bfloat16": _Rounded(_bfloat16), "int8": _Rounded(_int8)}[kernels]


class _Rounded:
    """``make(weight, bias)`` returns a function of the activations; it is kept until the weight changes."""

    def __init__(self, make: Callable[[torch.Tensor, torch.Tensor | None], Callable[[torch.Tensor], torch.Tensor]]):
        self._make = make
        self._made: dict[int, tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = {}

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        version, run = self._made.get(id(weight), (-1, None))
        if run is None or version != weight._version:
            run = self._make(weight.detach(), bias)
            self._made[id(weight)] = weight._version, run
        return run(x)


def adds_int8_exactly() -> bool:
    """False without VNNI instructions: there, oneDNN adds pairs of products in 16 bits, which overflow."""
    largest = torch.full((32, 64), 127, dtype=torch.int8)
    return bool((torch.ops.aten._int_mm(largest, largest.t()) == 64 * 127**2).all())


def _bfloat16(weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
    rounded = weight.bfloat16()
    added = None if bias is None else bias.detach().bfloat16()
    if not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return lambda x: linear(x.bfloat16(), rounded, added).float()
    # linear would bring the weights into the order of the matrix instructions again in each call.
    ordered = torch.ops.mkldnn._reorder_linear_weight(rounded, None)
    run = torch.ops.mkldnn._linear_pointwise
    return lambda x: run(x.bfloat16(), ordered, added, "none", [], "").float()


def _int8(weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
    scales = weight.abs().amax(1).clamp(min=1e-12) / 127
    rounded = (weight / scales[:, None]).round().to(torch.int8).t()

    def run(x: torch.Tensor) -> torch.Tensor:
        own = x.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
        sums = torch.ops.aten._int_mm((x / own).round().to(torch.int8), rounded)
        return sums * own * scales if bias is None else torch.addcmul(bias.detach(), sums * own, scales)

    return run
