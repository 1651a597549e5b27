"""Run OpenClaw as a process on loopback that writes only into one folder, without a sandbox: for tests and benchmarks.

Its tools run with the rights of the caller, so give it a model that you trust.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp

from clawgym.agents.blackbox.protocol import ModelLink
from clawgym.agents.openclaw.config import ENV, configuration
from clawgym.agents.programs._npm import dying_with_parent
from clawgym.agents.programs.install import Installation

__all__ = ["OpenClawProcess", "openclaw"]

_TAKEN = "config change applied"


class OpenClawProcess:
    """A running gateway of OpenClaw."""

    def __init__(self, home: Path, port: int, token: str, process: asyncio.subprocess.Process) -> None:
        self.home, self.port, self.token, self.process = home, port, token, process
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
        """Send a user message to ``agent`` (a name of ``links``); return status and answer. Messages with the same
        ``session`` are one conversation."""
        sent = {"Authorization": f"Bearer {self.token}"}
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
    links: Mapping[str, ModelLink],
    *,
    defaults: Mapping[str, Any] | None = None,
    tools: Mapping[str, Any] | None = None,
    **parts: Any,
) -> AsyncIterator[OpenClawProcess]:
    """Start OpenClaw in the new folder ``home`` and wait until it answers; end it and its children afterwards.

    ``links`` are the models, with an agent of the same name for each. ``defaults`` and ``tools`` are added to these
    parts of its configuration; ``parts`` replace whole parts, such as ``channels``."""
    node, entry = copy.node, copy.entry
    for name in ("tmp", "plugins", ".openclaw", *(f"work/{agent}" for agent in links)):
        (home / name).mkdir(parents=True)
    port, token, work = _free_port(), secrets.token_urlsafe(24), home / "work"
    config = configuration(links, port=port, token=token, workspace=str(work), seconds=120, prompt="slim")
    config["agents"]["defaults"] |= {"maxConcurrent": 16, **(defaults or {})}
    config["agents"]["list"] = [
        {"id": name, "workspace": str(work / name), "model": {"primary": f"{name}/{link.model}"}}
        for name, link in links.items()
    ]
    config["tools"] |= {"deny": ["web_search", "web_fetch", "memory_search", "cron"], **(tools or {})}
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
            node, entry, "gateway", "--bind", "loopback", "--port", str(port),
            cwd=work, env=environment, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True, preexec_fn=dying_with_parent(),
        )  # fmt: skip
    try:
        await _listens(process, port, home / "log.txt")
        yield OpenClawProcess(home, port, token, process)
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
