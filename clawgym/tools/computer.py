"""The tools of a task with a desktop (:class:`ComputerTools`): one function ``computer_use``, which returns
screenshots.

Invariants: the agent controls the desktop's programs by mouse and keyboard only. A site's files are in another sandbox
than the desktop. No sandbox made here outlives :meth:`ComputerTools.aclose`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np

from clawgym.desktop import COMPUTER_USE, parse, schema
from clawgym.desktop.spares import SITE, SITE_PORT, StartedDesktop, start_desktop
from clawgym.errors import InfraError, MissingDependency, SandboxDied, SandboxError, SandboxUnavailable
from clawgym.records import Image, Observation, Site, Task, ToolCall
from clawgym.sandbox.protocol import Backend, Sandbox
from clawgym.tools._sandboxes import desktop_spec
from clawgym.tools.protocol import CallRefused, ignore

__all__ = ["ComputerTools", "encoded"]

_DEEPEST = 40
_CLOSING = 20.0
"""Seconds for one closing step."""


class ComputerTools:
    """The desktop's tools; see :class:`~clawgym.tools.protocol.Tools`."""

    def __init__(self, started: StartedDesktop, own: Sandbox | None, task: Task) -> None:
        self.desktop = started.desktop
        self.browser = started.browser
        screen = self.desktop.screen
        self.schemas: tuple[Mapping[str, Any], ...] = (schema(screen.width, screen.height),)
        self._limits = task.limits
        self._closing = task.desktop.closing if task.desktop else ()
        self._started = started
        self._own = own
        """The desktop's sandbox, if it is not the episode's."""

    @classmethod
    async def open(cls, task: Task, sandbox: Sandbox, backend: Backend) -> ComputerTools:
        """Start the desktop of ``task``: in ``sandbox``, or in a sandbox of its own if the task has a site.

        Raises the errors of :func:`clawgym.tools.open_tools`; then nothing is left running.
        """
        _pillow()
        spec = task.desktop
        assert spec is not None
        patience = task.limits.setup_seconds * 0.8
        own: Sandbox | None = None
        started: StartedDesktop | None = None
        try:
            if spec.site is not None:
                await _serve(spec.site, sandbox)
                own = await backend.create(desktop_spec(task))
            started = await start_desktop(own or sandbox, backend, spec.width, spec.height, patience)
            if spec.site is not None:
                await _listens(sandbox)
            if started.relay is not None:
                started.relay.lead_to(sandbox)
            if started.browser is not None:
                await started.browser.show(f"{SITE}{spec.page}", patience)
            await started.desktop.run(spec.programs, patience)
            for step in spec.opening:
                await started.desktop.take(step, patience)
        except BaseException:
            await _end(started, own)
            raise
        return cls(started, own, task)

    async def call_all(
        self,
        calls: Sequence[ToolCall],
        *,
        timeout: float | None = None,
        on_observation: Callable[[Observation], None] = ignore,
    ) -> list[Observation]:
        """See :class:`~clawgym.tools.protocol.Tools`. Runs calls in order; each observation has a screenshot."""
        observations: list[Observation] = []
        for call in calls:
            observation = await self.act(call, timeout=timeout)
            if not observation.content:
                observation = replace(observation, image=await self.look())
            observations.append(observation)
            on_observation(observation)
        return observations

    async def act(self, call: ToolCall, *, timeout: float | None = None) -> Observation:
        """Run one call, without a screenshot. Raises the errors of :meth:`call_all`."""
        if call.name != COMPUTER_USE:
            return CallRefused(f"[error: there is no tool {call.name[:200]!r}: use {COMPUTER_USE}]", call.id)
        seconds = self._limits.command_seconds if timeout is None else timeout
        screen = self.desktop.screen
        try:
            action = parse(call.arguments, screen.width, screen.height)
            if action.kind in ("done", "fail"):
                return Observation(action.kind, call.id)
            async with asyncio.timeout(seconds):
                await self.desktop.act(action)
                if self.browser is not None:
                    await self.browser.settle()
        except SandboxDied:
            raise
        except SandboxError as error:
            return CallRefused(f"[error: {error}]", call.id)
        except TimeoutError:
            return Observation(f"[error: {call.name} took over {seconds:g} seconds]", call.id)
        return Observation("", call.id)

    async def finish(self) -> None:
        """Take the closing steps of the task. One that is impossible, as after the agent closed a window, is skipped.

        Raises :class:`SandboxDied`.
        """
        for step in self._closing:
            try:
                async with asyncio.timeout(_CLOSING):
                    await self.desktop.take(step, _CLOSING)
            except SandboxDied:
                raise
            except (SandboxError, InfraError, TimeoutError):
                continue

    async def look(self) -> Image:
        """The screen, as a PNG file."""
        picture = await self.desktop.picture()
        data = await asyncio.to_thread(encoded, picture)
        return Image(hashlib.sha256(data).hexdigest(), data)

    async def tree(self) -> str:
        """The accessibility tree as text.

        One line per node: two spaces per level, role, name, and the value if it has one. For native programs only the
        titles of the windows, from the bottom up. Raises :class:`SandboxDied`.
        """
        if self.browser is None:
            return "\n".join(
                f"window {json.dumps(title, ensure_ascii=False)}" for title in await self.desktop.screen.titles()
            )
        try:
            nodes = await self.browser.tree()
        except SandboxDied:
            raise
        except SandboxError:
            return ""
        return "\n".join(map(_line, nodes))

    async def aclose(self) -> None:
        """See :class:`~clawgym.tools.protocol.Tools`."""
        await _end(self._started, self._own)


def _line(node: Mapping[str, Any]) -> str:
    name, value = (json.dumps(node[key], ensure_ascii=False) for key in ("name", "value"))
    return "  " * min(node["depth"], _DEEPEST) + f"{node['role']} {name}" + (f" = {value}" if node["value"] else "")


def encoded(picture: np.ndarray) -> bytes:
    """``picture`` (uint8 of shape (height, width, 3)) as a PNG file: the same bytes for the same pixels."""
    import io

    buffer = io.BytesIO()
    _pillow().fromarray(picture).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def _pillow() -> Any:
    try:
        return import_module("PIL.Image")
    except ImportError as error:
        raise MissingDependency("desktops need Pillow: pip install 'clawgym[gui]'") from error


async def _serve(site: Site, sandbox: Sandbox) -> None:
    """Start the site in its sandbox."""
    command = ["sh", "-c", 'setsid "$@" </dev/null >/tmp/site.log 2>&1 &', "sh", *site.argv]
    await sandbox.exec(command, cwd=sandbox.spec.workdir)


async def _listens(sandbox: Sandbox) -> None:
    """Wait for the site. Raises :class:`InfraError`."""
    for _ in range(1000):
        try:
            (await sandbox.connect(SITE_PORT)).close()
            return
        except SandboxUnavailable:
            raise
        except SandboxError:
            await asyncio.sleep(0.01)
    log = await sandbox.exec(["tail", "-c", "500", "/tmp/site.log"])
    raise InfraError(f"the site did not start ({log.text.strip() or 'it wrote nothing'}): look at desktop.site.argv")


async def _end(started: StartedDesktop | None, own: Sandbox | None) -> None:
    try:
        if started is not None:
            await started.aclose()
    finally:
        if own is not None:
            await own.close()
