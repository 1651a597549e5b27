"""Sandboxes with a started program: booted before they are needed, used for one episode.

Invariants: a sandbox serves one task only. At most ``booting`` programs start at the same time, because each start
occupies a core for seconds. Every sandbox that was created is handed out, kept as a spare or closed, also if the caller
that asked for it is cancelled.
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
from clawgym.gateway.request import SessionCredentials, reserve_session
from clawgym.gateway.server import Address, Gateway
from clawgym.sandbox.protocol import Backend, Sandbox, SandboxSpec

__all__ = ["PORT", "BootedSandbox", "SandboxSource", "WarmSandboxes"]

_log = logging.getLogger("clawgym.agents")
PORT = 9000
"""Port of the gateway inside each sandbox."""
_CONNECTIONS = 64
"""Most connections at the same time from one sandbox."""


@dataclass(eq=False)
class BootedSandbox:
    """A sandbox whose program has started and waits for a user message.

    ``opened`` is the reserved id and key of its gateway session, which opens when the episode begins.
    """

    sandbox: Sandbox
    running: Running
    opened: SessionCredentials
    address: Address
    gateway: Gateway

    async def disconnect(self) -> None:
        """Cut the program off from its model. Call it before the sandbox is stopped. Idempotent."""
        await self.gateway.unlisten(self.address)

    async def close(self) -> None:
        """Disconnect the program, end it and close the sandbox. Idempotent."""
        try:
            await self.disconnect()
            await self.running.aclose()
        finally:
            await self.sandbox.close()


@runtime_checkable
class SandboxSource(Protocol):
    """Makes the sandboxes of a black-box agent."""

    async def take(
        self, backend: Backend, spec: SandboxSpec, gateway: Gateway, *, tools: bool = False
    ) -> BootedSandbox:
        """Return a sandbox for one episode; the caller closes it. Raises as :meth:`Backend.create` does.

        ``tools``: the program is connected to the tools of the task (:attr:`ModelLink.tools_url`).
        """
        ...

    async def aclose(self) -> None:
        """Close the sandboxes that nobody has taken."""
        ...


@dataclass(eq=False)
class _Kind:
    """The sandboxes of one backend and one spec."""

    boot: Callable[[], Awaitable[BootedSandbox]]
    ready: deque[BootedSandbox] = field(default_factory=deque)
    waiting: deque[asyncio.Future[BootedSandbox]] = field(default_factory=deque)
    starting: int = 0
    requested: int = 0


class WarmSandboxes:
    """Boots sandboxes and keeps up to ``spare`` of them ready (:class:`SandboxSource`).

    Spares are kept only for the kind (backend and spec) that was requested last, and only from its second request on.
    """

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
        """Requests that got a sandbox that was ready."""

    @property
    def ready(self) -> int:
        """Number of sandboxes that are ready."""
        return sum(len(kind.ready) for kind in self._kinds.values())

    async def take(
        self, backend: Backend, spec: SandboxSpec, gateway: Gateway, *, tools: bool = False
    ) -> BootedSandbox:
        """See :class:`SandboxSource`."""
        if self._closed:
            raise _closed()
        kind = self._kind(backend, spec, gateway, tools)
        kind.requested += 1
        while kind.ready:
            booted = kind.ready.popleft()
            if not booted.running.ended:
                self.hits += 1
                self._fill(kind)
                return booted
            self._close(booted)
        request: asyncio.Future[BootedSandbox] = asyncio.get_running_loop().create_future()
        kind.waiting.append(request)
        self._fill(kind)
        try:
            return await request
        except asyncio.CancelledError:
            if request in kind.waiting:
                kind.waiting.remove(request)
            if request.done() and not request.cancelled() and request.exception() is None:
                self._deliver(kind, request.result())
            raise

    async def aclose(self) -> None:
        """Close the sandboxes that nobody has taken. Callers that wait for one get an InfraError."""
        self._closed = True
        for task in list(self._starting):
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        for kind in self._kinds.values():
            for request in kind.waiting:
                if not request.done():
                    request.set_exception(_closed())
            for booted in kind.ready:
                self._close(booted)
        self._kinds.clear()
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _kind(self, backend: Backend, spec: SandboxSpec, gateway: Gateway, tools: bool) -> _Kind:
        mounts = tuple(sorted((target, str(folder)) for target, folder in spec.mounts.items()))
        key = (id(backend), spec.image, spec.limits, tuple(sorted(spec.env.items())), spec.workdir, mounts, tools)
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = _Kind(lambda: self._boot(backend, spec, gateway, tools))
        self._kinds.move_to_end(key)
        for other in self._kinds.values():  # spares of other kinds make room
            while other is not kind and other.ready:
                self._close(other.ready.popleft())
        return kind

    def _fill(self, kind: _Kind) -> None:
        """Start sandboxes for the callers that wait and for the missing spares."""
        wanted = len(kind.waiting) + min(self._spare, kind.requested - 1) - len(kind.ready)
        for _ in range(wanted - kind.starting):
            kind.starting += 1
            _keep(self._starting, self._start(kind))

    def _close(self, booted: BootedSandbox) -> None:
        _keep(self._closing, booted.close())

    async def _start(self, kind: _Kind) -> None:
        try:
            async with self._cores:
                booted = await kind.boot()
        except Exception as error:  # also a bug in a Claw: a caller waits for this sandbox
            _log.info("a sandbox could not be booted: %r", error)
            while kind.waiting:
                request = kind.waiting.popleft()
                if not request.done():
                    request.set_exception(error)
                    break
            return
        finally:
            kind.starting -= 1
        self._deliver(kind, booted)

    def _deliver(self, kind: _Kind, booted: BootedSandbox) -> None:
        while kind.waiting:
            request = kind.waiting.popleft()
            if not request.done():
                request.set_result(booted)
                return
        if self._closed:
            self._close(booted)
        else:
            kind.ready.append(booted)

    async def _boot(self, backend: Backend, spec: SandboxSpec, gateway: Gateway, tools: bool) -> BootedSandbox:
        try:
            sandbox = await backend.create(self._claw.spec(spec))
        except SandboxUnavailable:
            raise
        except SandboxError as error:
            raise InfraError(
                f"no sandbox could be created for {self._claw.name} ({error}): run `clawgym doctor`"
            ) from error
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(sandbox.close)
            try:
                sock = await sandbox.listen(PORT)
                unix = None if sandbox.isolation.features["loopback"] else f"/dev/listen-{PORT}"
                address = await gateway.listen(sock=sock, connections=_CONNECTIONS)
                undo.push_async_callback(gateway.unlisten, address)
                opened = reserve_session()
                root = f"http://127.0.0.1:{PORT}/s/{opened.id}"
                link = ModelLink(
                    base_url=f"{root}/v1",
                    api_key=opened.secret,
                    model=gateway.model,
                    context_window=getattr(gateway.engine, "context_window", 128_000),
                    max_tokens=self._max_tokens,
                    socket_path=unix,
                    tools_url=f"{root}/mcp" if tools else None,
                )
                running = await self._claw.start(sandbox, link)
            except SandboxDied as error:
                raise InfraError(
                    f"the sandbox ended while {self._claw.name} started ({error}, {error.cause}): give it more memory"
                ) from error
            undo.pop_all()
        return BootedSandbox(sandbox, running, opened, address, gateway)


def _keep(tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.ensure_future(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


def _closed() -> InfraError:
    return InfraError("the agent was closed while a sandbox was requested: make another agent")
