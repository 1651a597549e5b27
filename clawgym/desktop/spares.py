"""Desktops started in advance (:class:`SpareDesktops`), so that a new episode does not have to wait for one.

Invariant: a spare is a fresh sandbox in which no agent has acted, and is given to one episode only.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, replace

from clawgym.desktop.browser import Browser, browser_files
from clawgym.desktop.desktop import FILES_DIR, RunningDesktop
from clawgym.desktop.relay import Relay
from clawgym.errors import InfraError, SandboxError
from clawgym.sandbox.protocol import Backend, Isolation, Sandbox, SandboxSpec, Snapshot

__all__ = ["SITE", "SITE_PORT", "SpareDesktops", "StartedDesktop", "start_desktop"]

SITE_PORT = 8080
"""The port of a site, in its own sandbox and, through a relay, in the browser's sandbox."""
SITE = f"http://127.0.0.1:{SITE_PORT}"
_EMPTY = "/.empty"

_LATER = 0.5
"""Seconds to wait before the next spare is started: programs are starting in the one given away."""
_PATIENCE = 60.0
"""Time limit to start a spare, in seconds."""


@dataclass(frozen=True)
class StartedDesktop:
    """A started desktop with its browser; see :func:`start_desktop`. The caller closes it."""

    desktop: RunningDesktop
    browser: Browser | None = None
    """The browser, on an empty page, if the sandbox has the files for one."""
    relay: Relay | None = None
    """The relay of the site's port in the browser's sandbox, without a target yet."""

    async def aclose(self) -> None:
        """Close the connections; the programs end with their sandbox. Idempotent."""
        if self.browser is not None:
            await self.browser.aclose()
        await self.desktop.aclose()
        if self.relay is not None:
            await self.relay.aclose()


class SpareDesktops:
    """Wraps a :class:`~clawgym.sandbox.Backend` and keeps up to ``most`` started desktops ready.

    Spares are made of the spec requested last, one at a time, and only while no caller waits for a desktop. All screens
    have ``width`` by ``height`` pixels.
    """

    def __init__(self, backend: Backend, width: int, height: int, most: int) -> None:
        self.name = backend.name
        self._backend = backend
        self._size = width, height
        self._most = most
        self._spares: list[tuple[Sandbox, StartedDesktop]] = []
        """The spares, oldest first."""
        self._given: dict[str, tuple[Sandbox, StartedDesktop]] = {}
        """Sandbox id -> its started desktop, until it is claimed."""
        self._ordered: list[SandboxSpec] = []
        self._waiting = 0
        self._taken = 0.0
        """Monotonic time when a spare was last given away."""
        self._task: asyncio.Task[None] | None = None

    async def probe(self) -> Isolation:
        return await self._backend.probe()

    async def fork(self, snapshot: Snapshot, spec: SandboxSpec | None = None) -> Sandbox:
        return await self._backend.fork(snapshot, spec)

    async def drop(self, snapshot: Snapshot) -> None:
        await self._backend.drop(snapshot)

    async def create(self, spec: SandboxSpec) -> Sandbox:
        if FILES_DIR not in spec.readonly:
            return await self._backend.create(spec)
        spare = next((spare for spare in self._spares if spare[0].spec == spec), None)
        if spare is None:
            self._waiting += 1
            try:
                spare = await self._make(spec)
            finally:
                self._waiting -= 1
        else:
            self._spares.remove(spare)
        self._taken = time.monotonic()
        sandbox, _ = self._given[spare[0].id] = spare
        self._ordered = [*self._ordered, spec][-self._most :]
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._refill())
        return sandbox

    def claim(self, sandbox: Sandbox) -> StartedDesktop | None:
        """The started desktop in ``sandbox``, for the first caller, who closes it; None if there is none."""
        return self._given.pop(sandbox.id, (sandbox, None))[1]

    async def _make(self, spec: SandboxSpec) -> tuple[Sandbox, StartedDesktop]:
        sandbox = await self._backend.create(spec)
        try:
            return sandbox, await start_desktop(sandbox, self._backend, *self._size, _PATIENCE)
        except BaseException:
            await sandbox.close()
            raise

    async def _refill(self) -> None:
        while self._ordered:
            if self._waiting or time.monotonic() < self._taken + _LATER:
                await asyncio.sleep(0.05)
                continue
            spec = self._ordered.pop(0)
            try:
                self._spares.append(await self._make(spec))
            except (SandboxError, InfraError):
                continue  # the next caller starts one and sees the error
            if len(self._spares) > self._most:
                await _close(*self._spares.pop(0))

    async def aclose(self) -> None:
        """Close the unused spares. The wrapped backend stays open."""
        self._ordered.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        spares, self._spares = [*self._spares, *self._given.values()], []
        self._given.clear()
        for spare in spares:
            await _close(*spare)


async def _close(sandbox: Sandbox, started: StartedDesktop) -> None:
    with contextlib.suppress(SandboxError, InfraError):
        await started.aclose()
        await sandbox.close()


async def start_desktop(sandbox: Sandbox, backend: Backend, width: int, height: int, patience: float) -> StartedDesktop:
    """The desktop of a fresh ``sandbox`` of ``backend``, with a browser if the sandbox has the files for one.

    Takes the one already started in a spare, or starts it now. Raises the errors of :meth:`RunningDesktop.start`.
    """
    if isinstance(backend, SpareDesktops) and (ready := backend.claim(sandbox)) is not None:
        return ready
    made = StartedDesktop(await RunningDesktop.start(width, height, sandbox, patience))
    if not browser_files().keys() <= sandbox.spec.readonly.keys():
        return made
    try:
        made = replace(made, relay=await Relay.open(sandbox, SITE_PORT))
        return replace(made, browser=await Browser.start(made.desktop, f"{SITE}{_EMPTY}", patience))
    except BaseException:
        await made.aclose()
        raise
