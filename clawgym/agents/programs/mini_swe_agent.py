"""mini-swe-agent, a small agent with one tool, bash."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clawgym.agents.blackbox.protocol import ClawStopped, ModelLink
from clawgym.agents.programs.command import HOME, CommandClaw, Needs, RunningCommand
from clawgym.registry import agents

__all__ = ["MiniSweAgent"]

_CONFIG = f"{HOME}/.config/mini-swe-agent"
_HISTORY = f"{HOME}/.mini-swe-agent"


@agents.register("mini-swe-agent")
class MiniSweAgent(CommandClaw):
    """The command ``mini`` with its own configuration. It takes one message: it cannot resume a conversation."""

    name = "mini-swe-agent"
    needs = Needs(memory_mb=768)
    history = _HISTORY

    def files(self, link: ModelLink) -> Mapping[str, Any]:
        """See :class:`CommandClaw`."""
        settings = {
            "model": {
                "model_name": f"openai/{link.model}",
                "cost_tracking": "ignore_errors",  # LiteLLM has no price of this model
                "model_kwargs": {"api_base": link.base_url, "api_key": link.api_key, "max_tokens": link.max_tokens},
            },
            "agent": {"cost_limit": 0},
        }
        return {f"{_CONFIG}/clawgym.yaml": settings, f"{_HISTORY}/.none": ""}

    def environment(self, link: ModelLink) -> Mapping[str, str]:
        """See :class:`CommandClaw`."""
        return {
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # LiteLLM's table of prices is not downloaded
            "MSWEA_CONFIGURED": "true",
            "MSWEA_GLOBAL_CONFIG_DIR": _CONFIG,
            "MSWEA_SILENT_STARTUP": "1",
        }

    def command(self, link: ModelLink, message: str, *, first: bool) -> RunningCommand:
        """See :class:`CommandClaw`."""
        if not first and message:
            raise ClawStopped("mini-swe-agent cannot resume a conversation", cause="agent-one-message")
        config = ["-c", "mini.yaml", "-c", f"{_CONFIG}/clawgym.yaml", "-o", f"{_HISTORY}/trajectory.json"]
        argv = [*self.program(), "--yolo", "--exit-immediately", *config, "--task", message]
        return RunningCommand(argv, b"")
