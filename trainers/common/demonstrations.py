"""Demonstrations for imitation: solved episodes of a scripted model that replays the reference solutions."""

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
from clawgym.trainers.common.imitation import ImitationData
from clawgym.trainers.common.run import Run
from clawgym.trainers.common.splits import Splits
from clawgym.trainers.common.start_model import base_folder
from clawgym.trainers.common.supervised import conversations, exported, masked_sequence, masked_sequences
from clawgym.trainers.config import TrainConfig

__all__ = ["demonstrate", "load_imitation_data"]


async def demonstrate(config: TrainConfig, tasks: Sequence[Task], pool: Pool) -> int:
    """Replay the reference solutions in real sandboxes and record them in the pool's channel ``demonstrations``.

    Tasks that are solved in the pool already are skipped. Returns the number of solved tasks. Raises
    :class:`~clawgym.errors.TrainingError` for an agent other than ``tool-loop``: the solutions are calls of its tools.
    """
    known = {e.task_id for e in pool.episodes(channel="demonstrations", state="closed") if e.outcome == "solved"}
    missing = [task for task in tasks if task.id not in known]
    solved = len(tasks) - len(missing)
    if not missing:
        return solved
    if config.agent.name != "tool-loop":
        raise TrainingError(
            f"demonstrations cannot be made with the agent {config.agent.name}: set agent.name to tool-loop, or "
            "sft.data to a file that was exported from a pool"
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


async def load_imitation_data(config: TrainConfig, splits: Splits, pool: Pool, run: Run) -> tuple[ImitationData, Path]:
    """The data to imitate (made, or read from ``sft.data``), and the folder of the model that is trained on it. Raises
    :class:`~clawgym.errors.TrainingError` if there is none."""
    if config.sft.data is None:
        run.say(f"making {len(splits.demonstrations)} demonstrations in real sandboxes")
        solved = await demonstrate(config, splits.demonstrations, pool)
        run.say(f"{solved} demonstrations were solved")
        said = list(conversations(pool, "demonstrations"))
        folder = base_folder(config, run.path, splits.demonstrations, said)
        renderer = Renderer(folder)
        rows = [masked_sequence(renderer, row["messages"], row.get("tools") or ()) for row in said]
    else:
        source = Path(config.sft.data).expanduser()
        folder = base_folder(config, run.path, splits.demonstrations, exported(source))
        renderer = Renderer(folder)
        rows = list(masked_sequences(source, renderer))
    if not rows:
        raise TrainingError("no solved episode to imitate: correct sft.data, or tasks.demonstrations")
    return ImitationData(rows, config, renderer), folder
