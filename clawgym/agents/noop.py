"""Agent ``noop``: does nothing. Every task must score it 0."""

from __future__ import annotations

from typing import Any

from clawgym.agents._calls import VERSION
from clawgym.agents.protocol import AgentContext, AgentReport
from clawgym.registry import agents

__all__ = ["NoopAgent"]


@agents.register("noop")
class NoopAgent:
    """Submits the untouched workspace."""

    name = "noop"
    version = VERSION

    async def run(self, context: AgentContext) -> AgentReport:
        """Submit at once."""
        return AgentReport()

    def identity(self) -> dict[str, Any]:
        """Return name and version."""
        return {"name": self.name, "version": self.version}

    async def aclose(self) -> None: ...
