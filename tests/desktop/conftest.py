"""Desktops in real sandboxes."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import AsyncIterator

import pytest

from clawgym.desktop import FILES_DIR, RunningDesktop, desktop_files
from clawgym.records import Desktop, Limits
from clawgym.sandbox import Backend, SandboxSpec

LIMITS = Limits(memory_mb=1024, pids=256)


@pytest.fixture(scope="session")
def programs() -> None:
    """Skip where this machine has no desktops."""
    if missing := [name for name in ("Xvfb", "openbox", "chromium", "xfwrite") if not shutil.which(name)]:
        pytest.skip(f"no {', '.join(missing)} here: make system")


@contextlib.asynccontextmanager
async def running(spec: Desktop, backend: Backend) -> AsyncIterator[RunningDesktop]:
    """A desktop in a sandbox of its own."""
    sandbox = await backend.create(SandboxSpec(limits=LIMITS, readonly={FILES_DIR: desktop_files()}))
    try:
        desktop = await RunningDesktop.start(spec.width, spec.height, sandbox, 30)
        try:
            await desktop.run(spec.programs, 30)
            yield desktop
        finally:
            await desktop.aclose()
    finally:
        await sandbox.close()
