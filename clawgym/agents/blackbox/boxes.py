"""Boxes with a program started in them: made before they are needed, used once.

Invariant: a box that has seen a task never serves another; at most ``booting`` programs start at once, since a start is
seconds of one core; whatever happens to who asked, a box that was made is handed out, kept as a spare, or closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from clawgym.agents.blackbox.protocol import Claw, ModelLink, Running
from clawgym.errors import InfraError, SandboxDied, SandboxError, SandboxUnavailable
from clawgym.gateway.server import Address, Gateway
from clawgym.gateway.sessions import Opened, reserve
from clawgym.sandbox.protocol import Backend, Sandbox, SandboxSpec

__all__ = ["PORT", "BoxSource", "Booted", "Boxes"]

_log = logging.getLogger("clawgym.agents")
PORT = 9000
"""Of the gateway, inside every box."""
_CONNECTIONS = 64
"""At once, from one box."""


@dataclass(eq=False)
class Booted:
    """A box whose program waits for its user. Its session is opened when its episode begins."""

    box: Sandbox
    running: Running
    opened: Opened
    address: Address
    gateway: Gateway

    async def hang_up(self) -> None:
        """The program reaches its model no more. Before the box is stopped: the socket ends with it. Idempotent."""
        await self.gateway.unlisten(self.address)

    async def close(self) -> None:
        """Free everything. Idempotent."""
        try:
            await self.hang_up()
            await self.running.aclose()
        finally:
            await self.box.close()


@runtime_checkable
class BoxSource(Protocol):
    """Where the boxes of a black box come from."""

    async def take(self, backend: Backend, spec: SandboxSpec, gateway: Gateway) -> Booted:
        """A box for one episode; whoever takes it closes it. Raises as :meth:`Backend.create` does."""
        ...

    async def aclose(self) -> None:
        """Close what nobody has taken."""
        ...


@dataclass(eq=False)
class _Kind:
    """Boxes of one backend and one spec."""

    boot: Callable[[], Awaitable[Booted]]
    ready: deque[Booted] = field(default_factory=deque)
    waiting: deque[asyncio.Future[Booted]] = field(default_factory=deque)
    starting: int = 0
    asked: int = 0


class Boxes:
    """Hands out booted boxes. ``spare`` are kept ready of the kind that was asked for last, and only once it was asked
    for more than once."""

    def __init__(self, claw: Claw, *, spare: int, booting: int, max_tokens: int) -> None:
        self._claw = claw
        self._spare = spare
        self._max_tokens = max_tokens
        self._cores = asyncio.Semaphore(booting)
        self._kinds: OrderedDict[Hashable, _Kind] = OrderedDict()
        self._starting: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False
        self.hits = 0
        """Boxes that were ready when they were asked for."""

    @property
    def ready(self) -> int:
        """How many boxes wait."""
        return sum(len(kind.ready) for kind in self._kinds.values())

    async def take(self, backend: Backend, spec: SandboxSpec, gateway: Gateway) -> Booted:
        """A box for one episode; whoever takes it closes it. Raises as :meth:`Backend.create` does."""
        if self._closed:
            raise _closed()
        kind = self._kind(backend, spec, gateway)
        kind.asked += 1
        while kind.ready:
            booted = kind.ready.popleft()
            if not booted.running.ended:
                self.hits += 1
                self._fill(kind)
                return booted
            self._close(booted)
        ours: asyncio.Future[Booted] = asyncio.get_running_loop().create_future()
        kind.waiting.append(ours)
        self._fill(kind)
        try:
            return await ours
        except asyncio.CancelledError:
            if ours in kind.waiting:
                kind.waiting.remove(ours)
            if ours.done() and not ours.cancelled() and ours.exception() is None:
                self._deliver(kind, ours.result())
            raise

    async def aclose(self) -> None:
        """Close what nobody has taken. Who waits for a box gets an InfraError."""
        self._closed = True
        for task in list(self._starting):
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        for kind in self._kinds.values():
            for asked in kind.waiting:
                if not asked.done():
                    asked.set_exception(_closed())
            for booted in kind.ready:
                self._close(booted)
        self._kinds.clear()
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _kind(self, backend: Backend, spec: SandboxSpec, gateway: Gateway) -> _Kind:
        mounts = tuple(sorted((target, str(folder)) for target, folder in spec.mounts.items()))
        key = (id(backend), spec.image, spec.limits, tuple(sorted(spec.env.items())), spec.workdir, mounts)
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = _Kind(lambda: self._boot(backend, spec, gateway))
        self._kinds.move_to_end(key)
        for other in self._kinds.values():  # what was ready for others makes room
            while other is not kind and other.ready:
                self._close(other.ready.popleft())
        return kind

    def _fill(self, kind: _Kind) -> None:
        """Start what is missing."""
        wanted = len(kind.waiting) + min(self._spare, kind.asked - 1) - len(kind.ready)
        for _ in range(wanted - kind.starting):
            kind.starting += 1
            _keep(self._starting, self._start(kind))

    def _close(self, booted: Booted) -> None:
        _keep(self._closing, booted.close())

    async def _start(self, kind: _Kind) -> None:
        try:
            async with self._cores:
                booted = await kind.boot()
        except Exception as error:  # a mistake in a Claw too: somebody waits for this box
            _log.info("a box could not be made ready: %r", error)
            while kind.waiting:
                asked = kind.waiting.popleft()
                if not asked.done():
                    asked.set_exception(error)
                    break
            return
        finally:
            kind.starting -= 1
        self._deliver(kind, booted)

    def _deliver(self, kind: _Kind, booted: Booted) -> None:
        while kind.waiting:
            asked = kind.waiting.popleft()
            if not asked.done():
                asked.set_result(booted)
                return
        if self._closed:
            self._close(booted)
        else:
            kind.ready.append(booted)

    async def _boot(self, backend: Backend, spec: SandboxSpec, gateway: Gateway) -> Booted:
        try:
            box = await backend.create(self._claw.spec(spec))
        except SandboxUnavailable:
            raise
        except SandboxError as error:
            raise InfraError(f"{self._claw.name}: no box for it ({error}): run `clawgym doctor`") from error
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(box.close)
            try:
                sock = await box.listen(PORT)
                unix = None if box.isolation.features["loopback"] else f"/dev/listen-{PORT}"
                address = await gateway.listen(sock=sock, connections=_CONNECTIONS)
                undo.push_async_callback(gateway.unlisten, address)
                opened = reserve()
                link = ModelLink(
                    base_url=f"http://127.0.0.1:{PORT}/s/{opened.id}/v1",
                    api_key=opened.secret,
                    model=gateway.model,
                    context_window=getattr(gateway.engine, "context_window", 128_000),
                    max_tokens=self._max_tokens,
                    socket_path=unix,
                )
                running = await self._claw.start(box, link)
            except SandboxDied as error:
                raise InfraError(
                    f"{self._claw.name} died in its box as it started ({error}, {error.cause}): give it more memory"
                ) from error
            undo.pop_all()
        return Booted(box, running, opened, address, gateway)


def _keep(tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.ensure_future(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


def _closed() -> InfraError:
    return InfraError("the agent was closed while a box was asked of it: make another agent")
