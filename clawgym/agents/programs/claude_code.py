"""Claude Code, Anthropic's coding agent, on the gateway's messages API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clawgym.agents.blackbox.protocol import ModelLink
from clawgym.agents.programs.command import HOME, TOOL_SECONDS, CommandClaw, Needs, RunningCommand, bearer
from clawgym.registry import agents

__all__ = ["ClaudeCode"]


_TOOLS = {
    "ENABLE_TOOL_SEARCH": "false",  # tools are in the prompt from the first call on
    "MCP_CONNECTION_NONBLOCKING": "0",
    "MCP_TOOL_TIMEOUT": str(TOOL_SECONDS * 1000),
}


@agents.register("claude-code")
class ClaudeCode(CommandClaw):
    """Claude Code in its print mode, with all permissions, since the sandbox is its own."""

    name = "claude-code"
    takes_tools = True
    needs = Needs(memory_mb=1536, pids=96)
    history = f"{HOME}/.claude/projects"

    def files(self, link: ModelLink) -> Mapping[str, Any]:
        """See :class:`CommandClaw`."""
        settings: dict[str, Any] = {"hasCompletedOnboarding": True, "autoUpdates": False}
        if link.tools_url is not None:
            settings["mcpServers"] = {"task": {"type": "http", "url": link.tools_url, "headers": bearer(link)}}
        return {f"{HOME}/.claude.json": settings}

    def environment(self, link: ModelLink) -> Mapping[str, str]:
        """See :class:`CommandClaw`."""
        tools = {} if link.tools_url is None else _TOOLS
        return {
            **tools,
            "ANTHROPIC_BASE_URL": link.base_url.removesuffix("/v1"),
            "ANTHROPIC_AUTH_TOKEN": link.api_key,
            "ANTHROPIC_MODEL": link.model,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": link.model,
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(link.max_tokens),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",  # telemetry, updates, error reports, feedback
            "CLAUDE_CODE_DISABLE_TERMINAL_TITLE": "1",
            "DISABLE_AUTOUPDATER": "1",
            "IS_SANDBOX": "1",  # lets root have all permissions
        }

    def command(self, link: ModelLink, message: str, *, first: bool) -> RunningCommand:
        """See :class:`CommandClaw`."""
        again = [] if first else ["--continue"]
        argv = [*self.program(), "--print", "--dangerously-skip-permissions", *again]
        return RunningCommand(argv, message.encode())
