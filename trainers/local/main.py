"""One training run of the local trainer, from its configuration to its report.

Invariant: the same call on the same folder resumes the run, however the last call ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from clawgym.engines.folders import load_config
from clawgym.engines.load import sees
from clawgym.errors import TrainingError
from clawgym.registry import did_you_mean, trainers
from clawgym.trainers.common.checkpoints import Progress
from clawgym.trainers.common.run import Run
from clawgym.trainers.common.splits import load_splits
from clawgym.trainers.common.start_model import base_of_adapter, given_model
from clawgym.trainers.common.tracking import View, on_terminal
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.local.grpo import train_grpo
from clawgym.trainers.local.sft import train_sft

__all__ = ["plan", "train"]

_METHODS = {"rl": train_grpo, "sft": train_sft}


@trainers.register("local")
async def train(
    config: TrainConfig,
    out: Path,
    method: str = "rl",
    view: View | None = None,
    stop: asyncio.Event | None = None,
) -> Progress:
    """Trains in this process, on a CPU or one GPU, by ``rl`` or ``sft``.

    See :class:`~clawgym.trainers.protocols.Trainer`. Also raises :class:`~clawgym.errors.TrainingError` for another
    ``method``, and :class:`~clawgym.errors.RunFolderError` for the folder of another run."""
    _check(method)
    if config.compute.threads is not None:
        torch.set_num_threads(config.compute.threads)
    splits = await asyncio.to_thread(load_splits, config.tasks, config.agent)
    with Run.open(out, config, method, splits, view or on_terminal()) as run:
        return await _METHODS[method](config, run, splits, stop=stop or asyncio.Event())


def _check(method: str) -> None:
    if method not in _METHODS:
        raise TrainingError(f"there is no method {method!r}.{did_you_mean(method, _METHODS)} Choose rl or sft")


def plan(config: TrainConfig, method: str, out: Path) -> Mapping[str, Any]:
    """What :func:`train` would do, without doing it: sizes of the splits, steps, and an estimate of memory in bytes
    (docs/results/training.md compares it with measurements)."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    if config.trainer == "local":
        _check(method)
    splits = load_splits(config.tasks, config.agent)
    given = given_model(config, weights=False)
    if given is None:
        about: Any = config.model.scratch
        layers, hidden, inner, vocab = about.layers, about.hidden, 3 * about.hidden, 2048
        heads = (2 * about.heads + 2 * about.kv_heads) * about.head_dim
        weights = layers * hidden * (heads + 9 * hidden) + vocab * hidden
        kv = 2 * about.kv_heads * about.head_dim * layers
        window = config.model.context_window or about.context_window
    else:
        folder = base_of_adapter(given, weights=False)
        shape = load_config(folder)
        auto: Any = AutoModelForImageTextToText if sees(folder) else AutoModelForCausalLM
        with init_empty_weights():
            made = auto.from_config(shape, trust_remote_code=False)
        made.tie_weights()  # from_config does not tie weights on the meta device
        weights = sum(p.numel() for p in made.parameters())
        text = shape.get_text_config()
        layers, hidden, vocab = text.num_hidden_layers, text.hidden_size, text.vocab_size
        inner = getattr(text, "intermediate_size", None) or 4 * hidden
        head = getattr(text, "head_dim", None) or hidden // text.num_attention_heads
        kv = 2 * text.num_key_value_heads * head * layers
        window = config.model.context_window or text.max_position_embeddings
    size = 4 if config.model.dtype == "float32" else 2
    bytes_each = {"4bit": 0.55, "8bit": 1.0, None: float(size)}[config.model.quantize]
    trained = weights
    if config.model.lora is not None:  # two thin matrices for each of seven layers of about hidden x 2 hidden
        trained = layers * len(config.model.lora.targets) * config.model.lora.rank * 3 * hidden
    # Bytes per trained weight: a gradient, two moments, and a float32 copy if the weight is in lower precision.
    # Adapters are always in float32.
    step = 12 if size == 4 or config.model.lora else size + 12
    tokens = max(config.compute.micro_tokens, config.model.context_window or 0)  # a sequence is never cut
    layer = 24 * hidden + 5 * inner  # values per token that a layer keeps for the backward pass
    kept = layers * hidden + layer if config.compute.checkpointing else layers * layer
    memory = {
        "weights of the policy": weights * bytes_each,
        "weights of the engine": (trained if config.model.lora else weights) * size,
        "gradients and AdamW": trained * step,
        "activations of a micro-batch": tokens * kept * size,
        "logits": min(2**24, tokens * vocab) * 4 * 6,
        "keys and values of rollouts": min(2**18, config.rollout.concurrency * min(4096, window)) * kv * size,
    }
    if config.compute.vllm:  # both are in the memory of the server
        del memory["weights of the engine"], memory["keys and values of rollouts"]
    if config.trainer == "verl":
        # Per rank. verl shards weights in float32; the engine holds them in the type that it computes in.
        ranks, engine = config.verl.nodes * config.verl.ranks, weights * size / config.verl.tensor_parallel
        memory |= {
            "weights of the policy": weights * 4 / ranks,
            "weights of the engine": engine,
            "gradients and AdamW": trained * 12 / ranks,
        }
        if config.verl.mode == "separate_async":  # the engine has separate GPUs
            del memory["weights of the engine"], memory["keys and values of rollouts"]
    if config.algorithm.kl and config.model.lora is None:
        memory["weights of the initial policy"] = weights * size
    sizes = {name: len(getattr(splits, name)) for name in ("demonstrations", "train", "validation", "heldout")}
    return {
        "method": method,
        "out": str(out),
        "device": config.compute.device or ("cuda" if torch.cuda.is_available() else "cpu"),
        "weights": weights,
        "trained": trained,
        "tasks": sizes,
        "left_out": dict(splits.left_out),
        "steps": config.sft.steps if method == "sft" else config.budget.steps,
        "minutes": None if method == "sft" else config.budget.minutes,
        "ranks": config.verl.nodes * config.verl.ranks if config.trainer == "verl" else None,
        "episodes_a_step": None if method == "sft" else config.rollout.groups * config.rollout.group_size,
        "sandboxes_at_once": config.rollout.concurrency,
        "memory_bytes": {name: int(value) for name, value in memory.items()},
    }
