"""The forward pass of the Llama family with fewer calls, for small models, whose time is dominated by call overhead.

It uses the weights of the transformers module in place, so training, weight updates and adapters work. It is used for
the classes listed here (the same operations, except fused normalisations), in float32, and in bfloat16 on a GPU, and
only if its results agree with the module when the model is loaded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import rms_norm

from clawgym.engines._kernels import Kernels, linear_in
from clawgym.engines._slots import Plan

__all__ = ["Lean"]

_FAMILY = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


class Lean:
    """Runs ``model``, a module of :data:`_FAMILY`."""

    def __init__(self, model: Any, window: int, kernels: Kernels = "float32") -> None:
        inner = model.model
        self._compute = linear_in(kernels)
        self._layers = list(inner.layers)
        self._embed, self._norm, self._head = inner.embed_tokens, inner.norm, model.lm_head
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
        cos, sin, linear = self._cos[positions], self._sin[positions], self._linear
        x = self._embed(ids)
        for number, layer in enumerate(self._layers):
            attention, mlp = layer.self_attn, layer.mlp
            h = _norm(layer.input_layernorm, x)
            q = linear(attention.q_proj, h).unflatten(-1, (-1, dim))
            k = linear(attention.k_proj, h).unflatten(-1, (-1, dim))
            v = linear(attention.v_proj, h).unflatten(-1, (-1, dim))
            if "q_norm" in attention._modules:
                q, k = _norm(attention.q_norm, q), _norm(attention.k_norm, k)
            heads = q.shape[1]
            both = torch.cat([q, k], 1)
            both = torch.addcmul(both * cos, torch.cat([both[..., half:], both[..., :half]], -1), sin).transpose(0, 1)
            out = plan.attend(number, both[None, :heads], both[None, heads:], v.transpose(0, 1)[None], self._scale)
            x = x + linear(attention.o_proj, out[0].flatten(1))
            h = _norm(layer.post_attention_layernorm, x)
            x = x + linear(mlp.down_proj, mlp.act_fn(linear(mlp.gate_proj, h)) * linear(mlp.up_proj, h))
        return linear(self._head, _norm(self._norm, x[ends]))

    def _linear(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if type(module) is nn.Linear and not module._forward_hooks:
            return self._compute(x, module._parameters["weight"], module._parameters["bias"])  # type: ignore[arg-type]
        return module(x[None])[0]  # a layer with an adapter


def _norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    weight = module._parameters["weight"]
    return rms_norm(x, weight.shape, weight, module.variance_epsilon)
