"""The tools of a task with a desktop (:class:`ComputerTools`): one function, ``computer_use``, answered by pictures.

Invariants: the agent reaches the desktop's programs by mouse and keyboard alone; where the task has a site, its files
are in another box than the desktop; none of the boxes made here outlives :meth:`ComputerTools.aclose`.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np

from clawgym.desktop import COMPUTER_USE, RunningDesktop, parse, schema
from clawgym.desktop.browser import Browser
from clawgym.desktop.relay import Relay
from clawgym.errors import InfraError, MissingDependency, SandboxDied, SandboxError, SandboxUnavailable
from clawgym.records import Desktop, Image, Observation, Task, ToolCall
from clawgym.sandbox.protocol import Backend, Sandbox
from clawgym.tools._boxes import desktop_spec
from clawgym.tools.protocol import Refused, ignore

__all__ = ["ComputerTools", "encoded"]

_SITE_PORT = 8080


class ComputerTools:
    """See :class:`~clawgym.tools.protocol.Tools`."""

    def __init__(self, desktop: RunningDesktop, task: Task) -> None:
        spec = desktop.spec
        self.schemas: tuple[Mapping[str, Any], ...] = (schema(spec.width, spec.height),)
        self.desktop = desktop
        self.browser: Browser | None = None
        self._limits = task.limits
        self._relay: Relay | None = None
        self._own: Sandbox | None = None

    @classmethod
    async def open(cls, task: Task, box: Sandbox, backend: Backend) -> ComputerTools:
        """Start the desktop of ``task``: in ``box``, or beside it if it has a site.

        Raises as :func:`clawgym.tools.open_tools` does; then nothing of it is left.
        """
        _pillow()
        spec = task.desktop
        assert spec is not None
        patience = task.limits.setup_seconds * 0.8
        own: Sandbox | None = None
        relay: Relay | None = None
        desktop: RunningDesktop | None = None
        try:
            if spec.site is not None:
                own = await backend.create(desktop_spec(task))
                relay = await Relay.open(own, box, _SITE_PORT)
                await _serve(spec, box)
            desktop = await RunningDesktop.start(spec, own or box, patience)
            tools = cls(desktop, task)
            tools._relay, tools._own = relay, own
            if spec.page:
                tools.browser = await Browser.open(desktop, f"http://127.0.0.1:{_SITE_PORT}{spec.page}", patience)
        except BaseException:
            await _end(desktop, relay, own)
            raise
        return tools

    async def call_all(
        self,
        calls: Sequence[ToolCall],
        *,
        timeout: float | None = None,
        heard: Callable[[Observation], None] = ignore,
    ) -> list[Observation]:
        """See :class:`~clawgym.tools.protocol.Tools`: one after another; each answer has a picture of the screen."""
        observations: list[Observation] = []
        for call in calls:
            observation = await self.act(call, timeout=timeout)
            if not observation.content:
                observation = replace(observation, image=await self.look())
            observations.append(observation)
            heard(observation)
        return observations

    async def act(self, call: ToolCall, *, timeout: float | None = None) -> Observation:
        """Carry out one call, without a picture. Raises as :meth:`call_all` does."""
        if call.name != COMPUTER_USE:
            return Refused(f"[error: there is no tool {call.name[:200]!r}: use {COMPUTER_USE}]", call.id)
        seconds = self._limits.command_seconds if timeout is None else timeout
        spec = self.desktop.spec
        try:
            action = parse(call.arguments, spec.width, spec.height)
            if action.kind in ("done", "fail"):
                return Observation(action.kind, call.id)
            async with asyncio.timeout(seconds):
                await self.desktop.act(action)
                if self.browser is not None:
                    await self.browser.settle()
        except SandboxDied:
            raise
        except SandboxError as error:
            return Refused(f"[error: {error}]", call.id)
        except TimeoutError:
            return Observation(f"[error: {call.name} took over {seconds:g} seconds]", call.id)
        return Observation("", call.id)

    async def look(self) -> Image:
        """The screen, as a PNG file."""
        picture = await self.desktop.picture()
        data = await asyncio.to_thread(encoded, picture)
        return Image(hashlib.sha256(data).hexdigest(), data)

    async def aclose(self) -> None:
        """See :class:`~clawgym.tools.protocol.Tools`."""
        if self.browser is not None:
            await self.browser.aclose()
        await _end(self.desktop, self._relay, self._own)


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


async def _serve(spec: Desktop, box: Sandbox) -> None:
    """Start the site in its box, and wait until it listens. Raises :class:`InfraError`."""
    assert spec.site is not None
    command = ["sh", "-c", 'setsid "$@" </dev/null >/tmp/site.log 2>&1 &', "sh", *spec.site.argv]
    done = await box.exec(command, cwd=box.spec.workdir)
    for _ in range(1000 if done.exit_code == 0 else 0):
        try:
            (await box.connect(_SITE_PORT)).close()
            return
        except SandboxUnavailable:
            raise
        except SandboxError:
            await asyncio.sleep(0.01)
    log = await box.exec(["tail", "-c", "500", "/tmp/site.log"])
    raise InfraError(f"the site did not start ({log.text.strip() or 'it wrote nothing'}): look at desktop.site.argv")


async def _end(desktop: RunningDesktop | None, relay: Relay | None, own: Sandbox | None) -> None:
    try:
        if desktop is not None:
            await desktop.aclose()
        if relay is not None:
            await relay.aclose()
    finally:
        if own is not None:
            await own.close()
