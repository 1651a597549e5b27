"""Merge LoRA adapters in a checkpoint of verl, which stores them under peft's names, into plain weights.

Invariant: afterwards the folder holds one model in the format of transformers, with the adapters merged.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

__all__ = ["merge_adapters"]

_BEFORE, _BASE, _DOWN, _UP = "base_model.model.", ".base_layer.", ".lora_A.default.", ".lora_B.default."


def merge_adapters(folder: Path, scale: float) -> None:
    """Replace the weights in ``folder`` by merged ones: W + scale * B A for each layer with an adapter. ``scale`` is
    alpha / rank."""
    files = sorted(folder.glob("*.safetensors"))
    given: dict[str, torch.Tensor] = {}
    for file in files:
        given |= load_file(file)
    made: dict[str, torch.Tensor] = {}
    for name, weight in given.items():
        if _DOWN in name or _UP in name:
            continue
        plain = name.removeprefix(_BEFORE)
        if _BASE in name and name.endswith(".weight"):
            down, up = (given[name.replace(_BASE, part)].float() for part in (_DOWN, _UP))
            weight = (weight.float() + scale * (up @ down)).to(weight.dtype)
        made[plain.replace(_BASE, ".")] = weight.contiguous()
    for file in (*files, *folder.glob("*.safetensors.index.json")):
        file.unlink()
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
