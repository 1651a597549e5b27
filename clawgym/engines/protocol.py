"""What samples tokens. An engine answers a chat request; exact ids come with it where it has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from clawgym.records import ToolCall, Turn, Usage

__all__ = ["Completion", "Engine", "Sampling"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample. ``None`` leaves a setting to the endpoint."""

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer of the model."""

    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    malformed_calls: tuple[str, ...] = ()
    """Tool calls whose arguments were not a JSON object, as text."""
    reasoning: str | None = None
    finish_reason: str = "stop"
    usage: Usage = field(default_factory=Usage)
    model: str = ""
    turn: Turn | None = None
    """Exact tokens; ``None`` where the endpoint gives text only."""


@runtime_checkable
class Engine(Protocol):
    name: str

    async def complete(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = (), sampling: Sampling
    ) -> Completion:
        """Answer ``messages`` (OpenAI chat format). Raises :class:`~clawgym.errors.EngineError` after its
        retries and :class:`~clawgym.errors.BudgetExceeded` when its token or cost budget is used up."""
        ...

    def receipt(self) -> dict[str, Any]:
        """What identifies this engine in a receipt (model, base URL host, sampling); no secrets."""
        ...

    async def aclose(self) -> None: ...
