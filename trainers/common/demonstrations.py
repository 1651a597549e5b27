"""Demonstrations: solved episodes of a model that knows the reference solutions, for imitation."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from clawgym.agents.demonstrate import DemonstrationEngine
from clawgym.errors import TrainingError
from clawgym.gateway.render import Renderer
from clawgym.gateway.server import Gateway
from clawgym.pool import Pool
from clawgym.records import Outcome, Task
from clawgym.sandbox import backend as make_backend
from clawgym.trainers.common.collector import Player
from clawgym.trainers.common.imitation import Imitated
from clawgym.trainers.common.parts import Parts
from clawgym.trainers.common.run import Run
from clawgym.trainers.common.scratch import base_folder
from clawgym.trainers.common.supervised import conversations, row_of, rows_of
from clawgym.trainers.config import TrainConfig

__all__ = ["demonstrate", "demonstrated"]


async def demonstrate(config: TrainConfig, tasks: Sequence[Task], pool: Pool) -> int:
    """Let the reference solutions be said by a model that knows them, in real boxes, into the pool's channel
    ``demonstrations``. Returns how many were solved; what is there already is not made again. Raises
    :class:`~clawgym.errors.TrainingError` for an agent that is a program: the solutions are calls of our tools."""
    known = {e.task_id for e in pool.episodes(channel="demonstrations", state="closed") if e.outcome == "solved"}
    missing = [task for task in tasks if task.id not in known]
    solved = len(tasks) - len(missing)
    if not missing:
        return solved
    if config.agent.name != "tool-loop":
        raise TrainingError(
            f"reference solutions are no calls of {config.agent.name}: make demonstrations with another agent "
            "(agent.name tool-loop), or name what was exported from a pool with sft.data"
        )
    backend = make_backend(config.backend)
    try:
        await backend.probe()
        engine = DemonstrationEngine(missing, config.agent.protocol)
        async with Gateway(engine, pool) as gateway:
            await gateway.listen()
            player = Player(config, gateway, backend)
            episodes = await asyncio.gather(
                *(player.play(task, seed=config.seed, channel="demonstrations") for task in missing)
            )
    finally:
        await backend.aclose()
    return solved + sum(episode.outcome is Outcome.SOLVED for episode in episodes)


async def demonstrated(config: TrainConfig, parts: Parts, pool: Pool, run: Run) -> tuple[Imitated, Path]:
    """The demonstrations, and the folder of the model that learns them. Raises
    :class:`~clawgym.errors.TrainingError` where there is nothing to imitate."""
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
        renderer = Renderer(folder)
        rows = list(rows_of(Path(config.sft.data).expanduser(), renderer))
    if not rows:
        raise TrainingError("there is no solved episode to imitate: correct sft.data, or tasks.demonstrations")
    return Imitated(rows, config, renderer), folder
