"""The engine protocols. An engine samples tokens.

* :class:`Engine` answers a chat request with one completion.
* :class:`TokenEngine` takes token ids and streams sampled ids with log-probabilities, which training needs.
* :class:`TextEngine` takes a chat request and streams text: any endpoint, for evaluation only.

The gateway makes an :class:`Engine` out of either of the others. An engine of your own is one class, registered by
name::

    @clawgym.registry.engines.register("echo")
    class EchoEngine:
        name = "echo"

        async def complete(self, messages, *, tools=(), sampling):
            return Completion(str(messages[-1].get("content") or ""))

        def identity(self):
            return {"name": self.name}

        async def aclose(self):
            pass
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from clawgym.errors import ContextLengthExceeded
from clawgym.records import Image, ToolCall, Turn, Usage

__all__ = [
    "CallDelta",
    "Checkable",
    "Completion",
    "Delta",
    "Engine",
    "GenerateRequest",
    "Image",
    "Sampling",
    "TextEngine",
    "TokenEngine",
    "Tokens",
    "request_seed",
]


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters. None leaves a parameter to the engine."""

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    """The random numbers depend on it and on the prompt (:func:`request_seed`)."""
    stop: tuple[str, ...] = ()
    top_k: int | None = None
    json_schema: Mapping[str, Any] | None = None
    """Constrain the output to JSON of this schema (``{}``: any object), for engines whose ``constrains`` is true.
    Constrained output is not from the model's own distribution, so it is not trained on."""


def request_seed(seed: int, prompt: bytes) -> int:
    """The seed of one request, in [0, 2**31), from a seed that other requests may have too.

    All turns of an episode have its seed. If each began with the same random numbers, what a turn samples would depend
    on what the turns before it drew, and not on its prompt alone, as log-probabilities say.
    """
    digest = hashlib.blake2b(b"%d %s" % (seed, prompt), digest_size=4).digest()
    return int.from_bytes(digest) & 0x7FFFFFFF


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """What a :class:`TokenEngine` samples: the continuation of ``prompt_ids``."""

    prompt_ids: Sequence[int]
    """Ids of the prompt, at least one. Any sequence, such as an ``array``: copy it to get a list."""
    sampling: Sampling = field(default_factory=Sampling)
    """``max_tokens`` defaults to the rest of the context window; the caller handles ``stop`` strings."""
    stop_ids: frozenset[int] = frozenset()
    """Sampling ends after one of these ids."""
    session: str = ""
    """A hint for the reuse of prefixes."""
    adapter: str | None = None
    """Name of LoRA weights."""
    images: Sequence[Image] = ()
    """The images of the prompt, in the order of their placeholders."""

    @property
    def seed(self) -> int | None:
        """The seed of the random numbers of this request (:func:`request_seed`); None without ``sampling.seed``."""
        given = self.sampling.seed
        return None if given is None else request_seed(given, array("q", self.prompt_ids).tobytes())

    @property
    def temperature(self) -> float:
        """1 by default."""
        return 1.0 if self.sampling.temperature is None else float(self.sampling.temperature)

    @property
    def top_p(self) -> float:
        """1, which cuts nothing, by default."""
        return 1.0 if self.sampling.top_p is None else float(self.sampling.top_p)

    @property
    def top_k(self) -> int:
        """0, which cuts nothing, by default."""
        return max(0, self.sampling.top_k or 0)

    def max_tokens(self, context_window: int, prompt: int | None = None) -> int:
        """Most ids to sample. ``prompt`` is the length of the prompt, if not that of ``prompt_ids``.

        Raises :class:`~clawgym.errors.ContextLengthExceeded` if the prompt leaves no room.
        """
        prompt = len(self.prompt_ids) if prompt is None else prompt
        room = context_window - prompt
        if room < 1:
            raise ContextLengthExceeded(
                f"the prompt has {prompt} tokens and the context window is {context_window}: shorten the conversation, "
                "or use a model with a larger window"
            )
        return room if self.sampling.max_tokens is None else min(room, self.sampling.max_tokens)


@dataclass(frozen=True, slots=True)
class Completion:
    """One response of the model."""

    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    malformed_calls: tuple[str, ...] = ()
    """Tool calls whose arguments were not a JSON object, as text."""
    reasoning: str | None = None
    finish_reason: str = "stop"
    usage: Usage = field(default_factory=Usage)
    model: str = ""
    turn: Turn | None = None
    """Exact tokens; None if the endpoint returns text only."""


@runtime_checkable
class Engine(Protocol):
    """Answers chat requests, one completion each."""

    name: str

    async def complete(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = (), sampling: Sampling
    ) -> Completion:
        """Answer a conversation.

        Args:
            messages: messages in OpenAI chat format.
            tools: OpenAI function tools.
            sampling: sampling parameters.

        Raises:
            EngineError: the endpoint failed, after retries.
            BudgetExceeded: the token or cost budget is used up, or the conversation does not fit the context window.
        """
        ...

    def identity(self) -> dict[str, Any]:
        """This engine's entry in the run manifest, as JSON data: model, host, settings. It contains no secrets."""
        ...

    async def aclose(self) -> None: ...


@runtime_checkable
class Checkable(Protocol):
    """An engine, or an agent that has one, that can be asked before a run whether the model answers. Optional."""

    async def check(self) -> None:
        """Ask once. Raises :class:`~clawgym.errors.EngineError` that says what is wrong (URL, key, model) and what to
        do."""
        ...


@dataclass(frozen=True, slots=True)
class Tokens:
    """Sampled tokens; one item of a stream."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """One per id, in nats: log softmax(logits / temperature) over the whole vocabulary; () if not available."""
    policy_version: int | None
    """Version of the weights that sampled these ids; the same for a whole stream."""
    finish_reason: str | None = None
    """On the last item only: ``stop`` (an id of ``stop_ids`` was sampled, and is the last of ``ids``) or
    ``length``."""
    cached_tokens: int = 0
    """On the last item: the number of prompt ids whose keys and values were reused."""


@runtime_checkable
class TokenEngine(Protocol):
    """Takes token ids and streams sampled ids and log-probabilities. Never re-tokenises or truncates a prompt."""

    name: str
    context_window: int
    """Most ids of prompt and sample together."""
    tokenizer: str
    """Folder or Hub name of the tokenizer with the chat template that the gateway uses."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[Tokens]:
        """Sample a continuation, with random numbers from ``request.seed``. Closing the iterator stops the sampling.

        Raises:
            ContextLengthExceeded: the prompt leaves no room for a sample.
            TokenIdsStripped: the endpoint does not return token ids.
            EngineError: any other failure; ``retryable`` only if nothing was yielded and a later call may succeed.
        """
        ...

    def identity(self) -> dict[str, Any]:
        """This engine's entry in the run manifest, as JSON data without secrets."""
        ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of a tool call: ``id`` and ``name`` are in the first piece, ``arguments`` comes in fragments."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a streamed response."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()
    finish_reason: str | None = None
    """On the last piece: ``stop``, ``length``, ``tool_calls`` or ``content_filter``."""
    usage: Usage | None = None
    """On the last piece, if known."""
    stop: str | None = None
    """On the last piece: the stop string that ended the response."""


@runtime_checkable
class TextEngine(Protocol):
    """Takes a chat request and streams text. Its output is never trained on."""

    name: str

    def stream(self, body: Mapping[str, Any], *, session: str = "") -> AsyncIterator[Delta]:
        """Answer a chat-completions request.

        Args:
            body: the request, without ``stream``, ``stream_options`` and ``n``.
            session: id of the gateway session.

        Raises the errors of :meth:`TokenEngine.generate`, with the endpoint's ``status``; they are ``retryable`` only
        before the first piece.
        """
        ...

    def identity(self) -> dict[str, Any]:
        """This engine's entry in the run manifest, as JSON data without secrets."""
        ...

    async def aclose(self) -> None: ...
