"""``clawgym train sft``: imitation of demonstrations, or of exported trajectories.

Invariant: the checkpoint that is ``best`` is the one with the best score on the validation part, in real boxes; what is
held out is measured once, at the end.
"""

from __future__ import annotations

import asyncio

from clawgym.pool import Pool
from clawgym.trainers.common.checkpoints import Progress
from clawgym.trainers.common.demonstrations import demonstrated
from clawgym.trainers.common.parts import Parts
from clawgym.trainers.common.run import Run
from clawgym.trainers.common.services import opened, pool_file
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.local.learning import Learning

__all__ = ["train_sft"]


async def train_sft(config: TrainConfig, run: Run, parts: Parts, *, stop: asyncio.Event) -> Progress:
    """Train, and measure on the way. Goes on from the last checkpoint, if there is one."""
    with Pool(pool_file(run.path)) as pool:
        imitated, model = await demonstrated(config, parts, pool, run)
        learning = Learning.begin(config, run.path, model, lr=config.sft.lr)
        policy, learner, progress = learning.policy, learning.learner, learning.progress
        run.rewind(progress.step if learning.checkpoints.last() else -1)
        saved = progress.step
        async with opened(config, policy, run.path, pool, version=progress.step) as setting:
            if learning.checkpoints.last() is None:
                await run.validate(setting, parts.validation, progress)
                await asyncio.to_thread(learning.save)
            while not _enough(config, progress) and not stop.is_set():
                batch = imitated.batch(progress.step)
                figures = await asyncio.to_thread(learner.imitate, batch, step=progress.step, steps=config.sft.steps)
                progress.step += 1
                progress.seconds += figures["timing/update"]
                run.log(progress.step, figures)
                if progress.step % config.sft.evaluate_every == 0 or progress.step == config.sft.steps:
                    await policy.publish(setting.engine, progress.step)
                    await run.validate(setting, parts.validation, progress)
                    await asyncio.to_thread(learning.save)
                    saved = progress.step
            if saved < progress.step:  # stopped between two checkpoints
                await asyncio.to_thread(learning.save)
            if _enough(config, progress):
                await run.measure_best(setting, policy, learning.checkpoints, parts.heldout)
    return progress


def _enough(config: TrainConfig, progress: Progress) -> bool:
    reached = config.sft.until is not None and progress.best_score >= config.sft.until
    return reached or progress.step >= config.sft.steps
