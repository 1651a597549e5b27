"""A desktop in a sandbox: an X server, a window manager, and the programs of a task.

Invariant: no action runs a program in the sandbox from outside; data from the sandbox is checked by
:mod:`clawgym.desktop._x11`.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path

import numpy as np

from clawgym.desktop.actions import Action, parse
from clawgym.desktop.screen import DesktopScreen
from clawgym.errors import InfraError, SandboxDied, SandboxError, SandboxUnavailable
from clawgym.records import DesktopStep, TaskFile
from clawgym.sandbox.protocol import Sandbox

__all__ = ["FILES_DIR", "RunningDesktop", "desktop_env", "desktop_files", "settings_files"]

FILES_DIR = "/tools/desktop"
"""Folder of :func:`desktop_files`, read-only, in the sandbox."""
PROGRAMS = {"Xvfb": "xvfb", "openbox": "openbox", "chromium": "chromium", "xfe": "xfe", "fc-cache": "fontconfig"}
"""Program -> the Debian package that has it."""
_SETTINGS = ("libreoffice", "gimp", "thunderbird", "chromium.d")
"""Folders of /etc with settings that Debian's packages of these programs need beside their files in /usr."""
_DISPLAY = 7
_PORT = 6000 + _DISPLAY
_MANAGER = ("openbox", "--config-file", f"{FILES_DIR}/rc.xml", "--sm-disable")
_READY = "/tmp/.desktop-ready"
_CLICKS = {
    "left_click": ("left", 1),
    "right_click": ("right", 1),
    "middle_click": ("middle", 1),
    "double_click": ("left", 2),
    "triple_click": ("left", 3),
}
_DRAG_STEPS = 8
_DOUBLE_CLICK = 0.5
"""Seconds within which toolkits and browsers count clicks as one double click."""
_NEAR = 16
_DRAWN = 0.1
"""Seconds without a change after which a new window counts as drawn."""


_FILES = {
    "rc.xml": "rc.xml",
    "fonts.conf": "fonts.conf",
    "config/xfe/xferc": "xfe.conf",
    "config/xfe/xfwrc": "xfwrite.conf",
}


@cache
def desktop_files() -> tuple[TaskFile, ...]:
    """The settings of the window manager, the fonts and the small native programs."""
    here = resources.files("clawgym.desktop")
    files = {path: here.joinpath(name).read_bytes() for path, name in _FILES.items()}
    return tuple(TaskFile(path, data) for path, data in (files | _fonts(files["fonts.conf"])).items())


def _fonts(settings: bytes) -> dict[str, bytes]:
    """The font cache. Without it every sandbox scans all fonts, half of the time that a desktop takes to start.

    It contains the time of each folder, so a sandbox with other fonts ignores it.
    """
    if not shutil.which("fc-cache"):
        return {}
    with tempfile.TemporaryDirectory() as folder:
        config, cache = Path(folder, "fonts.conf"), Path(folder, "cache")
        config.write_bytes(settings.replace(f"{FILES_DIR}/fonts".encode(), bytes(cache)))
        env = {**os.environ, "FONTCONFIG_FILE": str(config)}
        subprocess.run(["fc-cache"], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
        return {f"fonts/{file.name}": file.read_bytes() for file in sorted(cache.glob("*.cache-*"))}


def desktop_env() -> dict[str, str]:
    """Environment variables with which programs find the screen and the fonts."""
    return {"DISPLAY": f"127.0.0.1:{_DISPLAY}", "FONTCONFIG_FILE": f"{FILES_DIR}/fonts.conf", "NO_AT_BRIDGE": "1"}


@cache
def settings_files() -> dict[str, tuple[TaskFile, ...]]:
    """The settings of this machine's packages that are not in /usr: folder in the sandbox -> files, read-only."""
    found: dict[str, tuple[TaskFile, ...]] = {}
    for folder in (Path("/etc", name) for name in _SETTINGS):
        files = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink())
        found[str(folder)] = tuple(TaskFile(str(path.relative_to(folder)), path.read_bytes()) for path in files)
    return {folder: files for folder, files in found.items() if files}


class RunningDesktop:
    """A desktop; see :meth:`start`. The sandbox has :func:`desktop_files` at :data:`FILES_DIR`."""

    def __init__(self, sandbox: Sandbox, screen: DesktopScreen) -> None:
        self.sandbox = sandbox
        self.screen = screen
        self._clicked = 0.0, 0, 0
        """Monotonic time and position of the last click."""

    @classmethod
    async def start(cls, width: int, height: int, sandbox: Sandbox, patience: float) -> RunningDesktop:
        """Start an X server with a screen of ``width`` by ``height`` pixels, and a window manager.

        Raises:
            SandboxUnavailable: this machine or backend does not support desktops.
            InfraError: it took more than ``patience`` seconds.
        """
        if not sandbox.isolation.features.get("loopback", True):
            raise SandboxUnavailable(
                f"backend {sandbox.isolation.backend!r} has no loopback, which a desktop needs: use --sandbox namespace"
            )
        deadline = time.monotonic() + patience
        server = ["Xvfb", f":{_DISPLAY}", "-screen", "0", f"{width}x{height}x24", "-listen", "tcp"]
        server += ["-nolisten", "unix", "-nolisten", "local", "-ac", "-noreset", "-extension", "GLX", "-dpi", "96"]
        await _begin(sandbox, [server], needs=["openbox"])
        screen = await cls._connected(sandbox, deadline, patience)
        try:
            # It announces itself before it listens: a window that opens in between is never shown.
            ready = ["sh", "-c", f": >{_READY}"]
            await _begin(sandbox, [[*_MANAGER, "--startup", shlex.join(ready)]])
            while not await _there(sandbox, _READY):
                await _wait(deadline, patience, "its window manager does not start")
        except BaseException:
            await screen.aclose()
            raise
        return cls(sandbox, screen)

    @staticmethod
    async def _connected(sandbox: Sandbox, deadline: float, patience: float) -> DesktopScreen:
        while True:
            try:
                return await DesktopScreen.open(await sandbox.connect(_PORT))
            except SandboxDied:
                raise
            except SandboxError as error:
                await _wait(deadline, patience, f"its X server does not answer ({error})")

    async def run(self, programs: Sequence[Sequence[str]], patience: float) -> None:
        """Start ``programs``, and wait until each has a window and the screen has settled. Raises like
        :meth:`start`."""
        if not programs:
            return
        deadline = time.monotonic() + patience
        await _begin(self.sandbox, programs)
        while await self.screen.windows() < len(programs):
            await _wait(deadline, patience, "not every program has opened its window")
        await self.screen.settle(max(0.1, deadline - time.monotonic()), _DRAWN)

    async def take(self, step: DesktopStep, patience: float) -> None:
        """Take ``step``, and wait until the screen has settled. Programs have the workspace as their home.

        Raises:
            SandboxError: the step is impossible, such as one with a window that is not there.
            InfraError: a program that is started opens no window within ``patience`` seconds.
        """
        deadline = time.monotonic() + patience
        home = self.sandbox.spec.workdir
        env = {**desktop_env(), "HOME": home, "XDG_CONFIG_HOME": f"{home}/.config"}
        match step.kind:
            case "run":
                await self.sandbox.exec(step.words, cwd=home, env=env, timeout=patience)
            case "start":
                before = await self.screen.count()
                await _begin(self.sandbox, [step.words], env=env)
                while await self.screen.count() <= before:
                    await _wait(deadline, patience, f"{step.words[0]} has not opened its window")
            case "focus":
                await self.screen.focus(step.words[0])
            case "close":
                await self.screen.close(step.words[0])
            case "act":
                await self.act(parse(json.loads(step.words[0]), self.screen.width, self.screen.height))
            case "wait":
                await asyncio.sleep(float(step.words[0]))
        await self.screen.settle(max(0.1, deadline - time.monotonic()), _DRAWN)

    async def picture(self, *, pointer: bool = True) -> np.ndarray:
        """See :meth:`DesktopScreen.picture`."""
        return await self.screen.picture(pointer=pointer)

    async def act(self, action: Action) -> None:
        """Perform ``action``, and wait until the screen has settled.

        Raises :class:`SandboxError` if it is impossible, :class:`SandboxDied` if the desktop ended.
        """
        screen = self.screen
        if action.kind == "left_click_drag":
            await self._drag(action)
        elif action.x is not None and action.y is not None:
            screen.move(action.x, action.y)
        match action.kind:
            case "left_click" | "right_click" | "middle_click" | "double_click" | "triple_click":
                await self._click(action)
            case "scroll":
                back, forth = ("back", "forward") if action.sideways else ("up", "down")
                screen.click(forth if action.steps > 0 else back, abs(action.steps))
            case "type":
                await screen.type(action.text)
            case "key":
                screen.press(list(action.keys))
            case "wait":
                await asyncio.sleep(action.seconds)
        await screen.settle()

    async def _click(self, action: Action) -> None:
        x, y = await self.screen.position()
        clicked, was_x, was_y = self._clicked
        if abs(x - was_x) + abs(y - was_y) < _NEAR:  # clicks of two actions must not become a double click
            await asyncio.sleep(max(0.0, clicked + _DOUBLE_CLICK - time.monotonic()))
        self.screen.click(*_CLICKS[action.kind])
        self._clicked = time.monotonic(), x, y

    async def _drag(self, action: Action) -> None:
        """Drag in steps, with pauses: programs often start a drag only at the first step."""
        assert action.x is not None
        assert action.y is not None
        screen = self.screen
        x, y = action.start or await screen.position()
        screen.move(x, y)
        await screen.settle()
        screen.button("left", True)
        for step in range(1, _DRAG_STEPS + 1):
            screen.move(x + (action.x - x) * step // _DRAG_STEPS, y + (action.y - y) * step // _DRAG_STEPS)
            await screen.settle(0.2)
        screen.button("left", False)

    async def aclose(self) -> None:
        """Close the connection to the screen; the programs end with their sandbox. Idempotent."""
        await self.screen.aclose()


async def _begin(
    sandbox: Sandbox,
    programs: Sequence[Sequence[str]],
    needs: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> None:
    """Start ``programs`` in the sandbox's working folder, in order, in the background.

    Raises :class:`SandboxUnavailable` if one of them, or of ``needs``, is not installed.
    """
    names = shlex.join([*(argv[0] for argv in programs), *needs])
    lines = [f'for p in {names}; do command -v "$p" >/dev/null || {{ echo "$p"; none=1; }}; done']
    lines += ['[ -z "$none" ] || exit 127']
    lines += [f"setsid {shlex.join(argv)} </dev/null >/dev/null 2>&1 &" for argv in programs]
    if env is None:  # without a writable folder the browser's screen never settles
        env = {**desktop_env(), "XDG_CONFIG_HOME": f"{FILES_DIR}/config"}
    done = await sandbox.exec(["sh", "-c", "\n".join(lines)], cwd=sandbox.spec.workdir, env=env)
    if done.exit_code == 127:
        raise SandboxUnavailable(
            f"the sandboxes here have no {', '.join(done.text.split())}: apt-get install "
            f"{' '.join(PROGRAMS.values())}, or "
            "take an image that has them"
        )
    if done.exit_code != 0:
        raise InfraError(f"the desktop could not be started ({done.text[-300:].strip()}): lower --concurrency")


async def _there(sandbox: Sandbox, path: str) -> bool:
    try:
        await sandbox.get(path)
    except SandboxDied:
        raise
    except SandboxError:
        return False
    return True


async def _wait(deadline: float, patience: float, why: str) -> None:
    """Sleep briefly before the next attempt. Raises :class:`InfraError` past the deadline."""
    if time.monotonic() > deadline:
        raise InfraError(
            f"the desktop did not stand within {patience:g} s ({why}): give it longer (limits.setup_seconds), or lower "
            "--concurrency"
        )
    await asyncio.sleep(0.01)
