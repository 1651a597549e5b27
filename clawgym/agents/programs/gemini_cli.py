"""Gemini CLI, Google's coding agent, on the gateway's Gemini API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clawgym.agents.blackbox.protocol import ModelLink
from clawgym.agents.programs.command import HOME, TOOL_SECONDS, CommandClaw, Needs, RunningCommand, bearer
from clawgym.registry import agents

__all__ = ["QUIET", "GeminiCli", "tool_settings"]

QUIET: Mapping[str, Any] = {
    "privacy": {"usageStatisticsEnabled": False},
    "general": {"enableAutoUpdate": False, "disableAutoUpdate": True, "disableUpdateNag": True},
    "telemetry": {"enabled": False},
}
"""Settings of Gemini CLI, and of the programs made from it, against every connection but that to the model."""
_SETTINGS = {
    **QUIET,
    "security": {"auth": {"selectedType": "gemini-api-key"}, "folderTrust": {"enabled": False}},
}


def tool_settings(link: ModelLink) -> dict[str, Any]:
    """The settings that connect the program to the tools of the task, if it brings any."""
    if link.tools_url is None:
        return {}
    server = {"httpUrl": link.tools_url, "headers": bearer(link), "timeout": TOOL_SECONDS * 1000, "trust": True}
    return {"mcpServers": {"task": server}}


@agents.register("gemini-cli")
class GeminiCli(CommandClaw):
    """Gemini CLI in its headless mode, with all permissions, since the sandbox is its own."""

    name = "gemini-cli"
    takes_tools = True
    needs = Needs(memory_mb=1024)
    history = f"{HOME}/.gemini/tmp"

    def files(self, link: ModelLink) -> Mapping[str, Any]:
        """See :class:`CommandClaw`."""
        return {f"{HOME}/.gemini/settings.json": {**_SETTINGS, **tool_settings(link)}}

    def environment(self, link: ModelLink) -> Mapping[str, str]:
        """See :class:`CommandClaw`."""
        return {
            "GOOGLE_GEMINI_BASE_URL": link.base_url,
            "GEMINI_API_KEY": link.api_key,
            "GEMINI_MODEL": link.model,
            "GEMINI_CLI_TRUST_WORKSPACE": "true",
            "NODE_DISABLE_COMPILE_CACHE": "1",
        }

    def command(self, link: ModelLink, message: str, *, first: bool) -> RunningCommand:
        """See :class:`CommandClaw`."""
        again = [] if first else ["--resume", "latest"]
        return RunningCommand([*self.program(), "--yolo", *again], message.encode())
