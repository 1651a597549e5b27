"""Qwen Code, Alibaba's coding agent, which was made from Gemini CLI, on the gateway's chat API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clawgym.agents.blackbox.protocol import ModelLink
from clawgym.agents.programs.command import HOME, CommandClaw, Needs, RunningCommand
from clawgym.agents.programs.gemini_cli import QUIET, tool_settings
from clawgym.registry import agents

__all__ = ["QwenCode"]

_SETTINGS = {
    **QUIET,
    "security": {"auth": {"selectedType": "openai"}},
    # Model calls of its own, after the second message, which nothing tells from the agent's work.
    "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False, "enableAutoSkill": False},
}


@agents.register("qwen-code")
class QwenCode(CommandClaw):
    """Qwen Code in its headless mode, with all permissions, since the sandbox is its own."""

    name = "qwen-code"
    takes_tools = True
    needs = Needs(memory_mb=1024)
    history = f"{HOME}/.qwen/projects"

    def files(self, link: ModelLink) -> Mapping[str, Any]:
        """See :class:`CommandClaw`."""
        settings = {**_SETTINGS, **tool_settings(link)}
        if link.tools_url is not None:
            settings["tools"] = {"toolSearch": {"enabled": False}}  # tools are in the prompt from the first call on
        return {f"{HOME}/.qwen/settings.json": settings}

    def environment(self, link: ModelLink) -> Mapping[str, str]:
        """See :class:`CommandClaw`."""
        tools = {} if link.tools_url is None else {"QWEN_CODE_LEGACY_MCP_BLOCKING": "1"}  # waits for their list
        return {
            **tools,
            "OPENAI_BASE_URL": link.base_url,
            "OPENAI_API_KEY": link.api_key,
            "OPENAI_MODEL": link.model,
            "NODE_DISABLE_COMPILE_CACHE": "1",
        }

    def command(self, link: ModelLink, message: str, *, first: bool) -> RunningCommand:
        """See :class:`CommandClaw`."""
        again = [] if first else ["--continue"]
        return RunningCommand([*self.program(), "--yolo", *again], message.encode())
