"""One container as a sandbox: its stream, copying files out, stopping it.

Files survive ``stop()``. If the owner is root on the engine's machine, it holds a descriptor of every tmpfs, which
outlives the container. Otherwise (a member of the docker group, a remote engine) a helper process inside first kills
all others and then sends the trees as one tar.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import posixpath
import secrets
import shutil
import socket
import struct
import tarfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

from clawgym.errors import InfraError, SandboxDied, SandboxError, TreeTooLarge
from clawgym.offload import offloaded
from clawgym.sandbox import extract
from clawgym.sandbox.docker.engine import DockerImage, Frames
from clawgym.sandbox.inside.tars import Tarred
from clawgym.sandbox.inside.trees import FOLDER, Room, walk
from clawgym.sandbox.link import GuestLink, as_text
from clawgym.sandbox.linux.layers import most_entries
from clawgym.sandbox.linux.listen import connect, fresh, in_network, listening
from clawgym.sandbox.protocol import Archive, ExecResult, Isolation, SandboxSpec, Snapshot
from clawgym.sandbox.shared_folders import refuse_taking
from clawgym.sandbox.stream import SocketStream
from clawgym.tars import open_tar

__all__ = ["Attached", "DockerSandbox", "Started", "inside"]

_MiB = 2**20
_NO_ENTRY = (
    "only root on the engine's own machine can enter a container's network: run as root there, or use the namespace "
    "backend (backend='namespace')"
)
_HELLO = struct.Struct(">IBI")
_TAR_SLACK = 4 * _MiB
"""Bytes that a tar may exceed its contents by (headers)."""
_T = TypeVar("_T")


@cache
def inside(*words: str) -> list[str]:
    """The command line of ``sandbox/inside/container_files.py``."""
    return ["python3", "-I", "-S", "-B", "-c", as_text("container_files"), *words]


class Attached(SocketStream):
    """The attached stream; removes the engine's framing."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self.frames = Frames()

    def decode(self, data: bytes) -> bytes:
        return b"".join(self.frames.feed(data))

    async def first(self) -> bytes:
        """The first bytes, before :meth:`start`; b'' at the end."""
        while received := await asyncio.get_running_loop().sock_recv(self.socket, 4096):
            if data := self.decode(received):
                return data
        return b""


class Started:
    """A started container that is not a sandbox yet."""

    def __init__(self, container: str, stream: Attached, pid: int, writable: list[str]) -> None:
        self.container = container
        self.stream = stream
        self.pid = pid
        self.writable = writable
        self.held: dict[str, int] = {}
        self.nonce = b""
        """Found in the command line of process 1; empty if ``pid`` is a process of another machine."""

    async def hello(self, nonce: str) -> None:
        """Wait for the hello of process 1. Raises :class:`InfraError` with what it wrote to stderr."""
        data = b""
        try:
            async with asyncio.timeout(60):
                while len(data) < _HELLO.size or len(data) < _HELLO.size + _HELLO.unpack_from(data)[0]:
                    more = await self.stream.first()
                    if not more or len(data) > 4096:
                        why = self.stream.frames.errors.decode(errors="replace").strip()[-500:]
                        raise InfraError(
                            f"a sandbox could not be started ({why or 'it ended at once'}): see `docker info`"
                        )
                    data += more
        except TimeoutError:
            raise InfraError(
                "a sandbox did not start within 60 s: the host is overloaded; lower --concurrency"
            ) from None
        if nonce.encode() not in data:
            raise InfraError("a sandbox answered with another one's name: run `clawgym doctor`")

    def hold(self, nonce: str) -> None:
        """Open every writable folder, if the container runs on this machine and this user may."""
        try:
            if nonce.encode() not in Path(f"/proc/{self.pid}/cmdline").read_bytes():
                return
            self.nonce = nonce.encode()
            for folder in self.writable:
                flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                self.held[folder] = os.open(f"/proc/{self.pid}/root{folder}", flags)
        except OSError:
            self.release()

    def release(self) -> None:
        for fd in self.held.values():
            os.close(fd)
        self.held.clear()


class _Owner(Protocol):
    """What a container needs of its backend."""

    engine: Any
    """Runs programs in containers and removes them: :class:`~clawgym.sandbox.docker.engine.DockerEngine`, or a
    cluster."""
    folder: Path

    @property
    def isolation(self) -> Isolation: ...

    async def call(self, function: Callable[..., _T], *args: Any) -> _T: ...

    def register_snapshot(self, name: str, spec: SandboxSpec, tar: Path) -> Snapshot: ...

    def forget(self, lease: str) -> None: ...


class DockerSandbox(GuestLink):
    """A sandbox of this backend; see :class:`~clawgym.sandbox.protocol.Sandbox`."""

    def __init__(
        self, backend: _Owner, lease: str, spec: SandboxSpec, image: DockerImage, user: int, started: Started
    ) -> None:
        super().__init__(started.stream, spec, self._autopsy)
        self.id = lease
        self.container = started.container
        self._backend = backend
        self._image = image
        self._user = f"{user}:{user}"
        self._writable = started.writable
        self._first, self._nonce = started.pid, started.nonce
        self._held = started.held
        """Writable folder -> descriptor; empty if the owner cannot open them."""
        self._lost: InfraError | None = None
        """Set if the engine ended, rather than the sandbox."""
        self._saved: Path | None = None
        self._unsaved: TreeTooLarge | None = None
        """Why the files of a stopped sandbox were not saved."""
        self._stopping: asyncio.Task[None] | None = None
        self._freed = False

    @property
    def isolation(self) -> Isolation:
        return self._backend.isolation

    def tool(self, name: str) -> list[str]:
        # The image is read-only, so its tools are unchanged even without the second mount.
        return [f"/usr/bin/{name}"] if self._image.default else [name]

    async def _autopsy(self) -> str:
        """Why the sandbox died, by the engine's events. Raises :class:`InfraError` if the engine itself ended."""
        try:
            return await self._backend.call(self._backend.engine.cause_of_death, self.container)
        except InfraError as error:
            self._lost = error
            raise

    async def request(self, *args: Any, **kwargs: Any) -> ExecResult:
        try:
            return await super().request(*args, **kwargs)
        except SandboxDied:
            if self._lost is not None:
                raise self._lost from None
            raise

    # -- files out

    def _place(self, path: str) -> tuple[int, str] | None:
        """The writable folder that holds ``path``, as (descriptor, rest of the path); None without a descriptor."""
        if self._freed:
            raise SandboxError("this sandbox is closed: take files before close()")
        if not path.startswith("/") or ".." in path.split("/"):
            raise SandboxError(f"{path!r} is not an absolute path without '..': correct it")
        refuse_taking(self.spec, path)
        clean = posixpath.normpath("/" + path.lstrip("/"))
        for folder in sorted(self._held, key=len, reverse=True):
            if clean == folder or clean.startswith(folder + "/"):
                return self._held[folder], clean[len(folder) + 1 :] or "."
        return None

    async def get(self, path: str, *, max_bytes: int = 16 * _MiB) -> bytes:
        place = self._place(path)
        if place is not None:
            return await extract.in_thread(place[0], extract.take_file, place[1], max_bytes)
        archive = await self._fetch(path, posixpath.dirname(path.rstrip("/")), max_bytes, 1)
        content = await offloaded(_only_file, archive.tar)
        if content is None:
            raise SandboxError(f"{path}: not a regular file: give a regular file")
        return content

    async def get_archive(self, path: str, *, max_bytes: int = 256 * _MiB, max_files: int = 20_000) -> Archive:
        place = self._place(path)
        if place is not None:
            return await extract.in_thread(place[0], extract.take_tree, place[1], max_bytes, max_files)
        return await self._fetch(path, path, max_bytes, max_files)

    async def _fetch(self, path: str, strip: str, max_bytes: int, max_files: int) -> Archive:
        """Archive the tree or file at ``path`` through the engine, with names relative to ``strip``."""
        clean, strip = posixpath.normpath(path), posixpath.normpath(strip).strip("/")
        cap = max_bytes + _TAR_SLACK + 2048 * max_files
        if self._saved is not None:
            data = await offloaded(_select, self._saved, clean.strip("/"), cap)
        elif self._unsaved is not None:
            raise self._unsaved
        elif self._stopping is not None:
            raise SandboxError(f"{path}: this sandbox's files are gone with it: take files before it dies")
        else:
            data = await self._run_inside("take", [clean], max_files, max_bytes, cap)
        wants_folder = strip == clean.strip("/")
        return await offloaded(_filtered, data, path, strip, wants_folder, max_bytes, max_files)

    async def _run_inside(self, what: str, paths: list[str], entries: int, size: int, cap: int) -> bytes:
        """Run the helper inside. Returns a tar of at most ``entries`` with ``size`` bytes of content, ``cap`` bytes
        long."""
        call = self._backend.engine.run_inside
        seconds = self.spec.limits.teardown_seconds
        argv = inside(what, str(entries), str(size), *paths)
        code, data, why = await self._backend.call(call, self.container, argv, self._user, b"", cap, seconds)
        if code == 3:
            raise SandboxError(f"{paths[0]}: not there, or behind a link: give the path of the file itself")
        if code == 5:
            bound, _, text = why.partition(" ")
            raise TreeTooLarge(f"{paths[0]}: {text}: take a smaller part", bound=bound)
        if code:
            raise SandboxDied(
                f"files could not be taken from the sandbox ({why or code}): create another one", cause="unresponsive"
            )
        return data

    async def _listen(self, port: int) -> socket.socket:
        return self._in_network(lambda: listening(port))

    async def _connect(self, port: int) -> socket.socket:
        try:
            sock = self._in_network(fresh)
        except OSError:
            raise SandboxDied("the sandbox is gone: create another one") from None
        await connect(sock, port)
        return sock

    def _in_network(self, make: Callable[[], socket.socket]) -> socket.socket:
        if not self._held:
            raise SandboxError(_NO_ENTRY)
        network = os.open(f"/proc/{self._first}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if self._nonce not in Path(f"/proc/{self._first}/cmdline").read_bytes():
                raise SandboxDied("the sandbox is gone: create another one")  # its pid has been reused
            return in_network(network, make)
        except PermissionError:
            raise SandboxError(_NO_ENTRY) from None
        finally:
            os.close(network)

    # -- the end, and copies

    async def stop(self) -> None:
        if self._stopping is None:
            self.closed = True  # errors from now on are caused by this call, not by the sandbox
            self._stopping = asyncio.create_task(self._stop())
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        if self._lost is not None:
            await self.end()
            raise self._lost
        if not self._held and self.death is None:
            target = self._backend.folder / f"stopped-{self.id}.tar"
            try:
                await self._save_inside("kill", target)
                self._saved = target
            except TreeTooLarge as error:
                self._unsaved = error
            except SandboxError:
                pass  # it died meanwhile, and its files are gone
        await self.end()
        await self._backend.call(self._backend.engine.remove, self.container)

    async def _save_inside(self, what: str, target: Path) -> None:
        limits = self.spec.limits
        entries, size = most_entries(limits.disk_mb), limits.disk_mb * len(self._writable) * _MiB
        cap = size + _TAR_SLACK + 2048 * entries
        data = await self._run_inside(what, self._writable, entries, size, cap)
        await asyncio.to_thread(target.write_bytes, data)

    async def _pause(self) -> None:
        """Pause the container. On a busy machine the engine gives up on one that forks without end: try three times."""
        for last in (False, False, True):
            try:
                await self._backend.call(self._backend.engine.api.pause, self.container)
                return
            except InfraError:
                if last:
                    raise

    async def snapshot(self) -> Snapshot:
        if self._freed:
            raise SandboxError("this sandbox is closed: take the snapshot before close()")
        name = secrets.token_hex(8)
        target = self._backend.folder / f"snapshot-{name}.tar"
        if self._held:
            running = self._stopping is None and self.death is None
            api = self._backend.engine.api
            if running:
                await self._pause()
            try:
                await offloaded(_save_held, self._held, target, self.spec.limits.disk_mb)
            finally:
                if running:
                    await self._backend.call(api.unpause, self.container)
        elif self._saved is not None:
            await asyncio.to_thread(shutil.copyfile, self._saved, target)
        elif self._stopping is None:
            await self._save_inside("stop", target)
        elif self._unsaved is not None:
            raise self._unsaved
        else:
            raise SandboxError("this sandbox's files are gone with it: take the snapshot before it dies")
        return self._backend.register_snapshot(name, self.spec, target)

    async def close(self) -> None:
        await asyncio.shield(asyncio.ensure_future(self._close()))

    async def _close(self) -> None:
        if self._freed:
            return
        self._freed = self.closed = True
        with contextlib.suppress(InfraError):
            if self._stopping is None:
                await self.end()
                await self._backend.call(self._backend.engine.remove, self.container)
            else:
                await self._stopping
        await offloaded(_let_go, tuple(self._held.values()), self._saved)
        self._backend.forget(self.id)


def _let_go(held: tuple[int, ...], saved: Path | None) -> None:
    """Close the descriptors. The last one of a mount removes its files, which can take seconds."""
    for fd in held:
        os.close(fd)
    if saved is not None:
        saved.unlink(missing_ok=True)


def _save_held(held: dict[str, int], target: Path, disk_mb: int) -> None:
    """Write the trees behind descriptors to one tar, unfiltered: it is only unpacked in a sandbox again."""
    room = Room(most_entries(disk_mb), disk_mb * len(held) * _MiB)
    try:
        with (
            extract.blamed("the sandbox's files"),
            tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as tar,
        ):
            for folder, fd in sorted(held.items()):
                top = os.open(".", FOLDER, dir_fd=fd)
                try:
                    tarred = Tarred(tar, room, folder.strip("/"), force=True)
                    tarred.head(top)
                    walk(top, tarred, room, force=True)
                finally:
                    os.close(top)
    except BaseException:
        target.unlink(missing_ok=True)
        raise


def _only_file(tar: bytes) -> bytes | None:
    with open_tar(tar) as members:
        for member in members:
            held = members.extractfile(member) if member.isreg() else None
            if held is not None and "/" not in member.name:
                return held.read()
    return None


def _select(saved: Path, name: str, max_bytes: int) -> bytes:
    """The part of a saved tar at and below ``name``. Raises :class:`SandboxError`."""
    buffer = io.BytesIO()
    try:
        with (
            tarfile.open(saved, "r:") as source,
            tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as out,
        ):
            for member in source:
                if member.name == name or member.name.startswith(name + "/"):
                    if member.size > max_bytes:
                        raise TreeTooLarge(f"larger than {max_bytes} bytes: take a smaller part")
                    out.addfile(member, source.extractfile(member) if member.isreg() else None)
    except extract.DAMAGED as error:
        raise SandboxError(f"{name}: the sandbox's tar is damaged ({error}): take the tree again") from error
    return buffer.getvalue()


def _filtered(data: bytes, path: str, strip: str, folder: bool, max_bytes: int, max_files: int) -> Archive:
    """Filter a tar made inside the sandbox; see :func:`clawgym.sandbox.extract.filter_tar`."""
    if folder:
        try:
            with open_tar(data) as tar:
                top = tar.next()
        except extract.DAMAGED as error:
            raise SandboxError(f"{path}: the sandbox's tar is damaged ({error}): take the tree again") from error
        if top is None or not top.isdir():
            raise SandboxError(
                f"{path}: not a folder that can be taken from the sandbox: give a folder without links in its path"
            )
    return extract.filter_tar(data, strip, max_bytes, max_files)
