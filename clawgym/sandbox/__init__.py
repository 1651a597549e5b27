"""Where one episode's commands run: backends behind one protocol (``protocol.py``)."""

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
        name: one of ``clawgym list sandboxes``, ``package.module:Class``, or ``auto``: ``namespace`` on Linux, else
            ``docker``. ``chroot`` isolates less than these, so it is used only where it is asked for. ``ray`` makes
            sandboxes on the nodes of a cluster, with ``namespace`` there; ``ray:docker`` and ``ray:chroot`` with those.

    Raises:
        SandboxUnavailable: for an unknown name, or a platform that cannot have it.
    """
    if name == "auto":
        name = "namespace" if sys.platform == "linux" else "docker"
    kind, _, there = name.partition(":")
    if kind in _LINUX_ONLY and sys.platform != "linux":
        raise SandboxUnavailable(
            f"the {name} backend needs Linux, this is {sys.platform}: use the Docker backend (backend='docker')"
        )
    if kind == "ray" and there:
        if there not in local_names() or there == "namespace":  # that is ``ray`` itself
            raise sandboxes.unknown(name)
        return sandboxes.make("ray", on=there)
    return sandboxes.make(name)


def local_names() -> tuple[str, ...]:
    """The backends that make sandboxes on one machine: all but ``ray``."""
    return tuple(name for name in sandboxes.names() if name != "ray")
