"""The tools of a task with a desktop (:class:`ComputerTools`): one function, ``computer_use``, answered by pictures.

Invariants: the agent reaches the desktop's programs by mouse and keyboard alone; where the task has a site, its files
are in another sandbox than the desktop; none of the sandboxes made here outlives :meth:`ComputerTools.aclose`.
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
from clawgym.desktop.spares import SITE, SITE_PORT, Standing, standing
from clawgym.errors import InfraError, MissingDependency, SandboxDied, SandboxError, SandboxUnavailable
from clawgym.records import Image, Observation, Site, Task, ToolCall
from clawgym.sandbox.protocol import Backend, Sandbox
from clawgym.tools._sandboxes import desktop_spec
from clawgym.tools.protocol import Refused, ignore

__all__ = ["ComputerTools", "encoded"]

_DEEPEST = 40


class ComputerTools:
    """See :class:`~clawgym.tools.protocol.Tools`."""

    def __init__(self, standing: Standing, own: Sandbox | None, task: Task) -> None:
        self.desktop = standing.desktop
        self.browser = standing.browser
        screen = self.desktop.screen
        self.schemas: tuple[Mapping[str, Any], ...] = (schema(screen.width, screen.height),)
        self._limits = task.limits
        self._standing = standing
        self._own = own
        """The sandbox of a desktop that has another than the episode's."""

    @classmethod
    async def open(cls, task: Task, sandbox: Sandbox, backend: Backend) -> ComputerTools:
        """Start the desktop of ``task``: in ``sandbox``, or beside it if it has a site.

        Raises as :func:`clawgym.tools.open_tools` does; then nothing of it is left.
        """
        _pillow()
        spec = task.desktop
        assert spec is not None
        patience = task.limits.setup_seconds * 0.8
        own: Sandbox | None = None
        stands: Standing | None = None
        try:
            if spec.site is not None:
                await _serve(spec.site, sandbox)
                own = await backend.create(desktop_spec(task))
            stands = await standing(own or sandbox, backend, spec.width, spec.height, patience)
            if spec.site is not None:
                await _listens(sandbox)
            if stands.relay is not None:
                stands.relay.lead_to(sandbox)
            if stands.browser is not None:
                await stands.browser.show(f"{SITE}{spec.page}", patience)
            await stands.desktop.run(spec.programs, patience)
        except BaseException:
            await _end(stands, own)
            raise
        return cls(stands, own, task)

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
            return Refused(f"[error: {error}]", call.id)
        except TimeoutError:
            return Observation(f"[error: {call.name} took over {seconds:g} seconds]", call.id)
        return Observation("", call.id)

    async def look(self) -> Image:
        """The screen, as a PNG file."""
        picture = await self.desktop.picture()
        data = await asyncio.to_thread(encoded, picture)
        return Image(hashlib.sha256(data).hexdigest(), data)

    async def tree(self) -> str:
        """The accessibility tree as text, a line for each node: two spaces for each level, role, name, and value if it
        has one. Of native programs only the titles of the windows, the lowest one first: programs this small tell no
        more of themselves. Raises :class:`SandboxDied`."""
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
        await _end(self._standing, self._own)


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


async def _end(stands: Standing | None, own: Sandbox | None) -> None:
    try:
        if stands is not None:
            await stands.aclose()
    finally:
        if own is not None:
            await own.close()
