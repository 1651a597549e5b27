"""The task that several routes play with the same commands, and what ``gym.make`` and the ledger have of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import gymnasium as gym

import clawgym
from clawgym.rollout import Ended, EpisodeRequest
from clawgym.sandbox import backend

if TYPE_CHECKING:
    from clawgym.pool import Pool

FILE = Path(__file__).parents[2] / "examples/tasks/three_files.py"
TASKS = clawgym.load(FILE)
(TASK,) = TASKS.tasks
EPISODES = {
    "solved": ("pwd; ls -a", "echo one > a; cat a a > b", "false; printf 'é\\n'", "cat a b > c; cat c"),
    "failed": ("pwd; ls -a", "echo one > a", "no-such-program", "cat a b"),
}
"""What happens -> the commands. The failed one has one file of three."""


class Played(NamedTuple):
    outputs: list[str]
    reward: float
    checks: dict[str, float]


def by_gym_make(commands: Sequence[str]) -> Played:
    env = gym.make("ClawGym/terminal-v0", tasks=TASKS, reward="official")
    env.reset(options={"task_ids": [TASK.id]})
    outputs = [env.step(command)[0]["output"] for command in commands]
    reward, info = env.step("submit")[1::3]
    env.close()
    return Played(outputs, float(reward), info["checks"])


def replies_of(commands: Sequence[str]) -> list[str]:
    """What a model says in the text protocol."""
    return [*(f"I run this.\n````bash\n{command}\n````" for command in commands), "<submit/>"]


async def in_the_ledger(pool: Pool, model: Path, commands: Sequence[str]) -> Ended:
    """Play with our agent, whose scripted model samples ids behind our gateway, which stores them in ``pool``."""
    from clawgym.agents.tool_loop import ToolLoopAgent
    from clawgym.gateway.server import Gateway  # an extra that not every route has
    from clawgym.rollout.collect import collect_episode, in_process

    from ..gateway.scripted import ScriptedEngine

    replies = replies_of(commands)
    engine = ScriptedEngine(model, lambda prompt, number: replies[number])
    agent = in_process(lambda served: ToolLoopAgent(served, protocol="text"))
    made = backend("auto")
    try:
        async with Gateway(engine, pool) as gateway:
            request = EpisodeRequest(task=TASK, seed=0, reward="official", keep_workspace=False)
            return await collect_episode(request, agent, made, gateway)
    finally:
        await made.aclose()
