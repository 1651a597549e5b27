"""The configuration of an OpenClaw in a sandbox: the gateway as its only model, tools in the sandbox, no network use.

Notes on 2026.4.1, from running it:

- A heartbeat of "0m" disables it. A very long one overflows Node's timer and keeps a core busy.
- An empty folder for bundled plugins saves most of the time to the first model call.
- Plugins, cron, discovery, update checks and the browser are disabled, since a sandbox has no network.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from clawgym.agents.blackbox.protocol import ModelLink

__all__ = ["ENV", "Prompt", "configuration", "model_provider"]

Prompt = Literal["reference", "slim"]
"""``reference``: OpenClaw's default prompt, as in published training runs. ``slim``: without workspace files, skills
and the tools for sessions, web and cron; it has a third of the tokens (docs/how-to/openclaw.md)."""

ENV = {
    "OPENCLAW_NO_RESPAWN": "1",
    "OPENCLAW_SKIP_CHANNELS": "1",
    "OPENCLAW_SKIP_PROVIDERS": "1",
    "OPENCLAW_SKIP_CRON": "1",
    "OPENCLAW_SKIP_CANVAS_HOST": "1",
    "OPENCLAW_SKIP_GMAIL_WATCHER": "1",
    "OPENCLAW_DISABLE_BONJOUR": "1",
    "NODE_DISABLE_COMPILE_CACHE": "1",  # the disk of a sandbox is in memory
}

_DENIED = ["web_search", "memory_search"]
_SLIM_DENIED = [*_DENIED, "web_fetch", "cron", "group:sessions"]


def model_provider(link: ModelLink) -> dict[str, Any]:
    """Return the provider entry for ``link``. Its model is called ``<provider>/<link.model>``."""
    model = {
        "id": link.model,
        "name": link.model,
        "reasoning": False,
        "input": ["text"],
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        "contextWindow": link.context_window,
        "maxTokens": min(link.max_tokens, link.context_window),
    }
    return {"baseUrl": link.base_url, "apiKey": link.api_key, "api": "openai-completions", "models": [model]}


def configuration(
    links: Mapping[str, ModelLink],
    *,
    port: int,
    token: str,
    workspace: str,
    seconds: float,
    prompt: Prompt = "reference",
) -> dict[str, Any]:
    """Return ``openclaw.json`` of a gateway on ``port`` with the secret ``token``; a turn may take ``seconds``.

    ``links``: provider -> its model. The agent uses the first one."""
    first, link = next(iter(links.items()))
    defaults: dict[str, Any] = {
        "model": {"primary": f"{first}/{link.model}"},
        "workspace": workspace,
        "maxConcurrent": 4,
        "subagents": {"maxConcurrent": 4},
        "timeoutSeconds": int(seconds),
        "llm": {"idleTimeoutSeconds": 0},  # no limit on a single model call
        "heartbeat": {"every": "0m"},
    }
    config: dict[str, Any] = {
        "gateway": {
            "port": port,
            "mode": "local",
            "bind": "loopback",
            "auth": {"mode": "token", "token": token},
            "http": {"endpoints": {"chatCompletions": {"enabled": True}}},
            "tailscale": {"mode": "off"},
            "controlUi": {"enabled": False},
        },
        "models": {"mode": "merge", "providers": {name: model_provider(each) for name, each in links.items()}},
        "agents": {"defaults": defaults},
        "tools": {"profile": "coding", "deny": _DENIED, "exec": {"host": "gateway", "security": "full"}},
        "plugins": {"enabled": False},
        "cron": {"enabled": False},
        "discovery": {"mdns": {"mode": "off"}},
        "update": {"checkOnStart": False},
        "hooks": {"internal": {"enabled": False}},
        "browser": {"enabled": False},
    }
    if prompt == "slim":
        defaults["skipBootstrap"] = True
        config["skills"] = {"allowBundled": ["none"]}
        config["tools"]["deny"] = _SLIM_DENIED
    return config
