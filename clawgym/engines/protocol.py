"""What samples tokens.

Three doors. :class:`Engine` answers a chat request at once. :class:`TokenEngine` takes token ids and streams
sampled ids with their log-probs: what training learns from. :class:`TextEngine` takes a chat request and streams
text: any endpoint, evaluation only. The gateway makes the first out of either of the others.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from clawgym.records import Image, ToolCall, Turn, Usage

__all__ = ["CallDelta", "Completion", "Delta", "Engine", "Image", "Sampling", "TextEngine", "TokenEngine", "Tokens"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample. ``None`` leaves a setting to the endpoint."""

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    top_k: int | None = None
    json_schema: Mapping[str, Any] | None = None
    """Allow only JSON of this schema (``{}``: any object). Only for engines whose ``constrains`` is true: the
    distribution is no longer the model's own, so what comes is not trained on."""


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


@dataclass(frozen=True, slots=True)
class Tokens:
    """Some tokens, as they were sampled; what one step of a stream brings."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """One per id, in nats: log softmax(logits / temperature) over the whole vocabulary; () where the engine
    gives none."""
    policy_version: int | None
    """Of the weights that sampled these ids; one stream never mixes two."""
    finish_reason: str | None = None
    """On the last item only: ``stop`` (an id of ``stop_ids`` was sampled, and is the last of ``ids``) or
    ``length``."""
    cached_tokens: int = 0
    """On the last item: how many prompt ids were not computed again."""


@runtime_checkable
class TokenEngine(Protocol):
    """Token ids in, sampled ids and log-probs out. Never re-tokenises, never cuts a prompt."""

    name: str
    context_window: int
    """Most ids of prompt and sample together."""
    tokenizer: str
    """Folder (or hub name) of the tokenizer and its chat template, which the gateway renders with."""

    def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        stop_ids: frozenset[int] = frozenset(),
        session: str = "",
        adapter: str | None = None,
        images: Sequence[Image] = (),
    ) -> AsyncIterator[Tokens]:
        """Sample until an id of ``stop_ids`` or ``sampling.max_tokens`` (default: what the window leaves).

        ``session`` is a hint for prefix reuse. ``adapter`` names LoRA weights. Closing the iterator stops the
        sampling. ``sampling.stop`` (strings) is the caller's business. Raises
        :class:`~clawgym.errors.ContextLengthExceeded` if the prompt leaves no room,
        :class:`~clawgym.errors.TokenIdsStripped`, and :class:`~clawgym.errors.EngineError` (``retryable`` only if
        nothing was yielded yet and the same call may work later).
        """
        ...

    def receipt(self) -> dict[str, Any]:
        """What identifies this engine in a receipt; no secrets."""
        ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of a tool call: ``id`` and ``name`` come with the first piece, ``arguments`` in fragments."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer, in the order it came."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()
    finish_reason: str | None = None
    """On the last piece: ``stop``, ``length``, ``tool_calls`` or ``content_filter``."""
    usage: Usage | None = None
    """On the last piece, where it is known."""
    stop: str | None = None
    """On the last piece: the stop string that ended the answer."""


@runtime_checkable
class TextEngine(Protocol):
    """A chat request in, text out, as it comes. What it answers is never trained on."""

    name: str

    def stream(self, body: Mapping[str, Any], *, session: str = "") -> AsyncIterator[Delta]:
        """Answer a chat-completions request ``body`` (without ``stream``, ``stream_options``, ``n``); ``session`` says
        whose it is.

        Raises as :meth:`TokenEngine.generate` does, with the endpoint's ``status``; ``retryable`` only before the
        first piece."""
        ...

    def receipt(self) -> dict[str, Any]:
        """What identifies this engine in a receipt; no secrets."""
        ...

    async def aclose(self) -> None: ...
