"""Common code of the engines on a server: probing the server, and checking its streams.

Invariants: ids are passed on, never computed here. A stream that violates the contract (another prompt, missing ids, a
second version of the weights, ids after a stop id) ends in an error. Log-probs are only returned if they are known to
be exact. Once an engine has loaded weights into its server, it returns no token before the server has confirmed that
it samples with them: a server that was started again has its first weights.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from clawgym.engines._failures import EndpointFailure, RequestFailed, clean
from clawgym.engines._http import UNREACHABLE, HttpEndpoint
from clawgym.engines._retry import Patience, persist, persist_call
from clawgym.engines._scale import Scale, is_exact
from clawgym.engines.protocol import GenerateRequest, Tokens
from clawgym.errors import EngineError, TokenIdsStripped

if TYPE_CHECKING:
    import torch

__all__ = ["CLOSING", "Checked", "LoadedWeights", "ServedEngine"]

CLOSING = 10.0
"""Time limit in seconds of each request that puts the server in order at the end."""

_log = logging.getLogger("clawgym.engines")

PROBE = (1, 2, 3, 4)
"""Prompt of the probe: ids that every vocabulary has."""
UNKNOWN_WINDOW = 1 << 30


class Checked:
    """Checks one stream against its request."""

    def __init__(
        self, endpoint: HttpEndpoint, stop_ids: frozenset[int], most: int, version: int | None, exact: bool
    ) -> None:
        self._endpoint = endpoint
        self._stop_ids = stop_ids
        self.most = most
        """Most ids of the stream."""
        self._exact = exact
        self._last: int | None = None
        self.version = version
        self.count = 0

    def take(self, ids: Sequence[int], logprobs: Sequence[Any]) -> Tokens:
        """Check the ids and log-probs of one event. Raises :class:`~clawgym.errors.EngineError`."""
        if len(logprobs) != len(ids) or any(type(value) not in (float, int) for value in logprobs):
            self.broken(
                f"{len(ids)} ids with the log-probs {list(logprobs)[:3]!r}...", "a current version of the server"
            )
        if any(type(token) is not int or token < 0 for token in ids):
            self.broken("token ids that are no whole numbers", "a current version of the server")
        stop_ids = self._stop_ids
        if ids and (self._last in stop_ids or any(token in stop_ids for token in ids[:-1])):
            self.broken("more ids after a stop id: stop_token_ids were not heeded", "a server that heeds them")
        if any(value > 1e-2 for value in logprobs):
            self.broken("log-probs above 0", "--logprobs-mode processed_logprobs or raw_logprobs")
        self.count += len(ids)
        if self.count > self.most:
            self.broken(f"more ids than the {self.most} that were asked for", "a server that heeds max_tokens")
        if ids:
            self._last = ids[-1]
        return Tokens(tuple(ids), tuple(map(float, logprobs)) if self._exact else (), self.version)

    def end(self, tokens: Tokens, reason: str, cached: int) -> Tokens:
        """Check the end of the stream, and return its last item. Raises :class:`~clawgym.errors.EngineError`."""
        if reason not in ("stop", "length"):
            raise self._endpoint.error(
                EndpointFailure(f"the answer ended with {reason!r}", 503, retryable=not self.count)
            )
        if reason == "stop" and self._last not in self._stop_ids:
            self.broken(f"a stop after id {self._last}, which is no stop id", "a server that heeds ignore_eos")
        return Tokens(tokens.ids, tokens.logprobs, tokens.policy_version, reason, cached)

    def broken(self, what: str, use: str) -> NoReturn:
        """Raise a final error: the server violates the contract."""
        raise self._endpoint.error(EndpointFailure(what, 502, do=f"use {use}"))


@dataclass
class LoadedWeights:
    """Weights that an engine loads into its server."""

    version: int
    folder: Path
    mark: str
    """The server's name for this version. It is used once, so no other weights have it."""
    confirmed: bool = False
    """Whether the server has them, as far as is known."""


class _Gate:
    """Lets streams (``async with``) through, unless it is closed. Belongs to one event loop."""

    def __init__(self) -> None:
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._streams = 0

    async def __aenter__(self) -> None:
        """Begin a stream."""
        while not self._open.is_set():
            await self._open.wait()
        self._streams += 1

    async def __aexit__(self, *_: object) -> None:
        self._streams -= 1
        self._idle.set()

    async def close(self) -> None:
        """Let no further stream begin, and wait until all have ended."""
        self._open.clear()
        while self._streams:
            self._idle.clear()
            await self._idle.wait()

    def open(self) -> None:
        """Let streams through again."""
        self._open.set()


class _Readable:
    """Turns errors from parsing a response into an :class:`~clawgym.errors.EngineError`."""

    def __init__(self, endpoint: HttpEndpoint) -> None:
        self._endpoint = endpoint

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, AttributeError | LookupError | TypeError | ValueError | ArithmeticError | RecursionError):
            failure = EndpointFailure(
                f"an answer of another form ({error!r})", 502, do="use a current version of the server"
            )
            raise self._endpoint.error(failure) from error


class ServedEngine:
    """Base class of engines on a server. A subclass implements ``_first_look``, ``_stream`` and ``_why_not``; to change
    weights, ``_load_weights``; and the paths of its server that free memory."""

    name = ""
    constrains = True
    """Supports ``sampling.json_schema``. Log-probs are then left out, as they cover a part of the vocabulary."""
    _cut_after = False
    """See :func:`~clawgym.engines._scale.is_exact`."""
    _sleep_path = _wake_path = ""
    """Where the server frees its GPU memory, and takes it again."""
    _start_to_sleep = ""
    """How a server has to be started for that."""
    _wakes_empty = False
    """Whether the weights are lost with the memory."""

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        tokenizer: str,
        api_key: str | None = None,
        context_window: int | None = None,
        policy_version: int = 0,
        patience: float = 120.0,
        first_token_seconds: float = 300.0,
        between_seconds: float = 60.0,
        shared: Path | None = None,
    ) -> None:
        if not model:
            raise EngineError(f"the {self.name} engine needs the model's name: pass model=")
        self.model = model
        self.tokenizer = tokenizer
        self.context_window = context_window or UNKNOWN_WINDOW
        """Unlimited until :meth:`ready` has asked the server."""
        self.policy_version: int | None = policy_version
        """Version of the served weights. Whoever changes the weights sets it, while nothing is being sampled."""
        self.scale: Scale = "unknown"
        self._endpoint = HttpEndpoint(
            base_url.rstrip("/").removesuffix("/v1"),
            model,
            api_key=api_key,
            first=first_token_seconds,
            between=between_seconds,
        )
        self._readable = _Readable(self._endpoint)
        self._patience = patience
        self._looked: asyncio.Task[None] | None = None
        self._warned = False
        self.shared = shared
        """A folder shared with the server, to which weights and adapters are written."""
        self._weights: LoadedWeights | None = None
        self._gate, self._changing, self._asleep = _Gate(), asyncio.Lock(), False

    def __repr__(self) -> str:
        return f"{type(self).__name__}(model={self.model!r}, host={self._endpoint.host!r})"

    async def ready(self) -> None:
        """Probe the server, once: its model, context window, token ids and kind of log-probs.

        Waits for a server that is still starting.

        Raises:
            TokenIdsStripped: token ids are missing in its responses.
            EngineError: the server does not answer, or does not serve the model.
        """
        await persist_call(self._look, Patience(self._patience))

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Tokens, None]:
        """See :class:`~clawgym.engines.protocol.TokenEngine`.

        Missing sampling parameters are neutral (temperature 1, no top-k, no top-p), whatever the server's defaults.
        """

        async def attempt() -> AsyncGenerator[Tokens, None]:
            if request.images:
                raise EngineError(
                    f"the {self.name} engine sends token ids, and images do not go with them: use the openai engine "
                    "(text only), or a model without images",
                    status=400,
                )
            if not request.prompt_ids:
                raise EngineError("an empty prompt: give at least one token id", status=400)
            await self._restore()
            async with self._gate:
                await self._look()
                most = request.max_tokens(self.context_window)
                with self._serving(request.adapter) as (named, version), self._readable:
                    checked = Checked(self._endpoint, request.stop_ids, most, version, self._exact(request))
                    asked = request if named == request.adapter else replace(request, adapter=named)
                    async with aclosing(self._stream(asked, checked)) as items:
                        async for tokens in items:
                            yield tokens

        return persist(attempt, Patience(self._patience, self._failed))

    async def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Load all weights into the server, in place. Running streams end with the old ones; new ones wait.

        ``weights`` is a state dict in the format of transformers. The server must see :attr:`shared` (which is emptied
        at first) at the same path, and nobody else may sample from it. A server that is started again gets them again.
        Raises :class:`~clawgym.errors.EngineError` if the server refuses; then it is not sampled from until it has
        weights.
        """
        if self.shared is None:
            raise EngineError("weights need a folder that the server reads, too: set shared")
        if self._weights is None:  # what a killed run left
            await asyncio.to_thread(shutil.rmtree, self.shared, ignore_errors=True)
        mark = f"{version}-{secrets.token_hex(4)}"
        folder = self.shared / f"weights-{mark}"
        await asyncio.to_thread(_write_weights, folder, weights)
        async with self._changed():
            if self._weights is not None:
                shutil.rmtree(self._weights.folder, ignore_errors=True)
            self._weights = LoadedWeights(version, folder, mark)
            await self._load(self._weights)

    async def sleep(self) -> None:
        """Let the server free its GPU memory until :meth:`wake`, or until it gets weights. Running streams end first;
        new ones wait.

        Raises :class:`~clawgym.errors.EngineError` if the server refuses."""
        if self._wakes_empty and self._weights is None:
            raise EngineError(
                f"{self._endpoint.host} loses its weights in its sleep: give it some by update_weights first"
            )
        async with self._changing:
            await self._gate.close()
            try:
                with self._advised(self._start_to_sleep):
                    await persist_call(partial(self._endpoint.tell, self._sleep_path, {}), Patience(self._patience))
                self._asleep = True
            finally:
                self._reopen()

    async def wake(self) -> None:
        """Let a server that sleeps take its GPU memory again. No effect on another."""
        if self._asleep:
            async with self._changed():
                pass

    def identity(self) -> dict[str, Any]:
        """Model, host (without the port), context window, and the kind of log-probs."""
        return {
            "name": self.name,
            "model": self.model,
            "host": self._endpoint.hostname,
            "context_window": None if self.context_window == UNKNOWN_WINDOW else self.context_window,
            "log_probs": self.scale,
            "policy_version": self.policy_version,
        }

    async def aclose(self) -> None:
        """Close the connections. Idempotent."""
        if self._looked is not None:
            self._looked.cancel()
            await asyncio.gather(self._looked, return_exceptions=True)
        if self._asleep:
            with suppress(EngineError, TimeoutError):
                async with asyncio.timeout(CLOSING):
                    await self._endpoint.tell(self._wake_path, {})
        if self._weights is not None:
            shutil.rmtree(self._weights.folder.parent, ignore_errors=True)
        await self._endpoint.aclose()

    # -- implemented by subclasses

    async def _first_look(self) -> Scale:
        """Sample after :data:`PROBE`, check that ids are returned, and return the kind of log-probs."""
        raise NotImplementedError

    def _stream(self, request: GenerateRequest, checked: Checked) -> AsyncGenerator[Tokens, None]:
        """Stream one request, whose ``adapter`` is the server's name for it, without retries."""
        raise NotImplementedError

    def _why_not(self) -> str:
        """Why log-probs are left out, and what to do about it."""
        raise NotImplementedError

    async def _load_weights(self, weights: LoadedWeights) -> None:
        """Let the server load ``weights``, forget what it computed with others, and name its weights ``mark``."""
        raise NotImplementedError

    # -- shared

    @asynccontextmanager
    async def _changed(self) -> AsyncIterator[None]:
        """While the server is awake and no stream runs."""
        async with self._changing:
            await self._gate.close()
            try:
                if self._asleep:
                    await persist_call(partial(self._endpoint.tell, self._wake_path, {}), Patience(self._patience))
                    self._asleep = False
                    if self._wakes_empty and self._weights is not None:
                        self._weights.confirmed = False
                yield
            finally:
                self._reopen()

    def _reopen(self) -> None:
        if not self._asleep:
            self._gate.open()

    async def _load(self, weights: LoadedWeights) -> None:
        with self._readable:
            await persist_call(partial(self._load_weights, weights), Patience(self._patience))
        weights.confirmed, self.policy_version = True, weights.version

    async def _restore(self) -> None:
        """Load the weights again if the server has lost them."""
        if self._weights is not None and not self._weights.confirmed:
            async with self._changed():
                if not self._weights.confirmed:  # another stream may have done it
                    await self._load(self._weights)

    def _confirm(self, mark: Any) -> None:
        """Check the server's name for the weights that sample a stream. Raises :class:`~clawgym.errors.EngineError`."""
        if self._weights is None or mark == self._weights.mark:
            return
        self._weights.confirmed = False
        raise EngineError(
            f"{self._endpoint.host} samples with other weights ({clean(str(mark))!r}) than it was given "
            f"({self._weights.mark}): it was started again, or somebody else changed them; they are loaded again",
            status=503,
            retryable=True,
        )

    @contextmanager
    def _advised(self, start: str) -> Iterator[None]:
        """Add how the server has to be started to an error."""
        try:
            yield
        except EngineError as error:
            if error.retryable and error.status != 500:  # 500 reports an error of the request itself
                raise
            raise EngineError(
                f"{error}: this needs a server on this machine that was started with {start}", status=error.status
            ) from error

    @contextmanager
    def _serving(self, adapter: str | None) -> Iterator[tuple[str | None, int | None]]:
        """The server's name for ``adapter`` and the version of its weights, during one stream."""
        yield adapter, self.policy_version

    async def check(self) -> None:
        """Ask the server once whether it serves the model. Raises :class:`~clawgym.errors.EngineError` if it does not,
        or does not answer."""
        await self._look()

    async def _look(self) -> None:
        """Probe the server unless that was done; concurrent callers share one probe. Without retries."""
        if self._looked is None:
            self._looked = asyncio.create_task(self._look_readable())
            self._looked.add_done_callback(self._note_look)
        await asyncio.shield(self._looked)

    def _note_look(self, look: asyncio.Task[None]) -> None:
        if (look.cancelled() or look.exception()) and self._looked is look:
            self._looked = None  # the next call probes again

    async def _look_readable(self) -> None:
        with self._readable:
            await self._look_once()

    async def _look_once(self) -> None:
        listed = await self._endpoint.get("/v1/models")
        rows = [row for row in listed.get("data") or () if isinstance(row, dict)]
        mine = next((row for row in rows if self.model in (row.get("id"), row.get("root"))), None)
        if mine is None:
            names = ", ".join(repr(clean(str(row.get("id")))) for row in rows[:5]) or "nothing"
            raise EngineError(
                f"{self._endpoint.host} does not serve {self.model!r} but {names}: correct the model's name", status=404
            )
        if self.context_window == UNKNOWN_WINDOW:
            window = mine.get("max_model_len")
            if type(window) is not int or window < 1:
                raise EngineError(
                    f"{self._endpoint.host} does not say how long its context window is: pass context_window="
                )
            self.context_window = window
        self.scale = await self._first_look()

    def _exact(self, request: GenerateRequest) -> bool:
        """Whether log-probs are returned for ``request``; logs once why not."""
        if request.sampling.json_schema is not None:
            return False
        exact = is_exact(self.scale, request.sampling, cut_after=self._cut_after)
        if not exact and not self._warned and request.temperature > 0:
            self._warned = True
            _log.warning("%s: %s", self._endpoint.host, self._why_not())
        return exact

    def _failed(self, error: EngineError) -> None:
        """Probe again after a failure: the server may be restarted with other flags."""
        unreachable = isinstance(error, RequestFailed) and error.failure.code == UNREACHABLE
        if (unreachable or error.status == 503) and error.retryable:
            self._looked = None

    def _stripped(self, missing: str, since: str) -> TokenIdsStripped:
        return TokenIdsStripped(
            f"{self._endpoint.host} answers without {missing}, which training needs: use {since}, and connect to it "
            "directly or through a router that passes unknown fields on in both directions; to evaluate without "
            "token ids, use the openai engine",
            status=502,
        )


def _write_weights(folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    save_file({name: w.detach().contiguous() for name, w in weights.items()}, folder / "model.safetensors")
