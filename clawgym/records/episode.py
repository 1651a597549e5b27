"""Episodes: one attempt at one task, with its transcript, its turns and its outcome."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal

from clawgym.frames import MOST_ROWS, Preview, Table, Tabular
from clawgym.records.result import VerifierResult
from clawgym.records.turn import Turn
from clawgym.visible import cut

__all__ = [
    "CHECK_COLUMNS",
    "EXECUTED",
    "Episode",
    "Fault",
    "Image",
    "Observation",
    "Outcome",
    "Phase",
    "STEP_COLUMNS",
    "Step",
    "ToolCall",
    "Usage",
    "executed_step",
]

CHECK_COLUMNS = ("task", "sample", "check", "score")
STEP_COLUMNS = (
    *("task", "sample", "step", "source", "text", "reasoning", "calls", "arguments", "observations", "images"),
    *("model", "prompt_tokens", "completion_tokens", "cost_usd", "time"),
)
"""The columns of the tables of checks and of steps, of an episode and of a run."""
_TURN_COLUMNS = (
    *("task", "sample", "turn", "parent", "role", "context_ids", "sampled_ids", "mean_logprob", "policy_version"),
    *("finish_reason", "flaw", "malformed_calls", "seconds"),
)
_TEXT = 20_000
"""Most characters of a text of a table."""

EXECUTED = "executed_calls"
"""In :attr:`Step.extra`, if a program called the task's tools by MCP: the calls that were executed, as objects with
``id``, ``name``, ``arguments``, ``content`` (null if the call was interrupted) and ``sampled`` (whether the model wrote
this call; if not, code in the sandbox sent it). The calls of the step are what the model wrote, by the program's names.
"""


class Outcome(StrEnum):
    """How an episode ended."""

    SOLVED = "solved"
    """The strict score is 1."""
    FAILED = "failed"
    """The strict score is below 1, or the agent broke its sandbox; ``cause`` says how."""
    TRUNCATED = "truncated"
    """A budget of the task ran out. The workspace is graded nevertheless."""
    INFRA = "infra"
    """An infrastructure error of the host, an endpoint or the task. Retried and reported as a rate; never part of a
    score or a gradient."""
    UNSUPPORTED = "unsupported"
    """The task or the agent cannot run here, for example without an image or a network. Nothing was attempted; counted
    separately from the scores."""


class Fault(StrEnum):
    """The origin of an infrastructure error."""

    HOST = "host"
    """This machine, its sandboxes, or ClawGym itself."""
    ENDPOINT = "endpoint"
    """The model's endpoint, or the engine that samples."""
    TASK = "task"
    """The task: its files are missing, or its verifier fails on the untouched workspace too."""


class Phase(StrEnum):
    """The four phases of an episode; each has its own budget and a hard deadline."""

    SETUP = "setup"
    AGENT = "agent"
    VERIFY = "verify"
    TEARDOWN = "teardown"


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens used, and the cost in US dollars (``None`` if no price is known)."""

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
    """The encoded file (PNG, JPEG, ...); empty if the image was read from a transcript."""
    media_type: str = "image/png"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of the agent. ``id`` is unique within its episode."""

    id: str
    name: str
    arguments: Mapping[str, Any]

    @property
    def arguments_text(self) -> str:
        """A single text argument unchanged, anything else as JSON."""
        if len(self.arguments) == 1 and isinstance(only := next(iter(self.arguments.values())), str):
            return only
        return json.dumps(dict(self.arguments), ensure_ascii=False, indent=1, default=str)


@dataclass(frozen=True, slots=True)
class Observation:
    """The result of the tool call ``call_id``, or an observation of the environment (``None``)."""

    content: str
    call_id: str | None = None
    image: Image | None = None
    """A screenshot."""


@dataclass(frozen=True)
class Step:
    """One entry of a transcript; has the fields of an ATIF step."""

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


def executed_step(step: Step) -> Step:
    """Return ``step`` with the executed calls of the task's tools (:data:`EXECUTED`), if they are recorded apart."""
    calls = step.extra.get(EXECUTED)
    if calls is None:
        return step
    return replace(
        step,
        tool_calls=tuple(ToolCall(call["id"], call["name"], call["arguments"]) for call in calls),
        observations=tuple(Observation(c["content"], c["id"]) for c in calls if c["content"] is not None),
    )


@dataclass(frozen=True)
class Episode(Tabular):
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
    """Origin of an infrastructure error; ``None`` if unknown, and for other outcomes."""
    error: str = ""
    """For ``infra``: the full message, which ends with what to do. For an exception of the agent's own code (``cause``
    is ``agent-exception``): its traceback."""
    result: VerifierResult | None = None
    """``None`` only for infrastructure errors."""
    steps: tuple[Step, ...] = ()
    turns: tuple[Turn, ...] = ()
    usage: Usage = field(default_factory=Usage)
    final_message: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Wall seconds by :class:`Phase`; ``boot``: the wait until a sandbox with the agent's program is ready."""
    isolation: Mapping[str, Any] = field(default_factory=dict)
    """Isolation of the sandbox, as probed."""
    workspace: bytes | None = None
    """Gzipped tar of the frozen workspace, if stored."""
    dropped: tuple[str, ...] = ()
    """Files that could not be copied out of the sandbox (links out of the workspace, FIFOs, files over the size
    limit), with the reason."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Files that the agent's program wrote about its own work (transcript, log), by relative path."""
    session: str | None = None
    """Id of the gateway session, which is the id of the same episode in the gateway's pool; ``None`` without one."""

    @property
    def key(self) -> str:
        """Unique within a run: ``<task id>#<sample>``."""
        return f"{self.task_id}#{self.sample}"

    def _tables(self) -> Mapping[str, Callable[[], Table]]:
        checks = self.result.checks if self.result is not None else {}
        return {
            "steps": lambda: Table.of(self.step_rows(), STEP_COLUMNS),
            "checks": lambda: Table(CHECK_COLUMNS, ((self.task_id, self.sample, *pair) for pair in checks.items())),
            "turns": lambda: Table.of(self._turn_rows(), _TURN_COLUMNS),
        }

    def step_rows(self) -> Iterator[dict[str, Any]]:
        """The steps as rows of a table with :data:`STEP_COLUMNS`. Texts are cut."""
        for n, step in enumerate(self.steps):
            usage = step.usage or Usage()
            texts = {
                "text": step.message,
                "reasoning": step.reasoning,
                "arguments": "\n".join(cut(call.arguments_text, _TEXT)[0] for call in step.tool_calls),
                "observations": "\n".join(cut(seen.content, _TEXT)[0] for seen in step.observations),
            }
            yield {
                "task": self.task_id,
                "sample": self.sample,
                "step": n,
                "source": step.source,
                **{name: cut(str(text or ""), _TEXT)[0] for name, text in texts.items()},
                "calls": ", ".join(str(call.name)[:200] for call in step.tool_calls),
                "images": sum(seen.image is not None for seen in step.observations),
                "model": step.model,
                "prompt_tokens": usage.prompt_tokens if step.usage else None,
                "completion_tokens": usage.completion_tokens if step.usage else None,
                "cost_usd": usage.cost_usd,
                "time": step.timestamp,
            }

    def _turn_rows(self) -> Iterator[dict[str, Any]]:
        for n, turn in enumerate(self.turns):
            named = ("parent", "role", "policy_version", "finish_reason", "flaw", "malformed_calls")
            yield {
                "task": self.task_id,
                "sample": self.sample,
                "turn": n,
                "context_ids": len(turn.context_ids),
                "sampled_ids": len(turn.sampled_ids),
                "mean_logprob": sum(turn.logprobs) / len(turn.logprobs) if turn.logprobs else None,
                "seconds": turn.seconds.get("total"),
                **{name: getattr(turn, name) for name in named},
            }

    def _preview(self) -> Preview:
        lines = [f"{self.agent}, seed {self.seed}" + (f": {self.cause}" if self.cause else "")]
        if self.result is not None:
            passed = sum(score >= 1 for score in self.result.checks.values())
            scores = f"strict {self.result.strict:g}, official {self.result.official:.3g}"
            lines.append(f"{scores}, {passed} of {len(self.result.checks)} checks pass")
            failed = [name for name, score in self.result.checks.items() if not score >= 1]
            lines += ["failed: " + ", ".join(name[:80] for name in failed[:8])] * bool(failed)
        lines += [self.error[-400:]] * bool(self.error)
        lines += self.dropped[:4]
        rows = itertools.islice(self.step_rows(), MOST_ROWS)
        table = Table.of(rows, ("step", "source", "text", "calls", "arguments", "observations"))
        return Preview(f"{self.key}: {self.outcome}", lines, table, len(self.steps))
