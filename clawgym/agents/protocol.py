"""The agent protocol: an agent works on one task in one sandbox and reports how its work ended."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from clawgym.gateway.request import SessionRequest
from clawgym.pool import EpisodeEnd
from clawgym.records import DialogueUser, Step, Task, Turn, Usage
from clawgym.sandbox.protocol import Backend, Sandbox, SandboxSpec
from clawgym.tools import Tools

__all__ = ["Agent", "AgentArtifacts", "AgentContext", "AgentReport", "ResidentAgent"]


@dataclass(frozen=True)
class AgentContext:
    """What an agent gets for one episode.

    The caller enforces the wall-clock budget by cancelling :meth:`Agent.run`. Steps that were recorded before are kept.
    """

    task: Task
    sandbox: Sandbox
    """Where the task's commands run. For a :class:`ResidentAgent`, the sandbox of its program."""
    tools: Tools
    """The tools of the task; the caller closes them."""
    seed: int
    """Seed of the episode."""
    sample: int
    """Index of this attempt at the task, from 0."""
    record: Callable[[Step], None]
    """Appends a step to the transcript. Call it once per step, as it happens. The caller has recorded the instruction
    as the first step."""
    record_turn: Callable[[Turn], None] = lambda turn: None
    """Appends a model call with its tokens. Call it once per model call, if the engine returns token ids."""
    user: DialogueUser | None = None
    """Who answers in the task's dialogue."""
    session: SessionRequest | None = None
    """The settings with which an agent that uses a gateway opens its session; ``None``: the agent chooses."""
    opening: Callable[[], Awaitable[None]] | None = None
    """Awaited by such an agent just before it opens its session."""

    @property
    def rng(self) -> random.Random:
        """A new random generator, seeded with :attr:`seed`."""
        return random.Random(self.seed)


@dataclass(frozen=True, slots=True)
class AgentReport:
    """How the agent's work ended."""

    stop: Literal["submitted", "budget", "error"] = "submitted"
    """``budget`` makes the episode ``truncated``, ``error`` makes it ``failed``."""
    cause: str | None = None
    """Which budget, or what failed: a short word such as ``steps`` or ``malformed``."""
    final_message: str = ""
    usage: Usage = field(default_factory=Usage)
    """Tokens and calls of the model."""


@runtime_checkable
class Agent(Protocol):
    """Works on tasks. One agent serves many episodes, also at the same time.

    Example::

        @clawgym.registry.agents.register("list-files")
        class ListFiles:
            name = "list-files"
            version = "1"

            async def run(self, context: AgentContext) -> AgentReport:
                listing = await context.sandbox.exec(["ls", context.task.workspace])
                return AgentReport(final_message=listing.text)

            def identity(self) -> dict[str, Any]:
                return {"name": self.name, "version": self.version}

            async def aclose(self) -> None: ...
    """

    name: str
    version: str

    async def run(self, context: AgentContext) -> AgentReport:
        """Work on the task until it is done.

        An exception other than :class:`~clawgym.errors.ClawGymError` fails the episode, with the traceback in its
        record.

        Raises:
            AgentError: the agent cannot work on this task at all.
            EngineError, InfraError: an infrastructure error; the episode is not scored.
        """
        ...

    def identity(self) -> dict[str, Any]:
        """Return what identifies this agent in a run manifest, as JSON: name, version, settings; no secrets."""
        ...

    async def aclose(self) -> None:
        """Close what the agent owns, such as its engine."""
        ...


@dataclass(frozen=True, slots=True)
class AgentArtifacts:
    """What a :class:`ResidentAgent` itself recorded about an episode."""

    usage: Usage = field(default_factory=Usage)
    """Tokens and calls of the model."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Transcripts and logs of its program (:attr:`~clawgym.records.Episode.files`), by relative path."""


@runtime_checkable
class ResidentAgent(Agent, Protocol):
    """An agent that runs inside the sandbox, and therefore creates the sandbox itself.

    It works on tasks that bring tools of their own if it has the attribute ``takes_tools``, and that is true.
    """

    async def open_sandbox(self, backend: Backend, spec: SandboxSpec, *, tools: bool = False) -> Sandbox:
        """Return a sandbox for one episode of a task with ``spec``. Its time does not count as set-up.

        ``tools``: the task brings tools, which the program calls by MCP. They run in other sandboxes.

        Raises as :meth:`~clawgym.sandbox.protocol.Backend.create` does.
        """
        ...

    async def close_sandbox(self, sandbox: Sandbox) -> None:
        """Close a sandbox of :meth:`open_sandbox`, in any state. Idempotent."""
        ...

    def session_of(self, sandbox: Sandbox) -> str | None:
        """Return the id of the gateway session that records this episode, or ``None`` if the work never began."""
        ...

    async def close_session(self, sandbox: Sandbox, end: EpisodeEnd) -> AgentArtifacts:
        """Close the gateway session with the result of the episode. Called once, after :meth:`close_sandbox`."""
        ...
