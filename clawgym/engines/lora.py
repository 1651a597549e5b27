"""LoRA adapters, several in one step.

LoRA (Hu et al. 2021, arXiv:2106.09685, eq. 3) adds scale * B(A(x)) to a linear layer's W(x); scale is alpha / r, or
alpha / sqrt(r) for rank-stabilised adapters. Each token of a step may belong to another adapter: the base weights run
once over all tokens, and a hook on each adapted layer adds the term of each adapter to its tokens.

A loaded adapter never changes: replacing it loads another one under the same name, and requests that use the old one
keep it.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from clawgym.engines.folders import read_settings
from clawgym.errors import EngineError

__all__ = ["Adapter", "AdapterHooks", "adapter_files", "add_adapter", "read_adapter", "write_adapter"]

_KEY = re.compile(r"(?:base_model\.model\.)?(?P<layer>.+)\.lora_(?P<part>[AB])(?:\.[^.]+)?\.weight")


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """One version of one adapter."""

    name: str
    version: int
    root: int
    """Root of its keys and values in the prefix cache."""
    layers: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    """Name of the linear layer -> A (rank, in) and B (out, rank), where B includes the scale."""


def adapter_files(folder: Path) -> tuple[dict[str, torch.Tensor], Mapping[str, Any]]:
    """The state dict and the configuration of an adapter that ``peft`` saved. Raises
    :class:`~clawgym.errors.EngineError` if it cannot be read."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        config = read_settings(folder / "adapter_config.json")
        return load_file(folder / "adapter_model.safetensors"), config
    except (EngineError, OSError, SafetensorError) as error:
        raise EngineError(f"{folder}: not a LoRA adapter that peft saved ({error}): check the folder") from error


def read_adapter(
    source: str | Path | Mapping[str, torch.Tensor], config: Mapping[str, Any] | None, model: nn.Module
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Read a peft LoRA adapter for ``model``, as :attr:`Adapter.layers`.

    ``source`` is a folder that ``peft`` saved, or a state dict with its ``config`` (at least ``lora_alpha``). Raises
    :class:`~clawgym.errors.EngineError` for anything that would not be computed exactly as peft does.
    """
    where, state = "adapter", source
    if isinstance(state, str | Path):
        where, (state, config) = str(state), adapter_files(Path(state))
    if not isinstance(config, Mapping) or "lora_alpha" not in config:
        raise EngineError(f"{where}: its configuration has no lora_alpha: give the adapter_config.json it belongs to")
    for field, plain in _PLAIN.items():
        if config.get(field) not in plain:
            raise EngineError(
                f"{where}: {field}={config[field]!r} is not done here: train a plain LoRA adapter, or merge this one"
            )
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in state.items():
        match = _KEY.fullmatch(key)
        if match is None:
            raise EngineError(f"{where}: {key!r} is no LoRA weight of a linear layer: merge the adapter instead")
        parts.setdefault(match["layer"], {})[match["part"]] = tensor
    layers = {name: _fitting(where, name, given, config, model) for name, given in parts.items()}
    if not layers:
        raise EngineError(f"{where}: holds no weights: check the adapter")
    return layers


@torch.no_grad()
def add_adapter(model: nn.Module, layers: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Merge the ``layers`` of :func:`read_adapter` into the weights of ``model``.

    Raises :class:`~clawgym.errors.EngineError` for weights of 8 or 4 bits.
    """
    for name, (a, b) in layers.items():
        weight = model.get_submodule(name).weight
        if not isinstance(weight, torch.Tensor) or not weight.is_floating_point():
            raise EngineError(f"{name} is quantized: add the adapter to the model that it was made of")
        weight.add_((b.float() @ a.float()).to(weight.dtype))


def write_adapter(folder: Path, weights: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> None:
    """Write a peft state dict and its ``config`` to ``folder``, in peft's format."""
    from safetensors.torch import save_file

    save_file(
        {name: w.detach().contiguous() for name, w in weights.items()},
        folder / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )
    about = {name: sorted(value) if isinstance(value, set) else value for name, value in config.items()}
    (folder / "adapter_config.json").write_text(json.dumps(about, indent=2, default=str) + "\n", "utf-8")


_NOTHING: tuple[Any, ...] = (None, False, "", [], {})
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": (None, "LORA"),
    "bias": (None, "none"),
    "use_dora": _NOTHING,
    "modules_to_save": _NOTHING,
    "trainable_token_indices": _NOTHING,
    "target_parameters": _NOTHING,
    "alpha_pattern": _NOTHING,
    "fan_in_fan_out": _NOTHING,
    "lora_bias": _NOTHING,
    "layer_replication": _NOTHING,
    "alora_invocation_tokens": _NOTHING,
}
"""Settings of peft that change the computation, with the values that disable them."""


def _fitting(
    where: str, name: str, parts: Mapping[str, torch.Tensor], config: Mapping[str, Any], model: nn.Module
) -> tuple[torch.Tensor, torch.Tensor]:
    try:
        layer = model.get_submodule(name)
    except AttributeError:
        layer = None
    if not isinstance(layer, nn.Linear):
        raise EngineError(
            f"{where}: the model has no linear layer {name!r}: use the model that this adapter was trained for"
        )
    if set(parts) != {"A", "B"}:
        raise EngineError(f"{where}: {name} has only lora_{next(iter(parts))}: save the adapter again")
    a, b = parts["A"], parts["B"]
    rank = a.shape[0]
    if a.shape != (rank, layer.in_features) or b.shape != (layer.out_features, rank) or not rank:
        raise EngineError(
            f"{where}: {name} has A {tuple(a.shape)} and B {tuple(b.shape)}, but the layer maps {layer.in_features} "
            f"to {layer.out_features}: use the model that this adapter was trained for"
        )
    scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
    weight = layer.weight
    kind = weight.dtype if weight.is_floating_point() else torch.float32  # 8-bit or 4-bit weights
    # A copy: the caller may continue to train the given tensors.
    return (
        a.detach().to(weight.device, kind, copy=True),
        (b.detach().to(weight.device, torch.float32) * scale).to(kind),
    )


class _Running(threading.local):
    """The adapters of the forward pass that this thread runs, and the indices of their tokens."""

    adapters: Sequence[tuple[Adapter, torch.Tensor]] = ()


class AdapterHooks:
    """Hooks that apply adapters to the layers of one model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._hooked: dict[str, torch.utils.hooks.RemovableHandle] = {}
        self._running = _Running()

    def add(self, adapter: Adapter) -> None:
        """Hook the layers of ``adapter``; not during a forward pass."""
        for name in adapter.layers.keys() - self._hooked.keys():
            self._hooked[name] = self._model.get_submodule(name).register_forward_hook(self._adding(name))

    @contextlib.contextmanager
    def using(self, tokens: Mapping[Adapter, list[int]], device: torch.device) -> Iterator[None]:
        """Within this context, in this thread, the tokens at the given indices (0 to T - 1) run with these adapters,
        which were added, and all others without."""
        self._running.adapters = [(a, torch.tensor(places, device=device)) for a, places in tokens.items()]
        try:
            yield
        finally:
            self._running.adapters = ()

    def remove(self) -> None:
        for handle in self._hooked.values():
            handle.remove()
        self._hooked.clear()

    def _adding(self, name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...], torch.Tensor], torch.Tensor]:
        def hook(_: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            for adapter, places in self._running.adapters:
                pair = adapter.layers.get(name)
                if pair is not None:
                    a, b = pair
                    added = (args[0][0, places].to(a.dtype) @ a.T) @ b.T
                    output[0].index_add_(0, places, added.to(output.dtype))
            return output

        return hook
