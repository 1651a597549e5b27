"""What a black box is to us: a program that starts in a box, has a model behind a URL, and answers a user.

Two Protocols. A :class:`Claw` is one kind of program (OpenClaw 2026.4.1, pi); :class:`Running` is one that has started.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from clawgym.sandbox.protocol import Sandbox, SandboxSpec

__all__ = ["Claw", "ClawStopped", "ModelLink", "Running"]


class ClawStopped(Exception):
    """The program ended, or answers no more. What runs in its box can cause this, so the episode is ``failed``."""

    def __init__(self, message: str, *, cause: str = "agent-stopped") -> None:
        super().__init__(message)
        self.cause = cause


@dataclass(frozen=True, slots=True)
class ModelLink:
    """The model, as a program in the box finds it: an OpenAI-compatible endpoint of one session."""

    base_url: str
    """``http://127.0.0.1:9000/s/<session>/v1``: in a box without a loopback, ``socket_path`` stands for that port."""
    api_key: str = field(repr=False)
    model: str = "policy"
    context_window: int = 128_000
    """Tokens of prompt and answer together."""
    max_tokens: int = 8192
    """Of one answer."""
    socket_path: str | None = None
    """Where the box has no network (``chroot``): the unix socket that the gateway listens on."""


class Running(Protocol):
    """A program that has started, and waits for its user."""

    @property
    def ended(self) -> bool:
        """Whether the program is gone."""
        ...

    async def ask(self, message: str) -> str:
        """One user turn, to the end of the agent's work on it; returns what it says then. Several are one
        conversation. Takes as long as it takes: it is cancelled when the episode's time is up. Raises
        :class:`ClawStopped`, and what the box raises (:mod:`clawgym.sandbox.protocol`)."""
        ...

    async def files(self) -> Mapping[str, bytes]:
        """What the program wrote about itself (transcripts, log), by relative path; once, at the end. A
        :class:`~clawgym.errors.SandboxError` counts as nothing."""
        ...

    async def aclose(self) -> None:
        """Let go of it; the box is closed by others. Idempotent."""
        ...


class Claw(Protocol):
    """One kind of agent program."""

    name: str
    version: str

    def spec(self, spec: SandboxSpec) -> SandboxSpec:
        """``spec`` with what the program needs on top of its task: its files (``mounts``), memory, processes."""
        ...

    async def start(self, box: Sandbox, link: ModelLink) -> Running:
        """Start the program in a fresh box, and wait until it can be asked. It works in ``box.spec.workdir``.

        Raises :class:`~clawgym.errors.InfraError` if it does not start: nobody's code but ours and the program's has
        run by then."""
        ...

    def identity(self) -> dict[str, Any]:
        """What identifies the program and its configuration in a run manifest; no secrets."""
        ...
