"""One training run on a service that speaks the Tinker API, from its configuration to its report.

Invariants: the run folder has the same files as with the local trainer, and its loop is the same. The same call on it
resumes from the last checkpoint, however the last call ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

from clawgym.engines.folders import model_folder
from clawgym.errors import EngineError, MissingDependency, TrainingError
from clawgym.registry import trainers
from clawgym.trainers.common.checkpoints import Progress
from clawgym.trainers.common.run import Run
from clawgym.trainers.common.splits import load_splits
from clawgym.trainers.common.tracking import View, on_terminal
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.local.grpo import train_from
from clawgym.trainers.tinker.settings import check_supported, lora_of
from clawgym.trainers.tinker.state import TinkerState, sdk

__all__ = ["train"]

_KEY = "TINKER_API_KEY"


@trainers.register("tinker")
async def train(
    config: TrainConfig,
    out: Path,
    method: str = "rl",
    view: View | None = None,
    stop: asyncio.Event | None = None,
    *,
    base_model: str | None = None,
) -> Progress:
    """Trains LoRA adapters on a service that speaks the Tinker API, by ``rl``.

    See :class:`~clawgym.trainers.protocols.Trainer`. The address and the key of the service are in the environment
    variables ``TINKER_BASE_URL`` and ``TINKER_API_KEY``. Also raises :class:`~clawgym.errors.TrainingError` for another
    ``method`` and without a key, :class:`~clawgym.errors.RunFolderError` for the folder of another run, and
    :class:`~clawgym.errors.MissingDependency` without the package ``tinker``.

    Args:
        base_model: the service's name of the model; ``model.path`` by default.
    """
    if method != "rl":
        raise TrainingError(
            f"trainer: tinker has no method {method!r}: use trainer: local, or set algorithm.imitation for rl"
        )
    check_supported(config)
    assert config.model.path is not None
    if not (key := os.environ.get(_KEY)):
        raise TrainingError(f"trainer: tinker needs the key of the service: set the environment variable {_KEY}")
    try:
        tinker = sdk()
    except ImportError as error:
        raise MissingDependency(f"trainer: tinker needs the package tinker ({error}): pip install tinker") from error
    try:
        folder = await asyncio.to_thread(model_folder, config.model.path, weights=False)
    except EngineError as error:
        raise TrainingError(f"model.path {error}") from error
    check_supported(config, folder)
    splits = await asyncio.to_thread(load_splits, config.tasks, config.agent)
    model, lora = base_model or config.model.path, lora_of(config.model)
    with Run.open(out, config, method, splits, view or on_terminal(), stop) as run:
        service, status = tinker.ServiceClient(api_key=key), "errored"
        try:
            load = TinkerState.load
            state = await asyncio.to_thread(load, config, run.path, service, model, folder, lora)
            progress = await train_from(state, config, run, splits)
            status = "success"
            return progress
        finally:
            with contextlib.suppress(Exception):  # a session that is not closed ends by itself
                await asyncio.to_thread(lambda: service.close(status).result())
