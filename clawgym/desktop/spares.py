"""Desktops made ahead (:class:`SpareDesktops`): a new episode gets one that stands already.

Invariant: a spare is a fresh sandbox that nobody has acted in; whoever takes it is the only one to have it.
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

__all__ = ["SITE", "SITE_PORT", "SpareDesktops", "Standing", "standing"]

SITE_PORT = 8080
"""Where a site listens, in its own sandbox and, by a relay, in that of the browser."""
SITE = f"http://127.0.0.1:{SITE_PORT}"
_EMPTY = "/.empty"

_LATER = 0.5
"""Seconds after which the next one is begun: until then programs start in the one that was given away."""
_PATIENCE = 60.0
"""Seconds for one that nobody waits for."""


@dataclass(frozen=True)
class Standing:
    """What stands in a sandbox for a desktop; made by :func:`standing`, whose caller closes it."""

    desktop: RunningDesktop
    browser: Browser | None = None
    """On an empty page, where the sandbox is for one."""
    relay: Relay | None = None
    """Of the port at which the browser asks for the site, which leads nowhere yet."""

    async def aclose(self) -> None:
        """Let go of it; what runs ends with its sandbox. Idempotent."""
        if self.browser is not None:
            await self.browser.aclose()
        await self.desktop.aclose()
        if self.relay is not None:
            await self.relay.aclose()


class SpareDesktops:
    """A :class:`~clawgym.sandbox.Backend` over another one, whose sandboxes for desktops stand ready.

    What was asked for is made again beside the work, one at a time and only while nobody waits for a desktop; at most
    ``most`` are kept. All have screens of ``width`` x ``height`` pixels.
    """

    def __init__(self, backend: Backend, width: int, height: int, most: int) -> None:
        self.name = backend.name
        self._backend = backend
        self._size = width, height
        self._most = most
        self._spares: list[tuple[Sandbox, Standing]] = []
        """The oldest first."""
        self._given: dict[str, tuple[Sandbox, Standing]] = {}
        """Id of a sandbox -> what stands in it and was not asked for yet."""
        self._ordered: list[SandboxSpec] = []
        self._waiting = 0
        self._taken = 0.0
        """When one was last given away, by the monotonic clock."""
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

    def claim(self, sandbox: Sandbox) -> Standing | None:
        """What stands in ``sandbox``, once; whoever asks closes it."""
        return self._given.pop(sandbox.id, (sandbox, None))[1]

    async def _make(self, spec: SandboxSpec) -> tuple[Sandbox, Standing]:
        sandbox = await self._backend.create(spec)
        try:
            return sandbox, await standing(sandbox, self._backend, *self._size, _PATIENCE)
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
                continue  # it is told to whoever needs one and waits for it
            if len(self._spares) > self._most:
                await _close(*self._spares.pop(0))

    async def aclose(self) -> None:
        """Close what nobody has taken. The backend below stays."""
        self._ordered.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        spares, self._spares = [*self._spares, *self._given.values()], []
        self._given.clear()
        for spare in spares:
            await _close(*spare)


async def _close(sandbox: Sandbox, standing: Standing) -> None:
    with contextlib.suppress(SandboxError, InfraError):
        await standing.aclose()
        await sandbox.close()


async def standing(sandbox: Sandbox, backend: Backend, width: int, height: int, patience: float) -> Standing:
    """The desktop of a fresh ``sandbox`` of ``backend``, and its browser where the sandbox is for one: what stands
    there already, or else what is started now. Raises as :meth:`RunningDesktop.start` does.
    """
    if isinstance(backend, SpareDesktops) and (ready := backend.claim(sandbox)) is not None:
        return ready
    made = Standing(await RunningDesktop.start(width, height, sandbox, patience))
    if not browser_files().keys() <= sandbox.spec.readonly.keys():
        return made
    try:
        made = replace(made, relay=await Relay.open(sandbox, SITE_PORT))
        return replace(made, browser=await Browser.start(made.desktop, f"{SITE}{_EMPTY}", patience))
    except BaseException:
        await made.aclose()
        raise
