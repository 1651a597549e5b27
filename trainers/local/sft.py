"""``clawgym train sft``: imitation of demonstrations, or of exported trajectories.

Invariant: ``best`` is the checkpoint with the best score on the validation split, in real sandboxes. The held-out split
is evaluated once, at the end.
"""

from __future__ import annotations

import asyncio
from functools import partial

from clawgym.offload import in_update_thread
from clawgym.pool import Pool
from clawgym.trainers.common.checkpoints import Progress
from clawgym.trainers.common.demonstrations import load_imitation_data
from clawgym.trainers.common.run import Run
from clawgym.trainers.common.services import open_services, pool_file
from clawgym.trainers.common.splits import Splits
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.local.training_state import TrainingState

__all__ = ["train_sft"]


async def train_sft(config: TrainConfig, run: Run, splits: Splits) -> Progress:
    """Train and evaluate, from the last checkpoint if there is one."""
    with Pool(pool_file(run.path)) as pool:
        imitation, model = await load_imitation_data(config, splits, pool, run)
        state = TrainingState.load(config, run.path, model, lr=config.sft.lr)
        policy, learner, progress = state.policy, state.learner, state.progress
        run.rewind(progress.step if state.checkpoints.last() else -1)
        saved = progress.step
        async with open_services(config, policy, run.path, pool, version=progress.step) as services:
            if _validates(config, progress) and run.unvalidated(progress.step):
                await run.validate(services, splits.validation, progress)
                await services.rest()
                if state.checkpoints.last() or not run.stop.is_set():
                    await asyncio.to_thread(state.save)
            while not _enough(config, progress) and not run.stop.is_set():
                batch = imitation.batch(progress.step)
                imitate = partial(learner.imitate, batch, step=progress.step, steps=config.sft.steps)
                metrics = await in_update_thread(imitate)
                progress.step += 1
                progress.seconds += metrics["timing/update"]
                run.log(progress.step, metrics)
                if _validates(config, progress):
                    await policy.publish(services.engine, progress.step)
                    await run.validate(services, splits.validation, progress)
                    await services.rest()
                    await asyncio.to_thread(state.save)
                    saved = progress.step
            if saved < progress.step:  # stopped between two checkpoints
                await asyncio.to_thread(state.save)
            if _enough(config, progress):
                await run.measure_best(services, policy, state.checkpoints, splits.heldout)
    return progress


def _validates(config: TrainConfig, progress: Progress) -> bool:
    """Whether the policy is evaluated after this step."""
    return progress.step % config.sft.evaluate_every == 0 or progress.step == config.sft.steps


def _enough(config: TrainConfig, progress: Progress) -> bool:
    about = config.sft
    reached = about.until is not None and progress.best_score >= about.until
    partly = about.until_partial is not None and progress.extra.get("partial", 0.0) >= about.until_partial
    return reached or partly or progress.step >= config.sft.steps
