"""OpenCode, an open coding agent, on the gateway's chat API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clawgym.agents.blackbox.protocol import ModelLink
from clawgym.agents.programs.command import HOME, TOOL_SECONDS, CommandClaw, Needs, RunningCommand, bearer
from clawgym.registry import agents

__all__ = ["OpenCode"]


@agents.register("opencode")
class OpenCode(CommandClaw):
    """OpenCode in its non-interactive mode, with all permissions, since the sandbox is its own."""

    name = "opencode"
    takes_tools = True
    needs = Needs(memory_mb=1024, pids=96)
    history = f"{HOME}/.local/share/opencode"

    def files(self, link: ModelLink) -> Mapping[str, Any]:
        """See :class:`CommandClaw`."""
        model = {"name": link.model, "limit": {"context": link.context_window, "output": link.max_tokens}}
        provider = {
            "npm": "@ai-sdk/openai-compatible",  # part of the program
            "name": "ClawGym",
            "options": {"baseURL": link.base_url, "apiKey": link.api_key},
            "models": {link.model: model},
        }
        settings: dict[str, Any] = {
            "provider": {"clawgym": provider},
            "model": f"clawgym/{link.model}",
            "small_model": f"clawgym/{link.model}",
            "enabled_providers": ["clawgym"],
            "autoupdate": False,
            "share": "disabled",
            "agent": {"title": {"disable": True}},  # a model call of its own
            "permission": "allow",
        }
        if link.tools_url is not None:
            about = {"type": "remote", "url": link.tools_url, "headers": bearer(link), "oauth": False}
            settings["mcp"] = {"task": {**about, "timeout": TOOL_SECONDS * 1000}}
        return {f"{HOME}/.config/opencode/opencode.json": settings}

    def environment(self, link: ModelLink) -> Mapping[str, str]:
        """See :class:`CommandClaw`."""
        return {
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
        }

    def command(self, link: ModelLink, message: str, *, first: bool) -> RunningCommand:
        """See :class:`CommandClaw`."""
        again = [] if first else ["--continue"]
        return RunningCommand([*self.program(), "run", *again], message.encode())
