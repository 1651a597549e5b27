"""Sandboxes, in which the commands of one episode run: several backends behind one protocol (``protocol.py``)."""

from __future__ import annotations

import sys

from clawgym.errors import SandboxUnavailable
from clawgym.registry import sandboxes
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
    "Archive",
    "Backend",
    "ExecResult",
    "Isolation",
    "Sandbox",
    "SandboxSpec",
    "Shell",
    "Snapshot",
    "backend",
    "local_names",
]

_LINUX_ONLY = ("namespace", "chroot", "ray")


def backend(name: str = "auto") -> Backend:
    """A new backend; close it with ``aclose()``.

    Args:
        name: a name of ``clawgym list sandboxes``, ``package.module:Class``, or ``auto`` (``namespace`` on Linux,
            ``docker`` elsewhere). ``auto`` never chooses ``chroot``, which isolates less. ``ray`` makes sandboxes
            with ``namespace`` on the nodes of a Ray cluster; ``ray:docker``, ``ray:chroot`` and
            ``ray:package.module:Class`` use those backends there.

    Raises:
        SandboxUnavailable: the name is unknown, or this platform does not support the backend.
    """
    if name == "auto":
        name = "namespace" if sys.platform == "linux" else "docker"
    kind, _, there = name.partition(":")
    if kind in _LINUX_ONLY and sys.platform != "linux":
        raise SandboxUnavailable(
            f"the {name} backend needs Linux, this is {sys.platform}: use the Docker backend (backend='docker')"
        )
    if kind == "ray" and there:
        if ":" in there:
            sandboxes.get(there)  # raises here, not on every node
        elif there not in local_names() or there == "namespace":  # that is ``ray`` itself
            raise sandboxes.unknown(name)
        return sandboxes.make("ray", on=there)
    return sandboxes.make(name)


def local_names() -> tuple[str, ...]:
    """Names of the backends that make sandboxes on this machine: all but ``kubernetes`` and ``ray``."""
    return tuple(name for name in sandboxes.names() if name not in ("kubernetes", "ray"))
