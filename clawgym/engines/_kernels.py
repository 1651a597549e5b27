"""Linear layers computed in lower precision, for sampling on a CPU.

The weights stay float32, and so does what is added up from layer to layer. A rounded copy of a weight is made when it
is first used, and again after the weight has changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.nn.functional import linear, silu

__all__ = ["Kernel", "Kernels", "Weights", "adds_int8_exactly", "kernel_of"]

Kernels = Literal["float32", "bfloat16", "int8"]
"""``int8``: the weights of each output channel, and the activations of each token, are multiples of 1/127 of the
largest of them."""
Weights = tuple[torch.Tensor, torch.Tensor | None]
"""Weight (out, in) and bias (out,) of a linear layer."""


def kernel_of(kernels: Kernels) -> Kernel:
    """What computes linear layers."""
    return {"float32": Kernel, "bfloat16": _BFloat16, "int8": _Int8}[kernels]()


class Kernel:
    """Computes linear layers, in the dtype of their weights."""

    def operand(self, x: torch.Tensor) -> Any:
        """Activations (T, in) as :meth:`linear` takes them, for any number of layers."""
        return x

    def linear(self, operand: Any, weights: Weights) -> torch.Tensor:
        """(T, out), in the dtype of the weights."""
        return linear(operand, *weights)

    def gated(self, operand: Any, gate: Weights, up: Weights, down: Weights) -> torch.Tensor:
        """(T, out), in the dtype of the weights: the layer ``down`` of silu(gate) * up."""
        product = silu(self.linear(operand, gate), inplace=True).mul_(self.linear(operand, up))
        return self.linear(self.operand(product), down)


class _Rounded(Kernel):
    """``_make`` returns a function of the activations for a layer; it is kept until the weight changes."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[int, Callable[..., torch.Tensor]]] = {}

    def _of(self, weights: Weights) -> Callable[..., torch.Tensor]:
        weight, bias = weights
        version, run = self._made.get(id(weight), (-1, None))
        if run is None or version != weight._version:
            run = self._make(weight.detach(), None if bias is None else bias.detach())
            self._made[id(weight)] = weight._version, run
        return run

    def _make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[..., torch.Tensor]:
        raise NotImplementedError


class _BFloat16(_Rounded):
    def operand(self, x: torch.Tensor) -> Any:
        return x.bfloat16()

    def linear(self, operand: Any, weights: Weights) -> torch.Tensor:
        return self._of(weights)(operand).float()

    def gated(self, operand: Any, gate: Weights, up: Weights, down: Weights) -> torch.Tensor:
        # Both factors and the product are rounded as well: conversions would take longer than the products of matrices.
        product = self._of(gate)(operand, "swish").mul_(self._of(up)(operand))
        return self.linear(product, down)

    def _make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[..., torch.Tensor]:
        rounded = weight.bfloat16()
        added = None if bias is None else bias.bfloat16()
        if torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported():
            # linear would bring the weights into the order of the matrix instructions again in each call.
            ordered, run = torch.ops.mkldnn._reorder_linear_weight(rounded, None), torch.ops.mkldnn._linear_pointwise
            return lambda x, then="none": run(x, ordered, added, then, [], "")

        def plain(x: torch.Tensor, then: str = "none") -> torch.Tensor:
            out = linear(x, rounded, added)
            return silu(out, inplace=True) if then == "swish" else out

        return plain


class _Int8(_Rounded):
    def operand(self, x: torch.Tensor) -> Any:
        """The numbers in int8, and the step of each row."""
        own = x.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
        return (x / own).round().to(torch.int8), own

    def linear(self, operand: Any, weights: Weights) -> torch.Tensor:
        return self._of(weights)(*operand)

    def _make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[..., torch.Tensor]:
        scales = weight.abs().amax(1).clamp(min=1e-12) / 127
        rounded = (weight / scales[:, None]).round().to(torch.int8).t()

        def run(x: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
            sums = torch.ops.aten._int_mm(x, rounded)
            return sums * own * scales if bias is None else torch.addcmul(bias, sums * own, scales)

        return run


def adds_int8_exactly() -> bool:
    """False without VNNI instructions: there, oneDNN adds pairs of products in 16 bits, which overflow."""
    largest = torch.full((32, 64), 127, dtype=torch.int8)
    return bool((torch.ops.aten._int_mm(largest, largest.t()) == 64 * 127**2).all())
