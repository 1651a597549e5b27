"""Check the folders of this machine that are mounted read-only into sandboxes, for every backend."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterable
from pathlib import Path

from clawgym.errors import SandboxError
from clawgym.sandbox.protocol import SandboxSpec

__all__ = ["checked", "refuse_taking"]

_SYSTEM = frozenset(("bin", "dev", "etc", "lib", "lib32", "lib64", "libx32", "proc", "sbin", "sys", "usr", ".pristine"))
"""Top-level folders that the backends fill themselves."""


def checked(spec: SandboxSpec) -> dict[str, str]:
    """Resolve and check ``spec.mounts``.

    Returns:
        Absolute folder in the sandbox -> folder of this machine, with links resolved.

    Raises:
        SandboxError: a folder is missing, is no plain absolute path, or overlaps with another one.
    """
    found: dict[str, str] = {}
    for target, source in spec.mounts.items():
        where = f"mounts[{target!r}]"
        if (
            not target.startswith("/")
            or target.startswith("//")
            or posixpath.normpath(target) != target
            or "\0" in target
        ):
            raise SandboxError(f"{where}: not a plain absolute folder: write it like '/opt/tool'")
        if target == "/" or target.split("/")[1] in _SYSTEM:
            raise SandboxError(f"{where}: the sandbox's own system lies there: choose a folder like '/opt/tool'")
        for other in (*found, *spec.readonly):
            if _within(target, other) or _within(other, target):
                raise SandboxError(f"{where}: nested with {other!r}: choose folders apart from each other")
        if _within(spec.workdir, target):
            raise SandboxError(f"{where}: the workdir {spec.workdir!r} lies in it, and nobody can write there: move it")
        if not Path(source).is_absolute():
            raise SandboxError(f"{where}: {str(source)!r} is not an absolute path of this machine: use Path.resolve()")
        try:
            found[target] = str(Path(source).resolve(strict=True))
        except (OSError, RuntimeError) as error:
            raise SandboxError(f"{where}: {source} cannot be found ({error}): make the folder first") from None
        if not os.path.isdir(found[target]):
            raise SandboxError(f"{where}: {source} is not a folder: give the folder that holds it")
    if found:
        for point in _mount_points():
            for target, source in found.items():
                if point != source and _within(point, source):
                    raise SandboxError(
                        f"mounts[{target!r}]: {source} holds another file system ({point}): mount each by itself"
                    )
    return found


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _mount_points() -> Iterable[str]:
    """Mount points of this machine. A bind mount would show the folder below each of them, or fail for ordinary
    users."""
    try:
        table = Path("/proc/self/mountinfo").read_bytes()
    except OSError:
        return []  # not Linux
    fields = (line.split(b" ", 5)[4] for line in table.splitlines())
    return {os.fsdecode(re.sub(rb"\\(\d{3})", lambda code: bytes([int(code[1], 8)]), field)) for field in fields}


def refuse_taking(spec: SandboxSpec, path: str) -> None:
    """Raise :class:`SandboxError` if ``path`` is below a mount: its files belong to this machine, not to the
    sandbox."""
    for target in spec.mounts:
        if _within(posixpath.normpath("/" + path.lstrip("/")), target):
            raise SandboxError(f"{path}: mounted from this machine ({spec.mounts[target]}): read it there")
