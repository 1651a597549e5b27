"""Aider, a pair programmer that edits files by the model's text, on the gateway's chat API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clawgym.agents.blackbox.protocol import ModelLink
from clawgym.agents.programs.command import HOME, CommandClaw, Needs, RunningCommand
from clawgym.registry import agents

__all__ = ["Aider"]

_FOLDER = f"{HOME}/.aider"


@agents.register("aider")
class Aider(CommandClaw):
    """Aider with one message at a time. It edits files, and runs no commands.

    It repeats its rules after each message and leaves them out of the history: each message is a training sequence.
    """

    name = "aider"
    needs = Needs(memory_mb=768)
    history = _FOLDER

    def files(self, link: ModelLink) -> Mapping[str, Any]:
        """See :class:`CommandClaw`."""
        limits = {
            "max_input_tokens": link.context_window,
            "max_output_tokens": link.max_tokens,
            "input_cost_per_token": 0,
            "output_cost_per_token": 0,
            "litellm_provider": "openai",
            "mode": "chat",
        }
        settings = {"name": f"openai/{link.model}", "edit_format": "whole", "use_temperature": False}
        return {
            f"{_FOLDER}/models.json": {f"openai/{link.model}": limits},
            f"{_FOLDER}/settings.yml": [settings],  # JSON is YAML; without a temperature, the session's is used
        }

    def environment(self, link: ModelLink) -> Mapping[str, str]:
        """See :class:`CommandClaw`."""
        return {
            "OPENAI_API_BASE": link.base_url,
            "OPENAI_API_KEY": link.api_key,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "AIDER_ANALYTICS": "false",
            "AIDER_CHECK_UPDATE": "false",
        }

    def command(self, link: ModelLink, message: str, *, first: bool) -> RunningCommand:
        """See :class:`CommandClaw`."""
        options = ["--yes-always", "--no-git", "--no-pretty", "--no-stream", "--no-analytics", "--no-check-update"]
        options += ["--no-show-model-warnings", "--no-show-release-notes", "--no-gitignore", "--no-detect-urls"]
        options += ["--no-suggest-shell-commands", "--map-tokens", "0"]
        options += [
            "--model-metadata-file",
            f"{_FOLDER}/models.json",
            "--model-settings-file",
            f"{_FOLDER}/settings.yml",
        ]
        options += ["--model", f"openai/{link.model}"]
        options += ["--chat-history-file", f"{_FOLDER}/chat.md", "--input-history-file", f"{_FOLDER}/input"]
        options += [] if first else ["--restore-chat-history"]
        return RunningCommand([*self.program(), *options, "--message", message], b"")
