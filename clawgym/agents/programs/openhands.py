"""OpenHands, on the gateway's chat API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clawgym.agents.blackbox.protocol import ModelLink
from clawgym.agents.programs.command import HOME, CommandClaw, Needs, RunningCommand, bearer
from clawgym.registry import agents

__all__ = ["OpenHands"]


@agents.register("openhands")
class OpenHands(CommandClaw):
    """The command ``openhands --headless``. Its tool for a browser, which the command never has, is not installed."""

    name = "openhands"
    takes_tools = True
    needs = Needs(memory_mb=1536, pids=128)
    history = f"{HOME}/.openhands"

    def files(self, link: ModelLink) -> Mapping[str, Any]:
        """See :class:`CommandClaw`."""
        if link.tools_url is None:
            return {}
        server = {"url": link.tools_url, "transport": "http", "headers": bearer(link)}
        return {f"{HOME}/.openhands/mcp.json": {"mcpServers": {"task": server}}}

    def environment(self, link: ModelLink) -> Mapping[str, str]:
        """See :class:`CommandClaw`."""
        return {
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # LiteLLM's table of prices is not downloaded
            "LLM_API_KEY": link.api_key,
            "LLM_BASE_URL": link.base_url,
            "LLM_MODEL": f"openai/{link.model}",
            "OPENHANDS_SUPPRESS_BANNER": "1",
        }

    def command(self, link: ModelLink, message: str, *, first: bool) -> RunningCommand:
        """See :class:`CommandClaw`."""
        resumed = [] if first else ["--resume", "--last"]
        argv = [*self.program(), "--headless", "--json", "--override-with-envs", *resumed, "--task", message]
        return RunningCommand(argv, b"")
