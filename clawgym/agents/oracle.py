"""Agent ``oracle``: runs the task's reference solution. Every task must give it 1."""

from __future__ import annotations

from typing import Any

from clawgym.agents._toolbox import VERSION, bash_call, run_calls
from clawgym.agents.protocol import AgentContext, AgentReport
from clawgym.errors import AgentError

__all__ = ["SOLUTION_DIR", "OracleAgent"]

SOLUTION_DIR = "/tmp/.clawgym-solution"
"""Where the solution is while it runs: outside the workspace, and removed afterwards."""


class OracleAgent:
    """Puts the solution into the box, runs ``bash solve.sh`` in the workspace, and takes it out again."""

    name = "oracle"
    version = VERSION

    async def run(self, context: AgentContext) -> AgentReport:
        """Run the solution. A solution that fails is graded like any other work."""
        task = context.task
        if not any(f.path == "solve.sh" for f in task.solution):
            raise AgentError(f"task {task.id} has no reference solution: add solution/solve.sh, or leave it out")
        await context.sandbox.put(task.solution, SOLUTION_DIR)
        call = bash_call(f"bash {SOLUTION_DIR}/solve.sh")
        report = await run_calls(context, [call], timeout=task.limits.agent_seconds)
        await context.sandbox.exec(["rm", "-rf", SOLUTION_DIR])
        return report

    def receipt(self) -> dict[str, Any]:
        """Name and version."""
        return {"name": self.name, "version": self.version}

    async def aclose(self) -> None: ...
