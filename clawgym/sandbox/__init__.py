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
    "MANY",
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
"""Name -> class, in the module ``backend`` of the package of that name: backends whose boxes are on this machine."""
MANY = {"ray": "RayBackend"}
"""The same for boxes on many machines, each made by one of :data:`BACKENDS` there: ``ray``, ``ray:chroot``, ..."""
_LINUX_ONLY = ("namespace", "chroot", "ray")


def backend(name: str = "auto") -> Backend:
    """A new backend; close it with ``aclose()``. ``auto`` is ``namespace`` on Linux, else ``docker``.

    ``chroot`` isolates less than these, so it is used only where it is asked for. ``ray`` makes its boxes on the nodes
    of a cluster, with ``namespace`` there; ``ray:docker`` and ``ray:chroot`` with those.
    Raises :class:`SandboxUnavailable` for an unknown name or a platform that cannot have it.
    """
    if name == "auto":
        name = "namespace" if sys.platform == "linux" else "docker"
    kind, _, there = name.partition(":")
    known = [*BACKENDS, *MANY, *(f"{many}:{one}" for many in MANY for one in BACKENDS if one != "namespace")]
    if name not in known:
        close = difflib.get_close_matches(name, known, 1)
        hint = f" Did you mean: {close[0]!r}?" if close else ""
        raise SandboxUnavailable(f"there is no backend {name!r}.{hint} Choose one of: auto, {', '.join(known)}")
    if kind in _LINUX_ONLY and sys.platform != "linux":
        raise SandboxUnavailable(
            f"the {name} backend needs Linux, this is {sys.platform}: use the Docker backend (backend='docker')"
        )
    made = getattr(importlib.import_module(f"clawgym.sandbox.{kind}.backend"), (BACKENDS | MANY)[kind])
    return made(there) if there else made()
