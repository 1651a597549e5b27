"""Agent ``sloppy``: a demo agent without a model that solves about half of the tasks."""

from __future__ import annotations

import random
from typing import Any

from clawgym.agents._calls import VERSION
from clawgym.agents.oracle import OracleAgent, solution_name
from clawgym.agents.protocol import AgentContext, AgentReport
from clawgym.agents.script import ScriptAgent
from clawgym.errors import AgentError
from clawgym.registry import agents

__all__ = ["SloppyAgent"]


@agents.register("sloppy")
class SloppyAgent:
    """Runs the task's reference solution with probability 1/2, else one of its wrong solutions.

    It gives reports, reruns and leaderboards mixed results to show without a model. Its score has no meaning.
    """

    name = "sloppy"
    version = VERSION

    async def run(self, context: AgentContext) -> AgentReport:
        """Run one of the task's scripts, chosen by seed, task id and sample.

        Raises:
            AgentError: the task has no reference solution, or no wrong solutions.
        """
        task = context.task
        right = [f for f in task.solution if f.path == solution_name(task)]
        if not right or not task.wrong_solutions:
            raise AgentError(
                f"task {task.id} lacks a reference solution or wrong solutions, which agent 'sloppy' chooses from: "
                "use it on terminal-basic"
            )
        rng = random.Random(f"{context.seed} {task.id} {context.sample}")
        if rng.random() >= 0.5:
            return await ScriptAgent(rng.choice(task.wrong_solutions).read()).run(context)
        if len(task.solution) > 1:
            return await OracleAgent().run(context)
        return await ScriptAgent(right[0].read()).run(context)

    def identity(self) -> dict[str, Any]:
        """Return name and version."""
        return {"name": self.name, "version": self.version}

    async def aclose(self) -> None: ...
