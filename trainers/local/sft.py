"""``clawgym train sft``: imitation of demonstrations, or of exported trajectories.

Invariant: the checkpoint that is ``best`` is the one with the best score on the validation part, in real boxes; what is
held out is measured once, at the end.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from clawgym.errors import TrainingError
from clawgym.gateway.render import Renderer
from clawgym.pool import Pool
from clawgym.tasks.packs._seeded import WORDS
from clawgym.trainers.batching import Path as Row
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.local.checkpoints import Checkpoints, Progress
from clawgym.trainers.local.learner import Learner
from clawgym.trainers.local.parts import Parts
from clawgym.trainers.local.policy import load_policy
from clawgym.trainers.local.run import Run
from clawgym.trainers.local.scratch import base_folder
from clawgym.trainers.local.setting import demonstrate, opened, pool_file
from clawgym.trainers.local.supervised import WordShuffle, conversations, row_of, rows_of

__all__ = ["train_sft"]


async def train_sft(config: TrainConfig, run: Run, parts: Parts, *, stop: asyncio.Event) -> Progress:
    """Train, and measure on the way. Goes on from the last checkpoint, if there is one."""
    with Pool(pool_file(run.path)) as pool:
        rows, policy_folder = await _rows(config, parts, pool, run)
        policy = load_policy(config.model, policy_folder, config.compute, seed=config.seed)
        learner = Learner(policy, config, lr=config.sft.lr)
        checkpoints = Checkpoints(run.path)
        last = checkpoints.last()
        progress = Progress() if last is None else checkpoints.load(last, policy, learner)
        run.rewind(progress.step)
        shuffle = WordShuffle(Renderer(policy_folder), WORDS) if config.sft.shuffle_words else None
        async with opened(config, policy, pool, version=progress.step) as setting:
            if last is None:
                await run.validate(setting, parts.validation, progress, checkpoints, policy, learner)
            while progress.step < config.sft.steps and not stop.is_set():
                batch = _batch(rows, config, progress.step, shuffle)
                figures = await asyncio.to_thread(learner.imitate, batch, step=progress.step, steps=config.sft.steps)
                progress.step += 1
                progress.seconds += figures["timing/update"]
                run.log(progress.step, figures)
                if progress.step % config.sft.evaluate_every == 0 or progress.step == config.sft.steps:
                    await policy.publish(setting.engine, progress.step)
                    await run.validate(setting, parts.validation, progress, checkpoints, policy, learner)
            if progress.step >= config.sft.steps:
                await run.measure_best(setting, policy, checkpoints, parts.heldout)
    return progress


async def _rows(config: TrainConfig, parts: Parts, pool: Pool, run: Run) -> tuple[list[Row], Path]:
    """What is imitated, and the folder of the model that learns it."""
    if config.sft.data is None:
        run.say(f"making {len(parts.demonstrations)} demonstrations in real boxes")
        solved = await demonstrate(config, parts.demonstrations, pool)
        run.say(f"{solved} demonstrations were solved")
        said = list(conversations(pool, "demonstrations"))
        folder = base_folder(config, run.path, parts.demonstrations, said)
        renderer = Renderer(folder)
        rows = [row_of(renderer, row["messages"], row.get("tools") or ()) for row in said]
    else:
        folder = base_folder(config, run.path, parts.demonstrations, ())
        rows = list(rows_of(Path(config.sft.data).expanduser(), Renderer(folder)))
    if not rows:
        raise TrainingError("there is no solved episode to imitate: correct sft.data, or tasks.demonstrations")
    return rows, folder


def _batch(rows: list[Row], config: TrainConfig, step: int, shuffle: WordShuffle | None) -> list[Row]:
    """The rows of a step: epoch after epoch, each in an order of its own, the same after an interruption."""
    rng = random.Random(f"{config.seed}:sft:{step}")
    chosen = []
    for number in range(step * config.sft.batch, (step + 1) * config.sft.batch):
        epoch, place = divmod(number, len(rows))
        order = list(range(len(rows)))
        random.Random(f"{config.seed}:{epoch}").shuffle(order)
        row = rows[order[place]]
        chosen.append(row if shuffle is None else shuffle(row, rng))
    return chosen
