"""What the Tinker API expresses of a configuration.

Invariant: unsupported settings raise an error that names them before anything starts.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from clawgym.engines.load import sees
from clawgym.errors import TrainingError
from clawgym.trainers.config import Model, TrainConfig
from clawgym.trainers.protocols import loss_of
from clawgym.trainers.traits import traits_of

__all__ = ["check_supported", "lora_of", "loss_settings"]

_ALPHA = 32
"""The service's alpha of LoRA; a client cannot set it."""
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_MLP = {"gate_proj", "up_proj", "down_proj"}
_LOSSES = ("ppo", "cispo")


def check_supported(config: TrainConfig, model: Path | None = None) -> None:
    """Raise :class:`~clawgym.errors.TrainingError` for settings that the API cannot express. With ``model``, its
    folder, check the model too."""
    about, lora = config.algorithm, config.model.lora
    local = "or use trainer: local"
    _refuse(
        (config.model.path is None, "model.scratch", "name a model of the service in model.path"),
        (lora is None, "model.lora", "left out: the service trains LoRA adapters only: set model.lora"),
        (
            lora is not None and lora.alpha != _ALPHA,
            "model.lora.alpha",
            f"the service has {_ALPHA}: set it to that, and scale optimizer.lr",
        ),
        (
            lora is not None and lora_of(config.model) is None,
            "model.lora.targets",
            "the service trains all layers of attention, of the MLPs, and lm_head: name whole kinds",
        ),
        (config.model.quantize, "model.quantize", f"leave it out, {local}"),
        (
            config.rollout.temperature != 1,
            "rollout.temperature",
            f"the service has log-probs at temperature 1: set it to 1, {local}",
        ),
        (about.loss not in _LOSSES, "algorithm.loss", f"choose {' or '.join(_LOSSES)}, {local}"),
        (about.dual_clip, "algorithm.dual_clip", f"leave it out, {local}"),
        (about.kl, "algorithm.kl", f"the losses of the service have no KL term: set it to 0, {local}"),
        (about.entropy, "algorithm.entropy", f"the losses of the service have no entropy term: set it to 0, {local}"),
        (
            traits_of(about.advantage).uses_values,
            "algorithm.advantage",
            f"{about.advantage} needs a critic: choose another of `clawgym list advantages`, {local}",
        ),
        (config.distillation.hints, "distillation.hints", f"set it to 0, {local}"),
        (model is not None and sees(model), "model.path", "for a vision model use trainer: local"),
    )


def _refuse(*cases: tuple[Any, str, str]) -> None:
    """Raise for the first of ``cases`` that holds: whether it does, the setting, and what to do."""
    for asked, setting, instead in cases:
        if asked:
            raise TrainingError(f"{setting}: not supported by trainer: tinker: {instead}")


def lora_of(model: Model) -> dict[str, Any] | None:
    """The arguments of ``create_lora_training_client``; None if the API cannot express ``model.lora``."""
    if model.lora is None:
        return None
    targets = set(model.lora.targets)
    kinds = {"train_attn": _ATTENTION, "train_mlp": _MLP, "train_unembed": {"lm_head"}}
    given = {name: layers <= targets for name, layers in kinds.items()}
    named = set[str]().union(*(layers for name, layers in kinds.items() if given[name]))
    return {"rank": model.lora.rank, **given} if targets == named else None


def loss_settings(config: TrainConfig) -> dict[str, float]:
    """The settings of the service's loss of the same name: bounds of the ratio."""
    given = loss_of(config.algorithm).keywords
    if config.algorithm.loss == "cispo":
        low, high = 0.0, given.get("cap", 5.0)
    else:
        low, high = 1 - given["clip_low"], 1 + given["clip_high"]
    if not math.isfinite(high):
        raise TrainingError("algorithm.loss_options: the bound of the ratio is not finite: set a number")
    return {"clip_low_threshold": low, "clip_high_threshold": high}
