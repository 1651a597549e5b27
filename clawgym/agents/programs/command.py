"""Adapters of command-line programs: each user message is one run of a program, and the program keeps the history.

A :class:`CommandClaw` says how one program is configured and called; everything else is the same for all of them. The
gateway's records are the transcript, so only the program's exit code and its last output are read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from clawgym.agents.blackbox.protocol import ClawStopped, ModelLink
from clawgym.agents.programs.install import Installation, installed, start_command
from clawgym.agents.programs.releases import release_of
from clawgym.errors import AgentError, SandboxError
from clawgym.records import TaskFile
from clawgym.sandbox.protocol import Sandbox, SandboxSpec

__all__ = ["HOME", "TOOL_SECONDS", "CommandClaw", "Needs", "RunningCommand", "RunningProgram", "bearer"]

HOME = "/root"
TOOL_SECONDS = 86400
"""How long programs wait for a tool of the task, whose own limit is shorter."""
_FOREVER = 7 * 86400.0
_LARGEST_ANSWER = 2**20
_LARGEST_FILE = 32 * 2**20


@dataclass(frozen=True, slots=True)
class Needs:
    """What a program needs in addition to the limits of the task."""

    memory_mb: int = 1024
    pids: int = 64
    disk_mb: int = 64


@dataclass(frozen=True, slots=True)
class RunningCommand:
    """How one user message is given to a program."""

    argv: list[str]
    stdin: bytes


class CommandClaw:
    """Base of the adapters (:class:`~clawgym.agents.blackbox.Claw`).

    Raises:
        AgentError: the program is not installed.
    """

    name: str
    takes_tools = False
    """Whether the program is an MCP client, whose configuration names the server ``task`` of
    :attr:`ModelLink.tools_url`, if there is one."""
    needs = Needs()
    history: str | None = None
    """A file or folder of the program's own records, absolute."""

    def __init__(self) -> None:
        self.installation: Installation = installed(release_of(self.name))
        self.version = self.installation.version

    def spec(self, spec: SandboxSpec) -> SandboxSpec:
        """See :class:`~clawgym.agents.blackbox.Claw`."""
        needs = self.needs
        return replace(
            spec,
            limits=spec.limits.plus(memory_mb=needs.memory_mb, pids=needs.pids, disk_mb=needs.disk_mb),
            mounts={**spec.mounts, self.installation.mount: self.installation.folder},
        )

    async def start(self, sandbox: Sandbox, link: ModelLink) -> RunningProgram:
        """See :class:`~clawgym.agents.blackbox.Claw`. Only writes the configuration: no process runs between turns.

        Raises:
            AgentError: the sandbox has no loopback.
        """
        if link.socket_path is not None:
            raise AgentError(
                f"{self.installation.release.title} connects to its model by TCP, and sandboxes of this backend have "
                "no loopback: use --sandbox namespace or docker"
            )
        files = [TaskFile(path.lstrip("/"), _content(body)) for path, body in self.files(link).items()]
        if files:
            await sandbox.put(files, "/")
        return RunningProgram(self, sandbox, link)

    def program(self) -> list[str]:
        """Return the command that starts the program in the sandbox, without its own arguments."""
        return start_command(self.installation)

    def files(self, link: ModelLink) -> Mapping[str, Any]:
        """Return the configuration files by absolute path: text, or an object for JSON."""
        return {}

    def environment(self, link: ModelLink) -> Mapping[str, str]:
        """Return the environment of the program."""
        return {}

    def command(self, link: ModelLink, message: str, *, first: bool) -> RunningCommand:
        """Return how ``message`` is given to the program; ``first``: it begins the conversation."""
        raise NotImplementedError

    def identity(self) -> dict[str, Any]:
        """See :class:`~clawgym.agents.blackbox.Claw`."""
        link = ModelLink("", "")
        calls = [self.command(link, "", first=first).argv for first in (True, False)]
        config = [dict(self.files(link)), dict(self.environment(link)), calls]
        digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
        return {**self.installation.identity(), "config_sha256": digest}


def bearer(link: ModelLink) -> dict[str, str]:
    """Return the header with the key of the gateway."""
    return {"Authorization": f"Bearer {link.api_key}"}


def _content(body: Any) -> bytes:
    return (body if isinstance(body, str) else json.dumps(body, indent=1)).encode()


class RunningProgram:
    """A conversation with a program of ``claw``: each message runs it once
    (:class:`~clawgym.agents.blackbox.Running`)."""

    ended = False  # no process stays between turns

    def __init__(self, claw: CommandClaw, sandbox: Sandbox, link: ModelLink) -> None:
        self._claw, self._sandbox, self._link = claw, sandbox, link
        self._first = True

    async def ask(self, message: str) -> str:
        """See :class:`~clawgym.agents.blackbox.Running`."""
        claw = self._claw
        call = claw.command(self._link, message.encode("utf-8", "replace").decode(), first=self._first)
        self._first = False
        done = await self._sandbox.exec(
            call.argv,
            cwd=self._sandbox.spec.workdir,
            env={"HOME": HOME, **claw.environment(self._link)},
            stdin=call.stdin,
            timeout=_FOREVER,
            max_output=_LARGEST_ANSWER,
            stdout_only=True,
        )
        if done.exit_code != 0:
            said = (done.stderr or done.output).decode("utf-8", "replace").strip()[-300:]
            raise ClawStopped(f"{claw.name} ended with exit code {done.exit_code}: {said!r}")
        return done.text.strip()

    async def files(self) -> Mapping[str, bytes]:
        """Return the program's own records, as a tar of :attr:`CommandClaw.history`."""
        if self._claw.history is None:
            return {}
        try:
            archive = await self._sandbox.get_archive(self._claw.history, max_bytes=_LARGEST_FILE, max_files=500)
        except SandboxError:
            return {}
        return {f"{self._claw.name}.tar": archive.tar}

    async def aclose(self) -> None:
        """See :class:`~clawgym.agents.blackbox.Running`."""
