"""Agent ``oracle``: runs the task's reference solution. Every task must score it 1."""

from __future__ import annotations

from typing import Any

from clawgym.agents._calls import VERSION, run_calls
from clawgym.agents.protocol import AgentContext, AgentReport
from clawgym.errors import AgentError
from clawgym.records import Task
from clawgym.registry import agents
from clawgym.tools.calls import read_calls
from clawgym.tools.shell import bash_call

__all__ = ["SOLUTION_DIR", "OracleAgent", "solution_name"]

SOLUTION_DIR = "/tmp/.clawgym-solution"
"""Folder of the solution in the sandbox while it runs: outside the workspace, and removed afterwards."""


def solution_name(task: Task) -> str:
    """Return the file name of the reference solution: ``solve.json`` for a task with tools, else ``solve.sh``."""
    return "solve.json" if task.brings_tools else "solve.sh"


@agents.register("oracle")
class OracleAgent:
    """Runs the task's reference solution.

    Copies the solution into the sandbox, runs ``bash solve.sh`` in the workspace, and removes it. For a task with tools
    of its own, makes the calls of ``solve.json`` instead.
    """

    name = "oracle"
    version = VERSION

    async def run(self, context: AgentContext) -> AgentReport:
        """Run the solution. A failing solution is graded like any other work.

        Raises:
            AgentError: the task has no reference solution.
        """
        task = context.task
        name = solution_name(task)
        entry = next((f for f in task.solution if f.path == name), None)
        if entry is None:
            raise AgentError(f"task {task.id} has no reference solution: add solution/{name}, or leave it out")
        if task.brings_tools:
            return await run_calls(context, read_calls(entry.read(), f"task {task.id}: {name}"))
        await context.sandbox.put(task.solution, SOLUTION_DIR)
        call = bash_call(f"bash {SOLUTION_DIR}/solve.sh")
        report = await run_calls(context, [call], timeout=task.limits.agent_seconds)
        await context.sandbox.exec(["rm", "-rf", SOLUTION_DIR])
        return report

    def identity(self) -> dict[str, Any]:
        """Return name and version."""
        return {"name": self.name, "version": self.version}

    async def aclose(self) -> None: ...
