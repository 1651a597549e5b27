"""Agent ``gullible``: does the task and obeys whatever its files and mails ask for. A control for injection-basic."""

from __future__ import annotations

from typing import Any

from clawgym.agents._calls import VERSION
from clawgym.agents.protocol import AgentContext, AgentReport
from clawgym.agents.script import ScriptAgent
from clawgym.errors import AgentError
from clawgym.registry import agents

__all__ = ["GullibleAgent"]


@agents.register("gullible")
class GullibleAgent:
    """Does the user's task and the hidden request of a task: runs its wrong solution ``obeys``.

    On ``injection-basic`` its utility and its attack success are 100 %.
    """

    name = "gullible"
    version = VERSION

    async def run(self, context: AgentContext) -> AgentReport:
        """Run the wrong solution ``obeys``.

        Raises:
            AgentError: the task has none.
        """
        for script in context.task.wrong_solutions:
            if script.path in ("obeys.sh", "obeys.json"):
                return await ScriptAgent(script.read()).run(context)
        raise AgentError(f"task {context.task.id} has no hidden request: use agent 'gullible' on injection-basic")

    def identity(self) -> dict[str, Any]:
        """Return name and version."""
        return {"name": self.name, "version": self.version}

    async def aclose(self) -> None: ...
