"""Episodes: one attempt at one task, with its transcript, its turns and its outcome."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from clawgym.records.result import VerifierResult
from clawgym.records.turn import Turn

__all__ = ["Episode", "Fault", "Image", "Observation", "Outcome", "Phase", "Step", "ToolCall", "Usage"]


class Outcome(StrEnum):
    """How an episode ended."""

    SOLVED = "solved"
    """The strict score is 1."""
    FAILED = "failed"
    """The strict score is below 1, or the agent broke its sandbox; ``cause`` says how."""
    TRUNCATED = "truncated"
    """A budget of the task ended the work; graded all the same."""
    INFRA = "infra"
    """An infrastructure error: of the host, of an endpoint, or of the task itself. Retried, reported as a rate, never
    in a score or a gradient."""
    UNSUPPORTED = "unsupported"
    """The task or the agent cannot run here (an image or a network that is missing). Nothing was attempted: counted
    beside the score."""


class Fault(StrEnum):
    """Where the infrastructure error of an ``infra`` episode came from."""

    HOST = "host"
    """This machine, its sandboxes, or ClawGym itself."""
    ENDPOINT = "endpoint"
    """The model's endpoint (or whatever engine samples)."""
    TASK = "task"
    """The task: its files are gone, or its verifier fails without an agent's work too."""


class Phase(StrEnum):
    """The four phases of an episode; each has its own budget and a hard deadline."""

    SETUP = "setup"
    AGENT = "agent"
    VERIFY = "verify"
    TEARDOWN = "teardown"


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens and money. ``cost_usd`` is ``None`` when no price is known."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cost_usd: float | None = None

    def __add__(self, other: Usage) -> Usage:
        costs = [c for c in (self.cost_usd, other.cost_usd) if c is not None]
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
            sum(costs) if costs else None,
        )


@dataclass(frozen=True, slots=True)
class Image:
    """One image of a prompt."""

    sha256: str
    """Hex digest of ``data``."""
    data: bytes
    """The encoded file (PNG, JPEG, ...), as the agent sent it; empty where only a transcript was read."""
    media_type: str = "image/png"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the agent made. ``id`` is unique within its episode."""

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Observation:
    """What came back for one tool call (``call_id``), or from the environment (``None``)."""

    content: str
    call_id: str | None = None
    image: Image | None = None
    """What the screen showed."""


@dataclass(frozen=True)
class Step:
    """One entry of a transcript; field for field what an ATIF step can carry."""

    source: Literal["system", "user", "agent"]
    message: str
    timestamp: str
    """ISO 8601, UTC."""
    tool_calls: tuple[ToolCall, ...] = ()
    observations: tuple[Observation, ...] = ()
    reasoning: str | None = None
    model: str | None = None
    usage: Usage | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Episode:
    """One attempt at one task."""

    task_id: str
    task_hash: str
    sample: int
    """0-based index among the attempts at this task."""
    seed: int
    agent: str
    outcome: Outcome
    cause: str | None = None
    """Why it was not solved; ``None`` for solved and for checks that simply failed."""
    fault: Fault | None = None
    """For ``infra`` alone: where the error came from. ``None`` also where nobody said."""
    error: str = ""
    """For ``infra``: the whole message, which ends with what to do. For an exception of the agent's own code (``cause``
    ``agent-exception``): its traceback."""
    result: VerifierResult | None = None
    """``None`` only for ``infra``."""
    steps: tuple[Step, ...] = ()
    turns: tuple[Turn, ...] = ()
    usage: Usage = field(default_factory=Usage)
    final_message: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Wall seconds by :class:`Phase`; ``boot``: the wait for a box with the agent's program in it."""
    isolation: Mapping[str, Any] = field(default_factory=dict)
    """What the box isolated, as probed."""
    workspace: bytes | None = None
    """Gzipped tar of the frozen workspace, if kept."""
    dropped: tuple[str, ...] = ()
    """What could not be taken from the box (links out, FIFOs, files over the cap)."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """What the agent's program wrote about itself (its own transcript, its log), by relative path."""

    @property
    def key(self) -> str:
        """Unique within a run: ``<task id>#<sample>``."""
        return f"{self.task_id}#{self.sample}"
