"""One training run of the local trainer, from its configuration to its report.

Invariant: the same call on the same folder resumes the run, however the last call ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from clawgym.errors import TrainingError
from clawgym.registry import did_you_mean, trainers
from clawgym.trainers.common.checkpoints import Progress
from clawgym.trainers.common.memory import ModelShape, activations, estimate
from clawgym.trainers.common.run import Run
from clawgym.trainers.common.splits import load_splits
from clawgym.trainers.common.start_model import base_of_adapter, given_model
from clawgym.trainers.common.tracking import View, on_terminal
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.local.grpo import train_grpo
from clawgym.trainers.local.prm import train_prm
from clawgym.trainers.local.sft import train_sft

__all__ = ["plan", "train"]

_METHODS = {"rl": train_grpo, "sft": train_sft, "prm": train_prm}


@trainers.register("local")
async def train(
    config: TrainConfig,
    out: Path,
    method: str = "rl",
    view: View | None = None,
    stop: asyncio.Event | None = None,
) -> Progress:
    """Trains in this process, on a CPU or one GPU, by ``rl``, ``sft`` or ``prm``.

    See :class:`~clawgym.trainers.protocols.Trainer`. Also raises :class:`~clawgym.errors.TrainingError` for another
    ``method``, and :class:`~clawgym.errors.RunFolderError` for the folder of another run."""
    _check(method)
    if config.compute.threads is not None:
        torch.set_num_threads(config.compute.threads)
    splits = await asyncio.to_thread(load_splits, config.tasks, config.agent)
    with Run.open(out, config, method, splits, view or on_terminal(), stop) as run:
        return await _METHODS[method](config, run, splits)


def _check(method: str) -> None:
    if method not in _METHODS:
        raise TrainingError(f"there is no method {method!r}.{did_you_mean(method, _METHODS)} Choose rl, sft or prm")


def plan(config: TrainConfig, method: str, out: Path) -> Mapping[str, Any]:
    """What :func:`train` would do, without doing it: sizes of the splits, steps, and an estimate of memory in bytes
    (docs/results/training.md compares it with measurements). Of other trainers than ``local`` and ``verl`` it is not
    known what they keep on this machine, so they have no such estimate."""
    if config.trainer == "local":
        _check(method)
    splits = load_splits(config.tasks, config.agent)
    given = given_model(config, weights=False)
    shape = ModelShape.of(config.model, None if given is None else base_of_adapter(given, weights=False))
    sizes = {name: len(getattr(splits, name)) for name in ("demonstrations", "train", "validation", "heldout")}
    about: dict[str, Any] = {
        "method": method,
        "out": str(out),
        "device": None,
        "weights": shape.weights,
        "trained": shape.adapters or shape.weights,
        "tasks": sizes,
        "left_out": dict(splits.left_out),
        "steps": config.budget.steps if method == "rl" else config.sft.steps,
        "minutes": config.budget.minutes if method == "rl" else None,
        "ranks": config.verl.nodes * config.verl.ranks if config.trainer == "verl" else None,
        "episodes_a_step": config.rollout.groups * config.rollout.group_size if method == "rl" else None,
        "sandboxes_at_once": config.rollout.concurrency,
        "memory_bytes": {},
        "peak_bytes": {},
        "activations_bytes": {},
    }
    if config.trainer not in ("local", "verl"):
        return {**about, "memory": f"not estimated for trainer {config.trainer}"}
    memory = estimate(shape, config)
    return {
        **about,
        "device": config.compute.device or ("cuda" if torch.cuda.is_available() else "cpu"),
        "memory_bytes": memory.items,
        "peak_bytes": memory.peaks,
        "activations_bytes": {
            f"{word} checkpointing": sum(activations(shape, config, checkpointing=word == "with"))
            for word in ("with", "without")
        },
    }
