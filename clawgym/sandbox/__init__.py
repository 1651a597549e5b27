"""Where one episode's commands run: backends behind one protocol (``protocol.py``)."""

from __future__ import annotations

import difflib
import importlib
import sys

from clawgym.errors import SandboxUnavailable
from clawgym.sandbox.protocol import (
    Archive,
    Backend,
    ExecResult,
    Isolation,
    Sandbox,
    SandboxSpec,
    Shell,
    Snapshot,
)

__all__ = [
    "BACKENDS",
    "Archive",
    "Backend",
    "ExecResult",
    "Isolation",
    "Sandbox",
    "SandboxSpec",
    "Shell",
    "Snapshot",
    "backend",
]

BACKENDS = {"namespace": "NamespaceBackend", "chroot": "ChrootBackend", "docker": "DockerBackend"}
"""Name -> class, in the module of that name."""
_LINUX_ONLY = ("namespace", "chroot")


def backend(name: str = "auto") -> Backend:
    """A new backend; close it with ``aclose()``. ``auto`` is ``namespace`` on Linux, else ``docker``.

    ``chroot`` isolates less than these, so it is used only where it is asked for.
    Raises :class:`SandboxUnavailable` for an unknown name or a platform that cannot have it.
    """
    if name == "auto":
        name = "namespace" if sys.platform == "linux" else "docker"
    if name not in BACKENDS:
        close = difflib.get_close_matches(name, BACKENDS, 1)
        hint = f" Did you mean: {close[0]!r}?" if close else ""
        raise SandboxUnavailable(f"there is no backend {name!r}.{hint} Choose one of: auto, {', '.join(BACKENDS)}")
    if name in _LINUX_ONLY and sys.platform != "linux":
        raise SandboxUnavailable(
            f"the {name} backend needs Linux, this is {sys.platform}: use the Docker backend (backend='docker')"
        )
    return getattr(importlib.import_module(f"clawgym.sandbox.{name}"), BACKENDS[name])()
