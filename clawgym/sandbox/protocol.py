"""The sandbox protocol: three Protocols and the few records they exchange.

A :class:`Backend` creates :class:`Sandbox` boxes; a box runs commands through a persistent
:class:`Shell` or one-off ``exec``. What each exception means to the caller:

* :class:`~clawgym.errors.SandboxError`: the request was refused, the box still works;
* :class:`~clawgym.errors.SandboxDied`: the box is gone, and code inside may have caused it
  (``cause`` says how); the episode is ``failed``;
* :class:`~clawgym.errors.SandboxUnavailable`: this host cannot run this backend at all;
* :class:`~clawgym.errors.InfraError`: the host failed; retry.

Everything that comes out of a box is hostile input: sizes are capped, frames validated, links never
followed out of it.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from clawgym.records import Limits, TaskFile

__all__ = ["Archive", "Backend", "ExecResult", "Isolation", "Sandbox", "SandboxSpec", "Shell", "Snapshot"]


@dataclass(frozen=True, slots=True)
class Isolation:
    """What a backend isolates on this host, found out by running, never by guessing."""

    backend: str
    tier: str
    """A short name: ``namespace-root``, ``namespace-user``, ``docker``, ..."""
    features: Mapping[str, bool]
    """``network``, ``pid``, ``memory_limit``, ``seccomp``, ... -> holds here."""
    notes: tuple[str, ...] = ()
    """What is not isolated or not limited here, in words."""

    def as_dict(self) -> dict[str, Any]:
        """A JSON-ready dict, as it goes into receipts and ``env.metadata``."""
        return {
            "backend": self.backend,
            "tier": self.tier,
            "features": dict(self.features),
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class SandboxSpec:
    """What a box is made from."""

    image: str = "default"
    """``default``, ``default:PACKAGE,PACKAGE`` (:attr:`clawgym.records.Task.image`), or a name the backend knows."""
    limits: Limits = field(default_factory=Limits)
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to a clean environment (PATH, HOME, LANG, TERM)."""
    workdir: str = "/root"
    """Created if missing; where shells start."""
    readonly: Mapping[str, tuple[TaskFile, ...]] = field(default_factory=dict)
    """Absolute folder in the box -> files the box can read and never change."""
    join_network_of: Sandbox | None = None
    """Share the network namespace of a running box (``live`` grading); otherwise an empty one."""
    pristine_tools: bool = False
    """Also mount the image's untouched ``/usr`` at ``/.pristine/usr`` (``fork`` grading)."""
    mounts: Mapping[str, Path] = field(default_factory=dict)
    """Absolute folder in the box -> folder of this machine: its files can be read and started in there, and no box can
    change them. What everybody may read, every box can; what root alone may, some. It is for folders, files and links:
    sockets and FIFOs of a mounted folder could be spoken to. Not in snapshots, nor in what is taken from the box."""


@dataclass(frozen=True, slots=True)
class ExecResult:
    """The result of one command."""

    output: bytes
    """stdout and stderr in the order written; at most the cap, both ends kept (a marker line says what is missing)."""
    exit_code: int
    """As the shell reports it; 128 + n for signal n; 124 on timeout."""
    cwd: str
    """Of the shell after the command."""
    timed_out: bool = False
    omitted_bytes: int = 0
    """How much of the output was left out of the middle."""
    shell_restarted: bool = False
    """The shell had ended or hung, so variables and background jobs are gone; the next command gets a fresh one."""
    seconds: float = 0.0
    stderr: bytes = b""
    """With ``stdout_only``: what went to stderr, both ends kept."""

    @property
    def text(self) -> str:
        """``output`` as UTF-8, undecodable bytes shown as ``\\xNN``."""
        return self.output.decode("utf-8", "backslashreplace")


@dataclass(frozen=True)
class Archive:
    """A tree taken out of a box: an uncompressed tar of regular files, folders and links that stay inside it."""

    tar: bytes
    dropped: tuple[str, ...] = ()
    """``path: why`` for everything left out (links out of the tree, FIFOs, devices, over the cap)."""


@dataclass(frozen=True)
class Snapshot:
    """A sealed copy of a box's writable layer; boxes can be forked from it any number of times."""

    id: str
    backend: str
    spec: SandboxSpec
    handle: Any = None
    """Private to the backend."""


@runtime_checkable
class Shell(Protocol):
    """A persistent shell: cwd, variables, functions and background jobs stay between commands."""

    async def run(self, command: str, *, timeout: float | None = None, max_output: int | None = None) -> ExecResult:
        """Run ``command`` (any bash text). Defaults come from the box's limits.

        On timeout the command's processes are killed and the result says ``timed_out``; the shell
        itself survives unless it hung. Raises :class:`SandboxDied` if the box is gone.
        """
        ...

    async def write(self, data: bytes) -> None:
        """Feed bytes to the terminal (``pty=True`` shells only)."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class Sandbox(Protocol):
    """One box. Coroutine-safe: several commands may run at once."""

    id: str
    spec: SandboxSpec

    @property
    def isolation(self) -> Isolation: ...

    def tool(self, name: str) -> list[str]:
        """How to start the image's own program ``name``, whatever was done to the box's files
        (``pristine_tools``); otherwise just its name, looked up as ever."""
        ...

    async def shell(self, *, pty: bool = False) -> Shell:
        """Start a persistent bash."""
        ...

    async def exec(
        self,
        argv: Iterable[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout: float | None = None,
        max_output: int | None = None,
        stdout_only: bool = False,
    ) -> ExecResult:
        """Run one program. ``stdout_only`` keeps stderr apart."""
        ...

    async def put(self, files: Iterable[TaskFile], dest: str) -> None:
        """Write files below the absolute folder ``dest`` (folders made as needed; existing ones replaced)."""
        ...

    async def put_archive(self, archive: Archive, dest: str) -> None:
        """Unpack ``archive`` into the absolute folder ``dest``."""
        ...

    async def get(self, path: str, *, max_bytes: int = 16 * 2**20) -> bytes:
        """Read one regular file. Never follows a link. Raises :class:`SandboxError` for anything else, and below
        ``spec.mounts``."""
        ...

    async def get_archive(self, path: str, *, max_bytes: int = 256 * 2**20, max_files: int = 20_000) -> Archive:
        """Take the tree at ``path``; works on a stopped box. Raises :class:`SandboxError` over the caps, and below
        ``spec.mounts``; above, a mount is among what is dropped."""
        ...

    async def listen(self, port: int) -> socket.socket:
        """A listening socket of ours at 127.0.0.1:``port`` inside the box: its programs connect, we accept.

        The box needs no network for that, and the port is free for every other box and on this machine. In a box
        without a loopback (``features["loopback"]``: ``chroot``) its programs find it at ``/dev/listen-<port>``
        instead, a unix socket. Its family at our end says nothing of theirs. Non-blocking; it is closed with the
        box, so whatever serves it stops before. Raises :class:`SandboxError` for a port below 1024 or in use, and
        where this backend cannot.
        """
        ...

    async def connect(self, port: int) -> socket.socket:
        """A socket of ours, connected to the program of the box that listens at 127.0.0.1:``port`` in there.

        In a box without a loopback that program listens at a unix socket instead, which it made at
        ``/tmp/port-<port>``. Non-blocking; the caller closes it. Whatever comes over it is the box's word: hostile.
        Raises :class:`SandboxError` where nothing listens (it may not have begun to: try again), for a port below
        1024, and where this backend cannot.
        """
        ...

    async def stop(self) -> None:
        """Kill every process in the box; files can still be taken. Idempotent."""
        ...

    async def snapshot(self) -> Snapshot:
        """Freeze, copy the writable layer, thaw."""
        ...

    async def close(self) -> None:
        """Stop and free everything. Idempotent; safe to cancel (it finishes in the background)."""
        ...


@runtime_checkable
class Backend(Protocol):
    """Makes boxes. One per process; :func:`clawgym.sandbox.backend` finds it by name."""

    name: str

    async def probe(self) -> Isolation:
        """Find out by running. Raises :class:`SandboxUnavailable` with the mend."""
        ...

    async def create(self, spec: SandboxSpec) -> Sandbox: ...

    async def fork(self, snapshot: Snapshot, spec: SandboxSpec | None = None) -> Sandbox:
        """A new box over the snapshot's files (``spec`` overrides everything but the image)."""
        ...

    async def drop(self, snapshot: Snapshot) -> None:
        """Free a snapshot. Idempotent."""
        ...

    async def aclose(self) -> None:
        """Close every box and the helper processes."""
        ...
