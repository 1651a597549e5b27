"""Claude Code, Anthropic's coding agent, on the gateway's messages API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clawgym.agents.blackbox.protocol import ModelLink
from clawgym.agents.programs.command import HOME, CommandClaw, Needs, RunningCommand
from clawgym.registry import agents

__all__ = ["ClaudeCode"]


@agents.register("claude-code")
class ClaudeCode(CommandClaw):
    """Claude Code in its print mode, with all permissions, since the sandbox is its own."""

    name = "claude-code"
    needs = Needs(memory_mb=1536, pids=96)
    history = f"{HOME}/.claude/projects"

    def files(self, link: ModelLink) -> Mapping[str, Any]:
        """See :class:`CommandClaw`."""
        return {f"{HOME}/.claude.json": {"hasCompletedOnboarding": True, "autoUpdates": False}}

    def environment(self, link: ModelLink) -> Mapping[str, str]:
        """See :class:`CommandClaw`."""
        return {
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
