"""The forward pass of the Llama family with fewer calls, for small models, whose time is dominated by call overhead.

It uses the weights of the transformers module in place, so training, weight updates and adapters work. It is used for
the classes listed here (the same operations, except fused normalisations), in float32, and in bfloat16 on a GPU, and
only if its results agree with the module when the model is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import rms_norm
from transformers.activations import SiLUActivation

from clawgym.engines._kernels import Kernels, Weights, kernel_of
from clawgym.engines._slots import Plan

__all__ = ["Lean"]

_SILU = (nn.SiLU, SiLUActivation)
_FAMILY = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


class Lean:
    """Runs ``model``, a module of :data:`_FAMILY`."""

    def __init__(self, model: Any, window: int, kernels: Kernels = "float32") -> None:
        inner = model.model
        self._kernel = kernel_of(kernels)
        self._layers = list(inner.layers)
        self._embed, self._norm, self._head = inner.embed_tokens, inner.norm, model.lm_head
        self.kv_dtype = torch.bfloat16 if kernels == "bfloat16" else self._embed.weight.dtype
        """Of keys and values. Attention is computed in it."""
        attention = self._layers[0].self_attn
        self._head_dim: int = attention.head_dim
        self._scale: float = attention.scaling
        self.fixed = all(type(m) is nn.Linear for m in model.modules() if hasattr(m, "in_features"))
        """Whether all linear layers are plain, so that each call launches the same kernels."""
        device = self._embed.weight.device
        some = torch.zeros(1, 1, 1, device=device, dtype=self._embed.weight.dtype)
        cos, sin = inner.rotary_emb(some, torch.arange(window, device=device)[None])
        # Rotation swaps the halves and negates the first one: the sign is part of the table.
        half = self._head_dim // 2
        self._cos, self._sin = cos[0, :, None], torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)[:, None]

    @classmethod
    def of(cls, model: Any, window: int, kernels: Kernels = "float32") -> Lean | None:
        """A fast forward pass for ``model``; None if it is not supported."""
        weight = next(model.parameters())
        on_cpu = weight.device.type == "cpu"
        fits = weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and not on_cpu)
        if type(model).__name__ not in _FAMILY or not fits or (kernels != "float32" and not on_cpu):
            return None
        return cls(model, window, kernels)

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor, ends: torch.Tensor, plan: Plan) -> torch.Tensor:
        """A :data:`~clawgym.engines.load.Run`."""
        dim, half = self._head_dim, self._head_dim // 2
        cos, sin = self._cos[positions], self._sin[positions]
        low, high = sin[..., :half], sin[..., half:]
        x = self._embed(ids)
        for number, layer in enumerate(self._layers):
            attention = layer.self_attn
            projections = (attention.q_proj, attention.k_proj, attention.v_proj)
            q, k, v = (
                out.unflatten(-1, (-1, dim)) for out in self._linears(projections, _norm(layer.input_layernorm, x))
            )
            if "q_norm" in attention._modules:
                q, k = _norm(attention.q_norm, q), _norm(attention.k_norm, k)
            heads = q.shape[1]
            both = torch.cat([q, k], 1)
            turned = both * cos
            turned[..., :half].addcmul_(both[..., half:], low)
            turned[..., half:].addcmul_(both[..., :half], high)
            turned, v = turned.transpose(0, 1).to(self.kv_dtype), v.transpose(0, 1).to(self.kv_dtype)
            out = plan.attend(number, turned[None, :heads], turned[None, heads:], v[None], self._scale)
            x = x + self._linears([attention.o_proj], out[0].flatten(1))[0]
            x = x + self._mlp(layer.mlp, _norm(layer.post_attention_layernorm, x))
        return self._linears([self._head], _norm(self._norm, x[ends]))[0]

    def _mlp(self, mlp: Any, x: torch.Tensor) -> torch.Tensor:
        parts = [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        gate, up, down = (_plain(part) for part in parts)
        if gate and up and down and type(mlp.act_fn) in _SILU:
            return self._kernel.gated(self._kernel.operand(x), gate, up, down)
        both = self._linears(parts[:2], x)
        return self._linears(parts[2:], mlp.act_fn(both[0]) * both[1])[0]

    def _linears(self, modules: Sequence[nn.Module], x: torch.Tensor) -> list[torch.Tensor]:
        """Each of the layers of ``x``, in the dtype of the model."""
        operand, dtype = self._kernel.operand(x), self._embed.weight.dtype
        return [
            self._kernel.linear(operand, weights) if (weights := _plain(module)) else module(x[None].to(dtype))[0]
            for module in modules
        ]


def _plain(module: nn.Module) -> Weights | None:
    """The weights of a linear layer without an adapter."""
    if type(module) is nn.Linear and not module._forward_hooks:
        return module._parameters["weight"], module._parameters["bias"]  # type: ignore[return-value]
    return None


def _norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    weight = module._parameters["weight"]
    return rms_norm(x, weight.shape, weight, module.variance_epsilon)
