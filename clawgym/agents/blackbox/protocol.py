"""Protocols of black-box agents: programs that run in the sandbox, call a model by URL and answer a user.

A :class:`Claw` is the adapter of one program, such as OpenClaw 2026.4.1 or pi. A :class:`Running` is one started
instance of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from clawgym.sandbox.protocol import Sandbox, SandboxSpec

__all__ = ["Claw", "ClawStopped", "ModelLink", "Running"]


class ClawStopped(Exception):
    """The program ended or does not answer. Code in the sandbox can cause this, so the episode is ``failed``.

    ``cause`` is the cause of the episode's failure, a short word.
    """

    def __init__(self, message: str, *, cause: str = "agent-stopped") -> None:
        super().__init__(message)
        self.cause = cause


@dataclass(frozen=True, slots=True)
class ModelLink:
    """The model, as the program in the sandbox reaches it: an OpenAI-compatible endpoint of one gateway session."""

    base_url: str
    """``http://127.0.0.1:9000/s/<session>/v1``. In a sandbox without a loopback, connect to ``socket_path`` instead of
    that port."""
    api_key: str = field(repr=False)
    model: str = "policy"
    context_window: int = 128_000
    """Context window in tokens, prompt and reply together."""
    max_tokens: int = 8192
    """Token limit of one reply."""
    socket_path: str | None = None
    """In a sandbox without a network (``chroot``): the unix socket that the gateway listens on."""
    tools_url: str | None = None
    """The MCP server (streamable HTTP) with the tools of the task, if it brings any and the program is an MCP client.
    The key is :attr:`api_key`, as a bearer token."""


class Running(Protocol):
    """A started program that waits for user messages."""

    @property
    def ended(self) -> bool:
        """Whether the program has ended."""
        ...

    async def ask(self, message: str) -> str:
        """Send one user message, wait until the agent has finished its work on it, and return its answer.

        All calls belong to one conversation. Set no time limit: the caller cancels the call when the time of the
        episode is used up.

        Raises:
            ClawStopped: the program ended or does not answer.
            SandboxError, SandboxDied: as the sandbox raises them (:mod:`clawgym.sandbox.protocol`).
        """
        ...

    async def files(self) -> Mapping[str, bytes]:
        """Return the program's own transcripts and logs, by relative path. Called once, at the end.

        A :class:`~clawgym.errors.SandboxError` counts as no files.
        """
        ...

    async def aclose(self) -> None:
        """Release the program. The caller closes the sandbox. Idempotent."""
        ...


class Claw(Protocol):
    """The adapter of one agent program.

    Example, for a program that is started anew for each message (complete in ``docs/tutorials/plug-in-an-agent.md``)::

        class Hands:
            name = "hands"
            version = "1"

            def spec(self, spec):
                return replace(spec, mounts={**spec.mounts, "/opt/hands": Path("/usr/local/lib/hands")})

            async def start(self, sandbox, link):
                settings = json.dumps({"base_url": link.base_url, "api_key": link.api_key})
                await sandbox.put([TaskFile("link.json", settings.encode())], "/root/.hands")
                return RunningHands(sandbox)  # implements Running

            def identity(self):
                return {"program_sha256": PROGRAM_SHA256}

    An adapter whose program is an MCP client sets ``takes_tools = True``, and connects the program to
    :attr:`ModelLink.tools_url`. It then works on tasks that bring tools of their own.
    """

    name: str
    version: str

    def spec(self, spec: SandboxSpec) -> SandboxSpec:
        """Return ``spec`` plus what the program needs: its files (``mounts``), memory and processes."""
        ...

    async def start(self, sandbox: Sandbox, link: ModelLink) -> Running:
        """Start the program in a fresh sandbox, and wait until it accepts messages. It works in
        ``sandbox.spec.workdir``.

        Raises:
            InfraError: the program does not start. Only ClawGym's code and the program have run so far, so this is
                not the agent's failure.
        """
        ...

    def identity(self) -> dict[str, Any]:
        """Return what identifies the program and its configuration in a run manifest, as JSON; no secrets."""
        ...
