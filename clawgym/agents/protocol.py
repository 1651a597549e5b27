"""What decides. An agent works on one task in one box, and may fail in any way but silently."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from clawgym.gateway.sessions import SessionRequest
from clawgym.pool import EpisodeEnd
from clawgym.records import Step, Task, Turn, Usage
from clawgym.sandbox.protocol import Backend, Sandbox, SandboxSpec
from clawgym.tools import Tools

__all__ = ["Agent", "AgentContext", "AgentReport", "Known", "ResidentAgent"]


@dataclass(frozen=True)
class AgentContext:
    """Everything an agent gets. The caller enforces the wall-clock budget by cancelling ``run``;
    steps recorded before that are kept."""

    task: Task
    sandbox: Sandbox
    tools: Tools
    """What to act with; the caller closes them."""
    seed: int
    sample: int
    record: Callable[[Step], None]
    """Call once per transcript step, as it happens (a truncated episode keeps what was recorded). The caller
    has recorded the instruction as the first step."""
    record_turn: Callable[[Turn], None] = lambda turn: None
    """Call once per model call that has exact tokens."""
    session: SessionRequest | None = None
    """How an agent that has a gateway opens its session there; ``None``: as it likes."""
    opening: Callable[[], Awaitable[None]] | None = None
    """Awaited by such an agent just before it opens its session."""

    @property
    def rng(self) -> random.Random:
        """A generator that depends on the seed alone."""
        return random.Random(self.seed)


@dataclass(frozen=True, slots=True)
class AgentReport:
    """How the agent's work ended. ``budget`` makes the episode ``truncated``; ``error`` makes it ``failed``
    with ``cause``."""

    stop: Literal["submitted", "budget", "error"] = "submitted"
    cause: str | None = None
    final_message: str = ""
    usage: Usage = field(default_factory=Usage)


@runtime_checkable
class Agent(Protocol):
    name: str
    version: str

    async def run(self, context: AgentContext) -> AgentReport:
        """Work until done. Raises :class:`~clawgym.errors.AgentError` if it cannot work on this task."""
        ...

    def identity(self) -> dict[str, Any]:
        """What identifies this agent in a run manifest."""
        ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Known:
    """What only the agent knows about an episode."""

    usage: Usage = field(default_factory=Usage)
    files: Mapping[str, bytes] = field(default_factory=dict)
    """What its program wrote about itself (:attr:`~clawgym.records.Episode.files`)."""


@runtime_checkable
class ResidentAgent(Agent, Protocol):
    """An agent that lives in the sandbox itself, and so creates the sandbox."""

    async def open_box(self, backend: Backend, spec: SandboxSpec) -> Sandbox:
        """A sandbox for one episode of a task that asks for ``spec``. Its time does not count as set-up. Raises as
        :meth:`~clawgym.sandbox.protocol.Backend.create` does."""
        ...

    async def close_box(self, box: Sandbox) -> None:
        """Close a sandbox of :meth:`open_box`, in whatever state it is. Idempotent."""
        ...

    def session_of(self, box: Sandbox) -> str | None:
        """The id of the gateway session in which this episode is recorded; ``None`` if its work never began."""
        ...

    async def settle(self, box: Sandbox, end: EpisodeEnd) -> Known:
        """Close the session with how the episode in ``box`` ended; called once, after :meth:`close_box`."""
        ...
