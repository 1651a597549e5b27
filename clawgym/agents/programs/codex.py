"""Codex CLI, OpenAI's coding agent, on the gateway's responses API."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from clawgym.agents.blackbox.protocol import ModelLink
from clawgym.agents.programs.command import HOME, TOOL_SECONDS, CommandClaw, Needs, RunningCommand
from clawgym.registry import agents

__all__ = ["Codex"]

_CONFIG = """
model = {model}
model_provider = "clawgym"
model_context_window = {window}
model_reasoning_summary = "none"
check_for_update_on_startup = false
web_search = "disabled"

[model_providers.clawgym]
name = "ClawGym"
base_url = {base_url}
env_key = "CLAWGYM_KEY"
wire_api = "responses"

[analytics]
enabled = false

[features]
multi_agent = false  # its tools are in a namespace, which chat templates do not have
"""


_TOOLS = """
[mcp_servers.task]
url = {url}
bearer_token_env_var = "CLAWGYM_KEY"
startup_timeout_sec = 60
tool_timeout_sec = {seconds}
required = true
"""


@agents.register("codex")
class Codex(CommandClaw):
    """Codex CLI in its non-interactive mode, without its own sandbox, since it has one of ours."""

    name = "codex"
    takes_tools = True
    needs = Needs(memory_mb=768)
    history = f"{HOME}/.codex/sessions"

    def files(self, link: ModelLink) -> Mapping[str, Any]:
        """See :class:`CommandClaw`."""
        text = _CONFIG.format(
            model=json.dumps(link.model), base_url=json.dumps(link.base_url), window=link.context_window
        )
        if link.tools_url is not None:
            text += _TOOLS.format(url=json.dumps(link.tools_url), seconds=TOOL_SECONDS)
        return {f"{HOME}/.codex/config.toml": text.lstrip()}

    def environment(self, link: ModelLink) -> Mapping[str, str]:
        """See :class:`CommandClaw`."""
        return {"CLAWGYM_KEY": link.api_key}

    def command(self, link: ModelLink, message: str, *, first: bool) -> RunningCommand:
        """See :class:`CommandClaw`."""
        again = [] if first else ["resume", "--last"]
        options = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        return RunningCommand([*self.program(), "exec", *again, *options, "-"], message.encode())
