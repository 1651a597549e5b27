"""The thread that runs a model: admission to the batch, weight changes, and delivery of ids.

Invariants: a request is sampled by one version of the weights. Weights change only when no request runs; an adapter is
chosen when a request starts, and loaded adapters never change. Every accepted request ends with a finish reason or an
error, whatever happens to the thread.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from clawgym.engines._batch import OutOfMemory, RunningBatch, Sequence
from clawgym.engines._stream import Piece, Stream, deliver
from clawgym.engines.lora import Adapter
from clawgym.errors import EngineError

__all__ = ["Request", "ModelWorker"]

_T = TypeVar("_T")
BURST_SECONDS = 0.01
FEW = 4
"""With more requests than this, ids are delivered only every ``BURST_SECONDS``: waking readers takes time."""
LOOK_AHEAD = 64
"""Most waiting requests that are skipped to find one that can start."""
CLOSED = "the engine was closed: make a new one"


@dataclass(eq=False, slots=True, kw_only=True)
class Request(Sequence):
    """A sequence with a reader."""

    stream: Stream
    max_tokens: int
    stop_ids: frozenset[int]
    adapter_name: str | None
    cancelled: bool = False
    version: int | None = None
    """Version of its weights, once it runs."""
    unsent: tuple[list[int], list[float]] = field(default_factory=lambda: ([], []))


@dataclass(slots=True)
class _Change:
    """A function to call between two steps. ``alone``: when no request runs; meanwhile none is started."""

    do: Callable[[], Any]
    alone: bool
    done: Future[Any]


class ModelWorker:
    """Runs ``batch`` in a thread of its own. Public methods are thread-safe, except where noted."""

    def __init__(self, batch: RunningBatch[Request], version: int) -> None:
        self.batch = batch
        self.version = version
        self.adapters: dict[str, Adapter] = {}
        self.unusable: str | None = None
        """Why sampling is impossible until the weights are set again; None if it is possible."""
        self._root = batch.prefixes.root()
        self._inbox: deque[Request | _Change] = deque()
        self._wake = threading.Condition()
        self._closed: str | None = None
        self._cause: BaseException | None = None
        self._waiting: deque[Request] = deque()
        self._changes: deque[_Change] = deque()
        self._pieces: dict[asyncio.AbstractEventLoop, list[tuple[Stream, Piece]]] = {}
        self._unsent: set[Request] = set()
        self._sent_at = 0.0
        self._thread = threading.Thread(target=self._run, name="clawgym-transformers", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Accept ``request``, whose stream gets the sampled ids. Raises :class:`EngineError` if the thread has
        ended."""
        self._put(request)

    def change(self, do: Callable[[], _T], *, alone: bool = False) -> Future[_T]:
        """Call ``do`` between two steps; with ``alone``, once all running requests have ended."""
        done: Future[_T] = Future()
        self._put(_Change(do, alone, done))
        return done

    def stop(self, why: str = CLOSED) -> None:
        """End the thread and wait for it. Pending requests fail with ``why``."""
        with self._wake:
            self._closed = self._closed or why
            self._wake.notify()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def occupancy(self) -> dict[str, int]:
        """Numbers of waiting and running requests, of tokens with memory for running ones, and of cached tokens."""
        waiting = len(self._waiting) + sum(isinstance(i, Request) for i in tuple(self._inbox))
        batch = self.batch
        return {"waiting": waiting, "running": len(batch), "held": batch.held, "kept": batch.prefixes.tokens}

    def new_weights(self, version: int) -> None:
        """Note new weights. Called by a change with ``alone``, after it has set them."""
        self.version, self.unusable = version, None
        self.batch.forget()

    def set_adapter(self, name: str, adapter: Adapter | None) -> None:
        """Set or remove an adapter; called by a change. Requests that run with the earlier adapter keep it."""
        earlier = self.adapters.pop(name, None)
        if earlier is not None:
            self.batch.prefixes.drop(earlier.root)
        if adapter is not None:
            self.adapters[name] = adapter

    def _put(self, item: Request | _Change) -> None:
        with self._wake:
            if self._closed:
                raise EngineError(self._closed, status=500) from self._cause
            self._inbox.append(item)
            self._wake.notify()

    def _run(self) -> None:
        why = CLOSED
        try:
            while self._take():
                self._make_changes()
                with torch.inference_mode():
                    self._drop_cancelled()
                    self._admit()
                    self._step()
                self._send(at_once=len(self.batch) <= FEW)
        except BaseException as error:
            why = f"the transformers engine broke ({type(error).__name__}: {error}): make a new one"
            self._cause = error
        finally:
            self._end(why)

    def _take(self) -> bool:
        """Accept new items; wait if there is nothing to do. Returns False when the thread should end."""
        with self._wake:
            while not (self._inbox or self._closed or self._waiting or self._changes or len(self.batch)):
                self._wake.wait()
            if self._closed:
                return False
            items, self._inbox = self._inbox, deque()
        for item in items:
            if isinstance(item, Request):
                self._waiting.append(item)
            else:
                self._changes.append(item)
        return True

    def _end(self, why: str) -> None:
        with self._wake:
            why = self._closed = self._closed or why
            left, self._inbox = self._inbox, deque()
        requests = [i for i in left if isinstance(i, Request)] + [*self._waiting, *self.batch.sequences]

        def ended() -> EngineError:
            error = EngineError(why, status=500)
            error.__cause__ = self._cause
            return error

        for change in [i for i in left if isinstance(i, _Change)] + [*self._changes]:
            if change.done.set_running_or_notify_cancel():
                change.done.set_exception(ended())
        for request in requests:
            self._fail(request, ended())
        self._send(at_once=True)
        self._waiting.clear()
        self._changes.clear()
        self.batch.close()

    def _make_changes(self) -> None:
        while self._changes and not (self._changes[0].alone and len(self.batch)):
            change = self._changes.popleft()
            if not change.done.set_running_or_notify_cancel():
                continue
            try:
                result = change.do()
            except Exception as error:
                change.done.set_exception(error)
            else:
                change.done.set_result(result)

    def _drop_cancelled(self) -> None:
        for request in self.batch.sequences:
            if request.cancelled:
                self.batch.leave(request)
        if any(r.cancelled for r in self._waiting):
            self._waiting = deque(r for r in self._waiting if not r.cancelled)

    def _admit(self) -> None:
        if any(c.alone for c in self._changes):
            return
        later: list[Request] = []
        while self._waiting and self.batch.has_room and len(later) < LOOK_AHEAD:
            if not self.batch.fits(self._waiting[0]):
                break
            request = self._waiting.popleft()
            try:
                if not self._begin(request):
                    later.append(request)
            except EngineError as error:
                self._fail(request, error)
            except OutOfMemory:
                self._fail(request, _no_memory(request))
        self._waiting.extendleft(reversed(later))

    def _begin(self, request: Request) -> bool:
        if self.unusable:
            raise EngineError(self.unusable, retryable=True, status=503)
        adapter = None
        if request.adapter_name is not None:
            adapter = self.adapters.get(request.adapter_name)
            if adapter is None:
                raise EngineError(f"adapter {request.adapter_name!r} was unloaded: load it again", status=400)
        if not self.batch.begin(request, adapter, adapter.root if adapter else self._root):
            return False
        request.version = adapter.version if adapter else self.version
        return True

    def _step(self) -> None:
        try:
            sampled = self.batch.step()
        except OutOfMemory as error:
            victim = error.sequence
            assert isinstance(victim, Request)
            self.batch.leave(victim, keep=False)
            self._fail(victim, _no_memory(victim))
            return
        for request, logprob in sampled:
            if not math.isfinite(logprob):
                self.batch.leave(request, keep=False)
                self._fail(
                    request,
                    EngineError("the model's logits are not finite: its weights are damaged, set others", status=500),
                )
                continue
            token = request.ids[-1]
            ids, logprobs = request.unsent
            ids.append(token)
            logprobs.append(logprob)
            self._unsent.add(request)
            stopped = token in request.stop_ids
            if stopped or len(request.ids) - request.prompt == request.max_tokens:
                self.batch.leave(request)
                self._pass(
                    request, Piece(ids, logprobs, request.version, request.cached, "stop" if stopped else "length")
                )

    def _fail(self, request: Request, error: EngineError) -> None:
        ids, logprobs = request.unsent
        self._pass(request, Piece(ids, logprobs, request.version, request.cached, error=error))

    def _pass(self, request: Request, piece: Piece) -> None:
        self._unsent.discard(request)
        request.unsent = ([], [])
        self._pieces.setdefault(request.stream.loop, []).append((request.stream, piece))

    def _send(self, *, at_once: bool) -> None:
        now = time.monotonic()
        if at_once or now - self._sent_at >= BURST_SECONDS:
            self._sent_at = now
            for request in list(self._unsent):
                ids, logprobs = request.unsent
                self._pass(request, Piece(ids, logprobs, request.version, request.cached))
        pieces, self._pieces = self._pieces, {}
        for loop, batch in pieces.items():
            try:
                loop.call_soon_threadsafe(deliver, batch)
            except RuntimeError:  # the event loop was closed
                for request in self.batch.sequences:
                    request.cancelled = request.cancelled or request.stream.loop is loop


def _no_memory(request: Request) -> EngineError:
    return EngineError(
        f"no memory left for a sequence of {len(request.ids)} tokens: ask again when less runs, or lower max_batch, "
        "kv_tokens or context_window",
        retryable=len(request.ids) == request.prompt,
        status=503,
    )
