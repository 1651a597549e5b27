"""Configuration of the shared OpenClaw of ``openclaw-dense``: its agents, and the plugin that runs their tools in
sandboxes (``dense.mjs``)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from clawgym.agents.blackbox.loopback import SUPPORT_FOLDER
from clawgym.agents.blackbox.protocol import ModelLink
from clawgym.agents.openclaw.claw import OpenClaw
from clawgym.records import TaskFile

__all__ = ["PLUGIN", "SECONDS", "TOOLS_PORT", "configuration_of", "plugin", "plugin_files"]

PLUGIN = f"{SUPPORT_FOLDER}-dense"
TOOLS_PORT = 9001
SECONDS = 86400.0
_DENIED = ["cron", "web_fetch"]
"""Tools that run in the shared process itself, where one agent could see what others do or reach beyond its sandbox."""


def plugin() -> bytes:
    """Return the code of the plugin."""
    return resources.files("clawgym.agents.openclaw").joinpath("dense.mjs").read_bytes()


_ABOUT = (
    TaskFile(
        "openclaw.plugin.json",
        json.dumps(
            {
                "id": "clawgym",
                "name": "ClawGym",
                "configSchema": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {"port": {"type": "integer"}, "key": {"type": "string"}},
                },
            }
        ).encode(),
    ),
    TaskFile(
        "package.json",
        json.dumps(
            {"name": "clawgym", "version": "1.0.0", "type": "module", "openclaw": {"extensions": ["./index.mjs"]}}
        ).encode(),
    ),
)


def plugin_files() -> tuple[TaskFile, ...]:
    """Return the files of the plugin's folder."""
    return (TaskFile("index.mjs", plugin()), *_ABOUT)


def configuration_of(claw: OpenClaw, model: str, token: str, key: str, agents: Mapping[str, str]) -> dict[str, Any]:
    """Return ``openclaw.json``: as for one task, but with ``agents`` (name -> workspace) whose tools run in sandboxes.

    The model of each agent is in a file of its own folder.
    """
    config = claw.config(ModelLink("", "", model), token, "/var/empty", SECONDS)
    defaults, tools = config["agents"]["defaults"], config["tools"]
    del config["models"]["providers"]
    defaults |= {
        "maxConcurrent": 4096,
        "subagents": {"maxConcurrent": 4096},
        "sandbox": {
            "mode": "all",
            "backend": "clawgym",
            "scope": "agent",
            "workspaceAccess": "rw",
            "prune": {"idleHours": 0, "maxAgeDays": 0},
        },
    }
    main = {"id": "main", "default": True}
    config["agents"]["list"] = [main, *({"id": name, "workspace": where} for name, where in agents.items())]
    tools["deny"] = sorted({*tools["deny"], *_DENIED})
    tools["exec"] = {"host": "sandbox", "security": "full"}
    tools["elevated"] = {"enabled": False}
    tools["sandbox"] = {"tools": {"allow": ["*"], "deny": tools["deny"]}}
    config["plugins"] = {
        "enabled": True,
        "allow": ["clawgym"],
        "load": {"paths": [PLUGIN]},
        "slots": {"memory": "none"},
        "entries": {"clawgym": {"enabled": True, "config": {"port": TOOLS_PORT, "key": key}}},
    }
    return config
