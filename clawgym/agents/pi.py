"""The coding agent ``pi`` as a black-box program: one process per user turn, and one session file.

The program is the copy of pi inside OpenClaw's installation. Notes on pi 0.64.0, from running it:

- It reads the user's message from stdin and strips white space around it.
- ``--mode json`` repeats the whole message with every token: a reply of 8,000 tokens is 182 MB of output.
  ``--mode text`` prints only the agent's last message. That is enough, since the gateway records everything else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from clawgym.agents.blackbox.loopback import SUPPORT_FOLDER, node_options, preload
from clawgym.agents.blackbox.protocol import ClawStopped, ModelLink
from clawgym.agents.openclaw.config import model_provider
from clawgym.agents.openclaw.install import DEFAULT_VERSION, installed
from clawgym.agents.programs.install import Installation
from clawgym.errors import AgentError
from clawgym.records import TaskFile
from clawgym.registry import agents
from clawgym.sandbox.protocol import Sandbox, SandboxSpec

__all__ = ["Pi", "RunningPi"]

FOLDER = "/opt/openclaw"
HOME = "/root"
_PACKAGE = "node_modules/@mariozechner/pi-coding-agent"
_AGENT = f"{HOME}/.pi/agent"
_SESSION = f"{_AGENT}/sessions/session.jsonl"
_MEMORY_MB, _PIDS, _DISK_MB = 512, 32, 64
"""What pi needs in addition to the limits of the task."""
_FOREVER = 7 * 86400.0
_LARGEST_ANSWER = 2**20
_ENV = {"PI_OFFLINE": "1", "NODE_DISABLE_COMPILE_CACHE": "1"}
_ARGUMENTS = [
    *("--print", "--mode", "text", "--provider", "clawgym"),
    *("--no-extensions", "--no-skills", "--no-prompt-templates", "--no-themes"),
    *("--session", _SESSION),
]


@agents.register("pi")
class Pi:
    """The coding agent pi that OpenClaw is built on (:class:`~clawgym.agents.blackbox.Claw`).

    Args:
        version: version of the OpenClaw installation that contains pi.

    Raises:
        AgentError: this version is not installed, or does not contain pi.
    """

    name = "pi"

    def __init__(self, version: str = DEFAULT_VERSION) -> None:
        self.installation: Installation = installed(version)
        try:
            package = json.loads((self.installation.folder / _PACKAGE / "package.json").read_bytes())
            self.version: str = package["version"]
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise AgentError(
                f"there is no pi in the installation of OpenClaw {version} ({error}): use {DEFAULT_VERSION}"
            ) from error

    def spec(self, spec: SandboxSpec) -> SandboxSpec:
        """See :class:`~clawgym.agents.blackbox.Claw`."""
        return replace(
            spec,
            limits=spec.limits.plus(memory_mb=_MEMORY_MB, pids=_PIDS, disk_mb=_DISK_MB),
            mounts={**spec.mounts, FOLDER: self.installation.folder},
            readonly={**spec.readonly, SUPPORT_FOLDER: (preload(),)},
        )

    async def start(self, sandbox: Sandbox, link: ModelLink) -> RunningPi:
        """See :class:`~clawgym.agents.blackbox.Claw`. Only writes the configuration: no process runs between turns."""
        files = {"models.json": _models(link), "settings.json": _settings(link)}
        await sandbox.put([TaskFile(name, json.dumps(body, indent=1).encode()) for name, body in files.items()], _AGENT)
        node = [f"{FOLDER}/node/bin/node", *node_options(link)]
        return RunningPi(sandbox, [*node, f"{FOLDER}/{_PACKAGE}/dist/cli.js", *_ARGUMENTS, "--model", link.model])

    def identity(self) -> dict[str, Any]:
        """See :class:`~clawgym.agents.blackbox.Claw`."""
        link = ModelLink("", "")
        config = [_models(link), _settings(link), _ARGUMENTS, _ENV]
        return {
            **self.installation.identity(),
            "config_sha256": hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest(),
        }


def _models(link: ModelLink) -> dict[str, Any]:
    return {"providers": {"clawgym": model_provider(link)}}


def _settings(link: ModelLink) -> dict[str, Any]:
    """pi's default compaction settings, reduced for small context windows."""
    reserve = min(16_384, link.context_window // 4)
    keep = min(20_000, link.context_window // 4)
    return {"compaction": {"enabled": True, "reserveTokens": reserve, "keepRecentTokens": keep}}


class RunningPi:
    """A conversation with pi: each turn runs ``argv`` in ``sandbox`` (:class:`~clawgym.agents.blackbox.Running`)."""

    ended = False  # no process stays between turns

    def __init__(self, sandbox: Sandbox, argv: list[str]) -> None:
        self._sandbox = sandbox
        self._argv = argv

    async def ask(self, message: str) -> str:
        """See :class:`~clawgym.agents.blackbox.Running`."""
        done = await self._sandbox.exec(
            self._argv,
            cwd=self._sandbox.spec.workdir,
            env={**_ENV, "HOME": HOME},
            stdin=message.encode("utf-8", "replace"),
            timeout=_FOREVER,
            max_output=_LARGEST_ANSWER,
            stdout_only=True,
        )
        if done.exit_code != 0:
            stderr = done.stderr.decode("utf-8", "replace").strip()[-300:]
            raise ClawStopped(f"pi ended with exit code {done.exit_code}: {stderr!r}")
        return done.text.strip()

    async def files(self) -> Mapping[str, bytes]:
        """Return pi's own transcript."""
        return {"session.jsonl": await self._sandbox.get(_SESSION, max_bytes=32 * 2**20)}

    async def aclose(self) -> None:
        """See :class:`~clawgym.agents.blackbox.Running`."""
