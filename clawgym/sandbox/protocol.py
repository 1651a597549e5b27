"""The sandbox protocol, which every backend implements, and the records that it exchanges.

A :class:`Backend` creates each :class:`Sandbox`. A sandbox runs commands in a persistent :class:`Shell` or one by one
with ``exec``. What each exception means to the caller:

* :class:`~clawgym.errors.SandboxError`: the request was refused; the sandbox still works.
* :class:`~clawgym.errors.SandboxDied`: the sandbox ended, and code inside it may be the cause (``cause`` says
  how). The episode counts as ``failed``.
* :class:`~clawgym.errors.SandboxUnavailable`: this host cannot run the backend.
* :class:`~clawgym.errors.InfraError`: the host failed; the caller may retry.

Everything that comes out of a sandbox is hostile: sizes are capped, frames are validated, and links are never followed
out of it.

To add a backend, implement :class:`Backend` and :class:`Sandbox`, and register the class::

    @clawgym.registry.sandboxes.register("firecracker")
    class FirecrackerBackend:
        name = "firecracker"

        async def probe(self) -> Isolation: ...
        async def create(self, spec: SandboxSpec) -> Sandbox: ...
        async def fork(self, snapshot: Snapshot, spec: SandboxSpec | None = None) -> Sandbox: ...
        async def drop(self, snapshot: Snapshot) -> None: ...
        async def aclose(self) -> None: ...

Then run the conformance suite ``tests/sandbox/test_conformance_*.py`` on it (an entry in
``tests/sandbox/conftest.py``).
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
    """What a backend isolates on this host, as measured in a real sandbox."""

    backend: str
    tier: str
    """A short name: ``namespace-root``, ``namespace-user``, ``docker``, ..."""
    features: Mapping[str, bool]
    """Feature (``network``, ``pid``, ``memory_limit``, ``seccomp``, ...) -> whether it holds here."""
    notes: tuple[str, ...] = ()
    """What is not isolated or not limited here, as sentences for the user."""

    def as_dict(self) -> dict[str, Any]:
        """As JSON, for run manifests and ``env.metadata``."""
        return {
            "backend": self.backend,
            "tier": self.tier,
            "features": dict(self.features),
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class SandboxSpec:
    """What a sandbox is made from."""

    image: str = "default"
    """``default``, ``default:PACKAGE,PACKAGE`` (:attr:`clawgym.records.Task.image`), or an image of the backend."""
    limits: Limits = field(default_factory=Limits)
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to a clean environment (PATH, HOME, LANG, TERM)."""
    workdir: str = "/root"
    """Absolute folder where shells start; created if it is missing."""
    readonly: Mapping[str, tuple[TaskFile, ...]] = field(default_factory=dict)
    """Absolute folder in the sandbox -> files there, which the sandbox can read and not change."""
    join_network_of: Sandbox | None = None
    """A running sandbox whose network namespace is shared (``live`` grading). None: an empty network of its own."""
    pristine_tools: bool = False
    """Also mount an untouched ``/usr`` at ``/.pristine/usr`` (``fork`` grading): the image's, or this machine's."""
    warm_python: bool = False
    """Commands ``python3 -I -S -B -c TEXT ...`` may run in a fork of an interpreter that has been started before.

    That is faster by the start of Python and the imports of common modules. For programs that do not import the
    agent's code. A backend that cannot do so starts them as usual."""
    one_user: bool = False
    """Calls that change users and owners do nothing and succeed, and root may open what modes forbid it. So packages
    can be installed by root, the only user. For building images, with the backend ``namespace``."""
    mounts: Mapping[str, Path] = field(default_factory=dict)
    """Absolute folder in the sandbox -> folder of this machine, mounted read-only.

    Programs in it can be run. The sandbox reads files that everybody may read; some backends also let it read files of
    root alone. Mount folders with files and links only: a program could connect to a socket or FIFO in it. Mounts are
    not part of snapshots, nor of what ``get`` and ``get_archive`` return."""


@dataclass(frozen=True, slots=True)
class ExecResult:
    """The result of one command."""

    output: bytes
    """stdout and stderr in the order written. Over the cap, the middle is replaced by a marker line."""
    exit_code: int
    """As the shell reports it: 128 + n for signal n; 124 on timeout."""
    cwd: str
    """Working folder of the shell after the command."""
    timed_out: bool = False
    omitted_bytes: int = 0
    """Bytes of output that were left out of the middle."""
    shell_restarted: bool = False
    """The shell had ended or hung and was replaced: its variables and background jobs are gone."""
    seconds: float = 0.0
    """Wall-clock time of the command."""
    stderr: bytes = b""
    """With ``stdout_only``: stderr, capped like ``output``."""

    @property
    def text(self) -> str:
        """``output`` as UTF-8, undecodable bytes shown as ``\\xNN``."""
        return self.output.decode("utf-8", "backslashreplace")


@dataclass(frozen=True)
class Archive:
    """A tree from a sandbox, as an uncompressed tar of regular files, folders and links that stay inside it."""

    tar: bytes
    dropped: tuple[str, ...] = ()
    """``path: reason`` for everything left out (links out of the tree, FIFOs, devices, too large)."""


@dataclass(frozen=True)
class Snapshot:
    """A frozen copy of a sandbox's writable files, from which any number of sandboxes can be forked."""

    id: str
    backend: str
    spec: SandboxSpec
    handle: Any = None
    """Private to the backend."""


@runtime_checkable
class Shell(Protocol):
    """A persistent bash: working folder, variables, functions and background jobs last from command to command."""

    async def run(self, command: str, *, timeout: float | None = None, max_output: int | None = None) -> ExecResult:
        """Run ``command``, any bash text.

        Args:
            command: the text, without NUL characters.
            timeout: seconds; by default ``limits.command_seconds``.
            max_output: bytes; by default ``limits.output_bytes``.

        Returns:
            The result. On a timeout the command's processes are killed and ``timed_out`` is set; the shell survives
            unless it hung.

        Raises:
            SandboxDied: the sandbox ended.
            SandboxError: the command cannot be sent, or the sandbox is closed.
        """
        ...

    async def write(self, data: bytes) -> None:
        """Send bytes to the terminal; only for shells with ``pty=True``.

        Raises:
            SandboxDied: the sandbox ended.
        """
        ...

    async def close(self) -> None:
        """Kill the shell and what it started."""
        ...


@runtime_checkable
class Sandbox(Protocol):
    """One sandbox. Several coroutines may use it at once."""

    id: str
    spec: SandboxSpec

    @property
    def isolation(self) -> Isolation:
        """What is isolated here, as probed by the backend."""
        ...

    def tool(self, name: str) -> list[str]:
        """The command that starts the image's own program ``name``, even if the sandbox's files were changed.

        Without ``spec.pristine_tools`` it is ``[name]``, looked up in the PATH.
        """
        ...

    async def shell(self, *, pty: bool = False) -> Shell:
        """Start a persistent bash in ``spec.workdir``; with ``pty`` on a terminal of 80 by 24.

        Raises:
            SandboxDied: the sandbox ended.
            SandboxError: the shell could not be started, or the sandbox is closed.
        """
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
        """Run one program and wait for it.

        Args:
            argv: the program, looked up in the PATH, and its arguments.
            cwd: working folder; by default ``spec.workdir``.
            env: added to the sandbox's environment.
            stdin: bytes to send to its stdin.
            timeout: seconds; by default ``limits.command_seconds``.
            max_output: bytes; by default ``limits.output_bytes``.
            stdout_only: keep stderr apart (``ExecResult.stderr``).

        Raises:
            SandboxDied: the sandbox ended.
            SandboxError: ``argv`` is empty or cannot be sent, or the sandbox is closed.
        """
        ...

    async def programs(self) -> tuple[str, ...]:
        """List the names of running programs, without the sandbox's own process 1 and shells that wait for a command.

        A fork of a snapshot does not have them. The names are hostile: show them escaped.

        Raises:
            SandboxDied: the sandbox ended.
            SandboxError: the sandbox is closed.
        """
        ...

    async def put(self, files: Iterable[TaskFile], dest: str) -> None:
        """Write files below the absolute folder ``dest``. Creates folders and replaces existing files.

        Raises:
            SandboxDied: the sandbox ended.
            SandboxError: a file cannot be written, for example on a full disk.
        """
        ...

    async def put_archive(self, archive: Archive, dest: str) -> None:
        """Unpack ``archive`` into the absolute folder ``dest``.

        Raises:
            SandboxDied: the sandbox ended.
            SandboxError: a file cannot be written, for example on a full disk.
        """
        ...

    async def get(self, path: str, *, max_bytes: int = 16 * 2**20) -> bytes:
        """Read one regular file, without following links. Works on a stopped sandbox.

        Raises:
            SandboxError: anything but a regular file, larger than ``max_bytes``, or below one of ``spec.mounts``.
            InfraError: this machine could not read it.
        """
        ...

    async def get_archive(self, path: str, *, max_bytes: int = 256 * 2**20, max_files: int = 20_000) -> Archive:
        """Archive the tree at ``path``, without following links. Works on a stopped sandbox.

        Mounts within the tree are listed in ``Archive.dropped``.

        Raises:
            TreeTooLarge: over ``max_bytes`` or ``max_files``; a :class:`SandboxError`.
            SandboxError: not a folder, or below one of ``spec.mounts``.
            InfraError: this machine could not read it.
        """
        ...

    async def listen(self, port: int) -> socket.socket:
        """Listen at 127.0.0.1:``port`` inside the sandbox: its programs connect, the caller accepts.

        The sandbox needs no network, and the port stays free for other sandboxes and on this machine. In a sandbox
        without a loopback (``features["loopback"]`` is False, as with ``chroot``) its programs connect to the unix
        socket ``/dev/listen-<port>`` instead.

        Returns:
            A non-blocking socket of any family. It is closed with the sandbox, so stop its server first.

        Raises:
            SandboxError: the port is below 1024 or in use, or the backend cannot listen.
            SandboxDied: the sandbox ended.
        """
        ...

    async def connect(self, port: int) -> socket.socket:
        """Connect to the program that listens at 127.0.0.1:``port`` inside the sandbox.

        In a sandbox without a loopback the program listens at the unix socket ``/tmp/port-<port>`` instead.

        Returns:
            A non-blocking socket, which the caller closes. What it delivers is hostile.

        Raises:
            SandboxError: nothing listens there (yet), the port is below 1024, or the backend cannot connect.
            SandboxDied: the sandbox ended.
        """
        ...

    async def stop(self) -> None:
        """Kill every process in the sandbox; its files can still be read. Idempotent.

        Raises:
            InfraError: the processes could not be killed.
        """
        ...

    async def snapshot(self) -> Snapshot:
        """Copy the writable files, while the processes are frozen.

        Raises:
            SandboxError: the files cannot be copied, or the sandbox is closed.
            InfraError: this machine could not copy them.
        """
        ...

    async def close(self) -> None:
        """Kill everything and free its resources. Idempotent; if cancelled, it finishes in the background."""
        ...


@runtime_checkable
class Backend(Protocol):
    """Makes sandboxes. One per event loop; :func:`clawgym.sandbox.backend` makes it by name."""

    name: str

    async def probe(self) -> Isolation:
        """Start a sandbox, check in it what is isolated, and close it. The result is kept.

        Raises:
            SandboxUnavailable: no sandbox can be started here; the message says what to change.
        """
        ...

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox.

        Raises:
            SandboxError: ``spec`` is refused, for example for an unknown image.
            SandboxUnavailable: this host or backend cannot do what ``spec`` asks for.
            InfraError: the host failed.
        """
        ...

    async def fork(self, snapshot: Snapshot, spec: SandboxSpec | None = None) -> Sandbox:
        """Start a sandbox with the files of ``snapshot``. ``spec`` replaces all but the image.

        Raises:
            SandboxError: the snapshot was dropped or belongs to another backend, or ``spec`` is refused.
            InfraError: the host failed.
        """
        ...

    async def drop(self, snapshot: Snapshot) -> None:
        """Free the snapshot's disk space. Idempotent."""
        ...

    async def aclose(self) -> None:
        """Close every sandbox and the helper processes."""
        ...
