"""Estimate the memory that a training run needs, from the shape of its model. Nothing is loaded.

The figures are sums of tensors. A GPU needs more: about 1 GB for CUDA itself, and what its allocator cannot reuse.
tests/trainers/local/test_memory.py compares them with the tensors of real updates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from clawgym.engines.folders import load_config
from clawgym.engines.load import sees
from clawgym.engines.transformers import KEPT_TOKENS, memory_of_device
from clawgym.trainers.common.policy import MAX_LOGITS
from clawgym.trainers.config import Lora, Model, TrainConfig

__all__ = ["MemoryEstimate", "ModelShape", "activations", "estimate"]

_KEPT, _ROLLOUTS = "keys and values of rollouts", "rollouts"
"""An item, and the phase that it is limited to where an engine in this process frees it before an update."""
_NF4 = 0.5 + 4 / 64
"""Bytes of a weight: four bits, and a float32 scale for each block of 64."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder."""

    weights: int
    """Number of weights."""
    linear: int
    """Number of weights of the linear layers, without the head. These can be quantized."""
    adapters: int
    """Number of weights of the LoRA adapters; 0 without."""
    adapted: int
    """Width of all inputs of adapted layers of one decoder layer."""
    layers: int
    hidden: int
    inner: int
    """Width of the feed-forward part."""
    query: int
    """Width of all query heads together."""
    key: int
    """Width of all key heads together."""
    vocab: int

    @classmethod
    def of(cls, model: Model, folder: Path | None) -> ModelShape:
        """The shape of the model in ``folder``, of which only the configuration is read; None: ``model.scratch``."""
        from accelerate import init_empty_weights
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Qwen3Config

        auto: Any = AutoModelForCausalLM
        if folder is None:
            about = model.scratch
            config: Any = Qwen3Config(
                vocab_size=2048,  # the tokenizer is made later
                hidden_size=about.hidden,
                intermediate_size=3 * about.hidden,
                num_hidden_layers=about.layers,
                num_attention_heads=about.heads,
                num_key_value_heads=about.kv_heads,
                head_dim=about.head_dim,
                max_position_embeddings=about.context_window,
                tie_word_embeddings=True,
            )
        else:
            config = load_config(folder)
            auto = AutoModelForImageTextToText if sees(folder) else auto
        with init_empty_weights():
            made = auto.from_config(config, trust_remote_code=False)
        made.tie_weights()  # from_config does not tie weights on the meta device
        text = config.get_text_config()
        head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        adapted = _adapted(made, model.lora)
        return cls(
            weights=sum(p.numel() for p in made.parameters()),
            linear=sum(
                layer.weight.numel()
                for name, layer in made.named_modules()
                if isinstance(layer, torch.nn.Linear) and name != "lm_head"
            ),
            adapters=sum(rank * (one.in_features + one.out_features) for rank, one in adapted),
            adapted=sum(one.in_features for _, one in adapted) // text.num_hidden_layers,
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            inner=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
            query=text.num_attention_heads * head,
            key=text.num_key_value_heads * head,
            vocab=text.vocab_size,
        )


def _adapted(module: torch.nn.Module, lora: Lora | None) -> list[tuple[int, torch.nn.Linear]]:
    """The rank and the layer of each LoRA adapter."""
    if lora is None:
        return []
    return [
        (lora.rank, layer)
        for name, layer in module.named_modules()
        if isinstance(layer, torch.nn.Linear) and name.rpartition(".")[2] in lora.targets
    ]


@dataclass(frozen=True)
class MemoryEstimate:
    """What a run needs at its peak."""

    items: Mapping[str, int]
    """Bytes by item."""
    phases: Mapping[str, Mapping[str, int]]
    """The items that exist in a phase only. All other items exist during the whole run."""

    @property
    def peaks(self) -> dict[str, int]:
        """Bytes of all items that exist in each phase."""
        passing = {name for part in self.phases.values() for name in part}
        always = sum(size for name, size in self.items.items() if name not in passing)
        return {phase: always + sum(part.values()) for phase, part in self.phases.items()}

    @property
    def update(self) -> int:
        """Bytes at the peak of an update, without keys and values of rollouts."""
        most = max(size for phase, size in self.peaks.items() if phase != _ROLLOUTS)
        return most if _ROLLOUTS in self.phases else most - self.items.get(_KEPT, 0)


def estimate(shape: ModelShape, config: TrainConfig) -> MemoryEstimate:
    """The memory of a run of ``config`` with the local trainer, or of one rank of the trainer ``verl``.

    Vision models need more: what they make of pixels is left out."""
    size = 4 if config.model.dtype == "float32" else 2
    cached = 2 if config.compute.kernels == "bfloat16" else size
    lora = config.model.lora is not None
    few = shape.linear if config.model.quantize else 0
    trained = shape.adapters or shape.weights
    own = 4 if lora else size  # peft keeps adapters in float32
    copies = own < 4
    kept, layer = activations(shape, config, checkpointing=config.compute.checkpointing)
    device = torch.device(config.compute.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    sizes: dict[str, float] = {
        "weights of the policy": (shape.weights - few) * size + few * _NF4 + shape.adapters * own,
        "weights of the engine": trained * size,
        "rounded weights of the engine": shape.weights
        * {"float32": 0, "bfloat16": 2, "int8": 1}[config.compute.kernels],
        "weights of the initial policy": shape.weights * size if config.algorithm.kl and not lora else 0,
        "float32 copies of the weights": trained * 4 * copies,
        "moments of AdamW": trained * 8,
        _KEPT: _kept_tokens(shape, size, cached, device) * _token_bytes(shape, cached),
        "gradients": trained * own,
        "float32 gradients": trained * 4 * copies,
        "activations that are kept": kept,
        "a layer in the backward pass": layer,
        "logits": min(MAX_LOGITS, _tokens(config) * shape.vocab) * 4 * 5,  # with log-probs and their gradients
    }
    elsewhere = bool(config.compute.vllm or config.compute.sglang)
    if config.trainer == "verl":
        # verl shards weights, gradients and moments in float32; the engine holds weights in the type it computes in.
        ranks = config.verl.nodes * config.verl.ranks
        sizes |= {
            "weights of the policy": (shape.weights + shape.adapters) * 4 / ranks,
            "weights of the engine": shape.weights * size / config.verl.tensor_parallel,
            "float32 copies of the weights": 0,
            "moments of AdamW": trained * 8 / ranks,
            "gradients": trained * 4 / ranks,
            "float32 gradients": 0,
            # Embeddings and head, and two layers at a time.
            "weights that are gathered": (shape.weights - shape.linear + 2 * shape.linear / shape.layers)
            * size
            * (ranks > 1),
        }
        elsewhere = config.verl.mode == "separate_async"  # the engine has GPUs of its own
    if elsewhere:
        sizes |= {"weights of the engine": 0, _KEPT: 0}
    items = {name: int(bytes_) for name, bytes_ in sizes.items() if bytes_}
    phases = {
        "the loss": ("gradients", "activations that are kept", "logits"),
        "the backward pass": ("gradients", "activations that are kept", "a layer in the backward pass"),
        "the optimizer's step": ("float32 gradients" if "float32 gradients" in items else "gradients",),
    }
    if (config.trainer, device.type, config.rollout.staleness, elsewhere) == ("local", "cpu", 0, False):
        phases[_ROLLOUTS] = (_KEPT,)  # freed before an update
    return MemoryEstimate(items, {phase: {name: items[name] for name in names} for phase, names in phases.items()})


def activations(shape: ModelShape, config: TrainConfig, *, checkpointing: bool) -> tuple[int, int]:
    """Bytes that the forward pass over one micro-batch keeps, and that the backward pass of one layer needs more.

    The terms are the tensors that autograd saves in a layer of Qwen3 in transformers: inputs of normalisations (in
    float32), of linear layers and of the activation function; queries, keys and values; the attention mask."""
    h, q, k, i, tokens = shape.hidden, shape.query, shape.key, shape.inner, _tokens(config)
    if config.model.dtype == "float32":
        size = 4
        layer = 16 * h + 12 * (q + k) + 16 * i if shape.adapters else 24 * h + 16 * (q + k) + 16 * i
    else:  # each adapter has a float32 copy of its input
        size = 2
        layer = 8 * h + 8 * (q + k) + 6 * i + 4 * shape.adapted if shape.adapters else 16 * h + 10 * (q + k) + 8 * i
    row = min(config.compute.row_tokens, tokens)
    layer += size * (2 * (q - k) + row)  # in packed rows, keys and values are repeated for each query head
    kept, again = (size * h, layer) if checkpointing else (layer, 0)
    return tokens * (shape.layers * kept + row), tokens * (again + 3 * size * i)


def _tokens(config: TrainConfig) -> int:
    """Most tokens of a micro-batch. A sequence is never cut."""
    return max(config.compute.micro_tokens, config.model.context_window or 0)


def _token_bytes(shape: ModelShape, cached: int) -> int:
    """Bytes of one token's keys and values, of ``cached`` bytes a number."""
    return 2 * shape.key * shape.layers * cached


def _kept_tokens(shape: ModelShape, size: int, cached: int, device: torch.device) -> int:
    """Most tokens whose keys and values the engine in this process keeps: it fills what it is given.

    It takes a quarter of the free memory of the device, which is only known for a device of this machine."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return KEPT_TOKENS
    free = memory_of_device(device) - (shape.weights * size if device.type == "cuda" else 0)
    return max(1, min(KEPT_TOKENS, free // 4 // _token_bytes(shape, cached)))
