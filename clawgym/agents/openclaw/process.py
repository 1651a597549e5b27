"""Run OpenClaw as a process on loopback that writes only into one folder, without a sandbox: for tests and benchmarks.

Its tools run with the rights of the caller, so give it a model that you trust.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp

from clawgym.agents.openclaw._npm import dying_with_parent
from clawgym.agents.openclaw.config import ENV
from clawgym.agents.openclaw.install import Installation

__all__ = ["OpenClawProcess", "configuration", "openclaw", "provider"]

_TAKEN = "config change applied"
TOKEN = "a-token-on-loopback"


def provider(base_url: str, key: str, *, context_window: int = 128_000, **model: Any) -> dict[str, Any]:
    """A model provider in OpenClaw's configuration: one session of the gateway."""
    free = {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0}
    about = {
        "id": "policy",
        "name": "policy",
        "reasoning": False,
        "input": ["text"],
        "cost": free,
        "contextWindow": context_window,
        "maxTokens": 2048,
        **model,
    }
    return {"baseUrl": base_url, "apiKey": key, "api": "openai-completions", "models": [about]}


def configuration(
    port: int,
    workspace: Path,
    providers: Mapping[str, Any],
    defaults: Mapping[str, Any],
    tools: Mapping[str, Any],
) -> dict[str, Any]:
    """A configuration without channels, plugins, heartbeat and update checks."""
    return {
        "gateway": {
            "port": port,
            "mode": "local",
            "bind": "loopback",
            "auth": {"mode": "token", "token": TOKEN},
            "http": {"endpoints": {"chatCompletions": {"enabled": True}}},
            "tailscale": {"mode": "off", "resetOnExit": False},
            "controlUi": {"enabled": False},
        },
        "models": {"mode": "merge", "providers": dict(providers)},
        "agents": {
            "defaults": {
                "model": {"primary": f"{next(iter(providers))}/policy"},
                "workspace": str(workspace),
                "skipBootstrap": True,
                "maxConcurrent": 16,
                "timeoutSeconds": 120,
                "heartbeat": {"every": "0m"},
                **defaults,
            },
            "list": [
                {"id": name, "workspace": str(workspace / name), "model": {"primary": f"{name}/policy"}}
                for name in providers
            ],
        },
        "skills": {"allowBundled": ["none"]},
        "tools": {
            "profile": "coding",
            "deny": ["web_search", "web_fetch", "memory_search", "cron"],
            "exec": {"host": "gateway", "security": "full"},
            **tools,
        },
        "plugins": {"enabled": False},
        "cron": {"enabled": False},
        "discovery": {"mdns": {"mode": "off"}},
        "update": {"checkOnStart": False},
        "hooks": {"internal": {"enabled": False}},
        "browser": {"enabled": False},
        "canvasHost": {"enabled": False},
    }


class OpenClawProcess:
    """A running gateway of OpenClaw."""

    def __init__(self, home: Path, port: int, process: asyncio.subprocess.Process) -> None:
        self.home, self.port, self.process = home, port, process
        self.workspace = home / "work"

    async def configure(self, **defaults: Any) -> None:
        """Change ``agents.defaults`` while it runs, and wait until it has read the change."""
        path, log = self.home / ".openclaw" / "openclaw.json", self.home / "log.txt"
        before = log.read_text("utf-8", "replace").count(_TAKEN)
        config = json.loads(path.read_text("utf-8"))
        config["agents"]["defaults"].update(defaults)
        path.write_text(json.dumps(config), "utf-8")
        async with asyncio.timeout(30):
            while log.read_text("utf-8", "replace").count(_TAKEN) == before:  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    async def chat(
        self, text: str, agent: str, *, session: str | None = None, timeout: float = 90.0, **more: Any
    ) -> tuple[int, str]:
        """Send a user message to ``agent`` (a name of ``providers``); return status and answer. Messages with the same
        ``session`` are one conversation."""
        sent = {"Authorization": f"Bearer {TOKEN}"}
        if session is not None:
            sent["x-openclaw-session-key"] = f"agent:{agent}:{session}"
        body = {"model": f"openclaw/{agent}", "messages": [{"role": "user", "content": text}], **more}
        url = f"http://127.0.0.1:{self.port}/v1/chat/completions"
        limit = aiohttp.ClientTimeout(total=timeout)
        async with aiohttp.ClientSession(timeout=limit) as client, client.post(url, json=body, headers=sent) as answer:
            said = await answer.json()
            return answer.status, said["choices"][0]["message"]["content"] if answer.status == 200 else json.dumps(said)


@contextlib.asynccontextmanager
async def openclaw(
    copy: Installation,
    home: Path,
    providers: Mapping[str, Any],
    *,
    defaults: Mapping[str, Any] | None = None,
    tools: Mapping[str, Any] | None = None,
    **parts: Any,
) -> AsyncIterator[OpenClawProcess]:
    """Start OpenClaw in the new folder ``home`` and wait until it answers; end it and its children afterwards.

    ``providers`` are the models, with an agent for each. ``defaults`` and ``tools`` are added to these parts of its
    configuration; ``parts`` replace whole parts, such as ``channels``."""
    node, entry = copy.node, copy.entry
    for name in ("tmp", "plugins", ".openclaw", *(f"work/{agent}" for agent in providers)):
        (home / name).mkdir(parents=True)
    port = _free_port()
    config = configuration(port, home / "work", providers, defaults or {}, tools or {})
    channels = parts.get("channels", {})
    if channels:
        config["plugins"] = {"allow": [*channels]}
    (home / ".openclaw" / "openclaw.json").write_text(json.dumps({**config, **parts}), "utf-8")
    environment = {
        "HOME": str(home),
        "TMPDIR": str(home / "tmp"),
        "PATH": f"{node.parent}:/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "OPENCLAW_BUNDLED_PLUGINS_DIR": str(home / "plugins"),
        **ENV,
    }
    if channels:  # they are plugins
        for name in ("OPENCLAW_SKIP_CHANNELS", "OPENCLAW_SKIP_PROVIDERS", "OPENCLAW_BUNDLED_PLUGINS_DIR"):
            del environment[name]
    with open(home / "log.txt", "wb") as log:
        process = await asyncio.create_subprocess_exec(
            node, entry, "gateway", "--bind", "loopback", "--port", str(port), "--token", TOKEN,
            cwd=home / "work", env=environment, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True, preexec_fn=dying_with_parent(),
        )  # fmt: skip
    try:
        await _listens(process, port, home / "log.txt")
        yield OpenClawProcess(home, port, process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), 10)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


async def _listens(process: asyncio.subprocess.Process, port: int, log: Path, seconds: float = 180.0) -> None:
    async with asyncio.timeout(seconds), aiohttp.ClientSession() as client:
        while process.returncode is None:
            try:
                async with client.get(f"http://127.0.0.1:{port}/health") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)
    raise AssertionError(f"OpenClaw ended at once:\n{log.read_text('utf-8', 'replace')[-2000:]}")
