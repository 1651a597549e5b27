"""Boxes as hardened containers of a Docker engine, for hosts that have one.

One stream a container, attached for life: process 1 is the same guest as in the other backends, and the end of
the stream is the end of the container, which the engine then removes. The image is read-only; what a box may
write (its home, its workspace, /tmp, ...) is tmpfs, so nothing is left on disk, and a size is a limit.

``stop()`` keeps the files. As root beside the engine the owner holds a descriptor of every tmpfs, which outlives
the container. Elsewhere (a group member, a machine away) the trees are taken as one tar, by a process of ours
inside, after every other one there has been killed; then the container goes.
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
import sys
import tarfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from clawgym.errors import InfraError, SandboxDied, SandboxError, SandboxUnavailable
from clawgym.sandbox import _extract
from clawgym.sandbox._engine import LEASE_LABEL, Engine, Frames, Image
from clawgym.sandbox._hire import Supervised
from clawgym.sandbox._link import GuestLink, guest_argv
from clawgym.sandbox.leases import LABEL
from clawgym.sandbox.protocol import Archive, Isolation, Sandbox, SandboxSpec, Snapshot

__all__ = ["DockerBackend"]

_MiB = 2**20
_HELLO = struct.Struct(">IBI")
_TAR_SLACK = 4 * _MiB
"""What a tar may be over its contents (headers), on the way out of a box."""
_T = TypeVar("_T")


@cache
def _inside(*words: str) -> list[str]:
    source = resources.files("clawgym.sandbox").joinpath("_inside.py").read_text()
    return ["python3", "-I", "-S", "-B", "-c", source, *words]


class _Attached:
    """The attached stream as a :class:`~clawgym.sandbox._link.Stream`."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.socket = sock
        self.frames = Frames()
        self._loop = asyncio.get_running_loop()

    async def read(self, size: int) -> bytes:
        while received := await self._loop.sock_recv(self.socket, size):
            if data := b"".join(self.frames.feed(received)):
                return data
        return b""

    async def write(self, data: bytes) -> None:
        await self._loop.sock_sendall(self.socket, data)

    async def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


class DockerSandbox(GuestLink):
    """One box; see :class:`~clawgym.sandbox.protocol.Sandbox`."""

    def __init__(
        self, backend: DockerBackend, lease: str, spec: SandboxSpec, image: Image, user: int, started: _Started
    ) -> None:
        super().__init__(started.stream, spec, self._autopsy)
        self.id = lease
        self.container = started.container
        self._backend = backend
        self._image = image
        self._user = f"{user}:{user}"
        self._stream_held = started.stream
        self._writable = started.writable
        self._held = started.held
        """Writable folder -> descriptor; empty where the owner cannot reach them."""
        self._born = time.time()
        self._saved: Path | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._freed = False

    @property
    def isolation(self) -> Isolation:
        return self._backend.isolation

    def tool(self, name: str) -> list[str]:
        # The image is read-only: its tools are as they were, also without the second mount.
        return [f"/usr/bin/{name}"] if self._image.default else [name]

    async def _autopsy(self) -> str:
        """Why the box died: the engine's events say it."""
        return "oom" if await self._backend.call(self._backend.engine.oom, self.container, self._born) else "died"

    # -- files out

    def _place(self, path: str) -> tuple[int, str] | None:
        """A descriptor (to be closed) of the writable folder that holds ``path``, and the rest of the path."""
        if self._freed:
            raise SandboxError("this box is closed: take files before close()")
        if not path.startswith("/") or ".." in path.split("/"):
            raise SandboxError(f"{path!r} is not an absolute path without '..': correct it")
        clean = posixpath.normpath("/" + path.lstrip("/"))
        for folder in sorted(self._held, key=len, reverse=True):
            if clean == folder or clean.startswith(folder + "/"):
                return os.dup(self._held[folder]), clean[len(folder) + 1 :] or "."
        return None

    async def get(self, path: str, *, max_bytes: int = 16 * _MiB) -> bytes:
        place = self._place(path)
        if place is not None:
            return await _with_fd(place[0], _extract.take_file, place[1], max_bytes)
        archive = await self._fetch(path, posixpath.dirname(path.rstrip("/")), max_bytes, 1)
        with tarfile.open(fileobj=io.BytesIO(archive.tar)) as tar:
            for member in tar:
                held = tar.extractfile(member) if member.isreg() else None
                if held is not None and "/" not in member.name:
                    return held.read()
        raise SandboxError(f"{path}: not a regular file: only regular files leave a box")

    async def get_archive(self, path: str, *, max_bytes: int = 256 * _MiB, max_files: int = 20_000) -> Archive:
        place = self._place(path)
        if place is not None:
            return await _with_fd(place[0], _extract.take_tree, place[1], max_bytes, max_files)
        return await self._fetch(path, path, max_bytes, max_files)

    async def _fetch(self, path: str, strip: str, max_bytes: int, max_files: int) -> Archive:
        """The tree (or file) at ``path`` by way of a tar, names relative to ``strip``."""
        clean, strip = posixpath.normpath(path), posixpath.normpath(strip).strip("/")
        cap = max_bytes + _TAR_SLACK + 2048 * max_files
        if self._saved is not None:
            data = await asyncio.to_thread(_select, self._saved, clean.strip("/"), cap)
        elif self._stopping is not None:
            raise SandboxError(f"{path}: this box's files are gone with it: take files before it dies")
        else:
            data = await self._run_inside("take", [clean], cap)
        wants_folder = strip == clean.strip("/")
        return await asyncio.to_thread(_filtered, data, path, strip, wants_folder, max_bytes, max_files)

    async def _run_inside(self, what: str, paths: list[str], max_bytes: int) -> bytes:
        call = self._backend.engine.run_inside
        seconds = self.spec.limits.teardown_seconds
        code, data, why = await self._backend.call(
            call, self.container, _inside(what, *paths), self._user, b"", max_bytes, seconds
        )
        if code == 3:
            raise SandboxError(f"{paths[0]}: not there, or behind a link: links are not followed")
        if code:
            raise SandboxDied(f"files could not be taken from the box ({why or code})", cause="unresponsive")
        return data

    # -- the end, and copies

    async def stop(self) -> None:
        if self._stopping is None:
            self.closed = True  # whatever fails from now on is our doing, not the box's
            self._stopping = asyncio.create_task(self._stop())
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        if not self._held and self.death is None:
            target = self._backend.folder / f"stopped-{self.id}.tar"
            try:
                await self._save_inside("kill", target)
                self._saved = target
            except SandboxError:
                pass  # it died meanwhile: its files are gone
        await self.end()
        await self._backend.call(self._backend.engine.remove, self.container)

    async def _save_inside(self, what: str, target: Path) -> None:
        limits = self.spec.limits
        cap = (limits.disk_mb * len(self._writable)) * _MiB + _TAR_SLACK + 2048 * max(20_000, limits.disk_mb * 100)
        data = await self._run_inside(what, self._writable, cap)
        await asyncio.to_thread(target.write_bytes, data)

    async def snapshot(self) -> Snapshot:
        if self._freed:
            raise SandboxError("this box is closed: take the snapshot before close()")
        name = secrets.token_hex(8)
        target = self._backend.folder / f"snapshot-{name}.tar"
        if self._held:
            running = self._stopping is None and self.death is None
            api = self._backend.engine.api
            if running:
                await self._backend.call(api.pause, self.container)
            try:
                await self._backend.call(_save_held, self._held, target)
            finally:
                if running:
                    await self._backend.call(api.unpause, self.container)
        elif self._saved is not None:
            await asyncio.to_thread(shutil.copyfile, self._saved, target)
        elif self._stopping is None:
            await self._save_inside("stop", target)
        else:
            raise SandboxError("this box's files are gone with it: take the snapshot before it dies")
        return self._backend.seal(name, self.spec, target)

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
        self._stream_held.socket.close()
        for fd in self._held.values():
            os.close(fd)
        if self._saved is not None:
            self._saved.unlink(missing_ok=True)
        self._backend.boxes.pop(self.id, None)


class _Started:
    """A container that runs, before it is a box."""

    def __init__(self, container: str, stream: _Attached, pid: int, writable: list[str]) -> None:
        self.container = container
        self.stream = stream
        self.pid = pid
        self.writable = writable
        self.held: dict[str, int] = {}

    async def hello(self, nonce: str) -> None:
        """Wait for process 1. Raises :class:`InfraError` with what it wrote to stderr."""
        data = b""
        try:
            async with asyncio.timeout(60):
                while len(data) < _HELLO.size or len(data) < _HELLO.size + _HELLO.unpack_from(data)[0]:
                    more = await self.stream.read(4096)
                    if not more or len(data) > 4096:
                        why = self.stream.frames.errors.decode(errors="replace").strip()[-500:]
                        raise InfraError(f"a box could not be started ({why or 'it ended at once'}): see `docker info`")
                    data += more
        except TimeoutError:
            raise InfraError("a box did not start within 60 s: the host is overloaded; lower --concurrency") from None
        if nonce.encode() not in data:
            raise InfraError("a box answered with another one's name: run `clawgym doctor`")

    def hold(self, nonce: str) -> None:
        """Open every writable folder, if the container's pid is this machine's and we may."""
        try:
            if nonce.encode() not in Path(f"/proc/{self.pid}/cmdline").read_bytes():
                return
            for folder in self.writable:
                flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                self.held[folder] = os.open(f"/proc/{self.pid}/root{folder}", flags)
        except OSError:
            self.release()

    def release(self) -> None:
        for fd in self.held.values():
            os.close(fd)
        self.held.clear()


class DockerBackend:
    """See :class:`~clawgym.sandbox.protocol.Backend`. One for each event loop.

    ``default_image`` (or ``CLAWGYM_DOCKER_IMAGE``) stands for the image ``default`` where this machine's /usr cannot
    be shared with the engine. Any other image must be on the engine already, with python3, bash and tar in it.
    """

    name = "docker"

    def __init__(self, default_image: str | None = None) -> None:
        self.supervised = Supervised()
        self.boxes: dict[str, DockerSandbox] = {}
        self.engine: Engine
        self.folder = self.supervised.state / "owners" / self.supervised.owner
        self._default_image = default_image or os.environ.get("CLAWGYM_DOCKER_IMAGE") or None
        self._threads = ThreadPoolExecutor(8, "clawgym-docker")
        self._started: asyncio.Task[None] | None = None
        self._isolation: Isolation | None = None
        self._snapshots: dict[str, Path] = {}
        self._contents: dict[tuple[str, tuple[str, ...]], bytes | None] = {}
        self._preparing = asyncio.Lock()

    async def call(self, function: Callable[..., _T], *args: Any) -> _T:
        """A blocking call of the engine, in a thread. Raises :class:`InfraError` if the engine fails."""
        import requests

        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)
        except (self.engine.errors.DockerException, requests.RequestException) as error:
            raise InfraError(
                f"the Docker engine failed ({str(error)[-500:]}): see its log, then start again"
            ) from error

    # -- starting

    async def _start(self) -> None:
        if self._started is None:
            self._started = asyncio.create_task(self._start_once())
        await asyncio.shield(self._started)

    async def _start_once(self) -> None:
        self.engine = await asyncio.to_thread(Engine, self._default_image)
        if sys.platform == "linux":
            await self.supervised.start()
            if self.engine.socket_path is not None:
                await self.supervised.ask("docker", engine=self.engine.socket_path)
        self.folder.mkdir(parents=True, exist_ok=True)

    @property
    def isolation(self) -> Isolation:
        """What :meth:`probe` found."""
        if self._isolation is None:
            raise SandboxError("not probed yet: await backend.probe() first")
        return self._isolation

    async def probe(self) -> Isolation:
        if self._isolation is not None:
            return self._isolation
        await self._start()
        from clawgym.sandbox._probe import questions

        try:
            box = await self.create(SandboxSpec())
        except InfraError as error:
            raise SandboxUnavailable(
                f"no container could be started ({error}): see the engine's log, or use the namespace backend"
            ) from error
        try:
            features = await questions(box)
        finally:
            await box.close()
        info = self.engine.info
        features["own_outer_uid"] = not self.engine.remapped
        features["memory_limit"] = bool(info.get("MemoryLimit"))
        features["pids_limit"] = bool(info.get("PidsLimit", True))
        features["cpu_limit"] = bool(info.get("CPUCfsQuota", info.get("CpuCfsQuota")))
        features["disk_limit"] = True
        notes = [
            "files: the image is read-only and each writable folder is a tmpfs; nothing can be installed in /usr",
            "users: commands run as a nameless uid that is not root inside either",
            "disk: limits.disk_mb holds for each writable folder; all of them count as memory",
        ]
        notes += [f"not limited by this engine: {n}" for n in ("memory", "pids", "cpu") if not features[f"{n}_limit"]]
        notes += [f"not isolated here: {n}" for n, holds in features.items() if not holds and n.startswith("no_")]
        self._isolation = Isolation(self.name, "docker", features, tuple(notes))
        return self._isolation

    # -- boxes

    async def create(self, spec: SandboxSpec) -> Sandbox:
        return await self._create(spec, None)

    async def _create(self, spec: SandboxSpec, saved: Path | None) -> DockerSandbox:
        await self._start()
        task = asyncio.ensure_future(self._open(spec, saved))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_close_late)
            raise

    async def _open(self, spec: SandboxSpec, saved: Path | None) -> DockerSandbox:
        joined = spec.join_network_of
        if joined is not None and not isinstance(joined, DockerSandbox):
            raise SandboxError("only the network of a box of the same backend can be joined: create both with one")
        async with self._preparing:
            image = await self.call(self.engine.image, spec.image)
        lease, nonce = secrets.token_hex(8), secrets.token_hex(8)
        # A range that namespace boxes do not use; a remapping engine has but 65536, unprivileged outside.
        user = 10_000 + secrets.randbelow(50_000) if self.engine.remapped else 0x60000000 + secrets.randbelow(1 << 28)
        readonly = _pack_readonly(spec, image)
        writable = image.writable(spec.workdir, spec.readonly)
        limits = {"RLIMIT_CORE": 0, "RLIMIT_NOFILE": 4096, "RLIMIT_FSIZE": spec.limits.file_mb * _MiB}
        start: dict[str, Any] = {"nonce": nonce, "rlimits": limits, "mkdirs": [spec.workdir]}
        # The engine gives a tmpfs the mode of the image's folder; root without capabilities has to get through.
        start["passable"] = [w for w in writable if any(f.startswith(w + "/") for f in spec.readonly)]
        argv = guest_argv(start, ["python3"])
        labels = {LABEL: self.supervised.owner, LEASE_LABEL: lease}
        config = self.engine.config(
            spec, image, argv, user, writable, len(readonly) + _MiB, labels, joined.container if joined else None
        )
        container, sock, pid = await self.call(self.engine.launch, config, f"clawgym-{lease}")
        started = _Started(container, _Attached(sock), pid, writable)
        try:
            await started.hello(nonce)
            started.hold(nonce)
            if readonly:
                await self._fill_readonly(container, readonly)
            box = DockerSandbox(self, lease, spec, image, user, started)
        except BaseException:
            sock.close()
            started.release()
            await asyncio.shield(asyncio.ensure_future(self.call(self.engine.remove, container)))
            raise
        self.boxes[lease] = box
        box.start()
        try:
            await self._fill(box, image, saved)
        except BaseException:
            await box.close()
            raise
        return box

    async def _fill_readonly(self, container: str, tar: bytes) -> None:
        """As the container's root, which has no capability but owns those folders."""
        argv = _inside("fill")
        code, _, why = await self.call(self.engine.run_inside, container, argv, "0:0", tar, _MiB, 60.0)
        if code:
            raise InfraError(f"read-only files could not be put into a box ({why or code}): see the engine's log")

    async def _fill(self, box: DockerSandbox, image: Image, saved: Path | None) -> None:
        """What the writable folders start with: a snapshot's files, or the image's own."""
        if saved is not None:
            content = await asyncio.to_thread(saved.read_bytes)
        elif image.default:
            return
        else:
            key = (image.id, tuple(box._writable))
            async with self._preparing:
                if key not in self._contents:
                    labels = {LABEL: self.supervised.owner}
                    self._contents[key] = await self.call(self.engine.content, image, box._writable, labels)
            content = self._contents[key]
            missing = await box.exec(["sh", "-c", "command -v bash && command -v tar"], timeout=20)
            if missing.exit_code:
                raise SandboxError(
                    f"image {box.spec.image!r} has no bash or no tar: choose one with python3, bash and tar"
                )
        if content:
            skip = [folder.strip("/") for folder in box.spec.readonly]
            done = await box.exec(_inside("fill", *skip), cwd="/", stdin=content, timeout=box.spec.limits.setup_seconds)
            if done.exit_code:
                raise SandboxError(
                    f"the box's own files do not fit into it ({done.text.strip()[-300:]}): raise limits.disk_mb"
                )

    # -- snapshots

    def seal(self, name: str, spec: SandboxSpec, tar: Path) -> Snapshot:
        """A snapshot of what ``tar`` holds."""
        self._snapshots[name] = tar
        return Snapshot(name, self.name, spec, tar)

    async def fork(self, snapshot: Snapshot, spec: SandboxSpec | None = None) -> Sandbox:
        tar = self._snapshots.get(snapshot.id)
        if tar is None:
            raise SandboxError("this snapshot was dropped or belongs to another backend: take a new one")
        chosen = spec or snapshot.spec
        if chosen.image != snapshot.spec.image:
            raise SandboxError("a fork keeps the snapshot's image: leave spec.image as it is")
        return await self._create(chosen, tar)

    async def drop(self, snapshot: Snapshot) -> None:
        tar = self._snapshots.pop(snapshot.id, None)
        if tar is not None:
            tar.unlink(missing_ok=True)

    async def aclose(self) -> None:
        await asyncio.gather(*(box.close() for box in list(self.boxes.values())))
        await self.supervised.stop()
        self._threads.shutdown(wait=False)
        shutil.rmtree(self.folder, ignore_errors=True)


_LATE: set[asyncio.Future[None]] = set()


def _close_late(task: asyncio.Future[DockerSandbox]) -> None:
    """A box whose creation was cancelled half-way is closed when it arrives."""
    if not task.cancelled() and task.exception() is None:
        closing = asyncio.ensure_future(task.result().close())
        _LATE.add(closing)
        closing.add_done_callback(_LATE.discard)


async def _with_fd(fd: int, function: Callable[..., _T], *args: Any) -> _T:
    """Call ``function(fd, ...)`` in a thread, and close ``fd`` afterwards, also if nobody waits any more."""

    def work() -> _T:
        try:
            return function(fd, *args)
        finally:
            os.close(fd)

    return await asyncio.to_thread(work)


def _pack_readonly(spec: SandboxSpec, image: Image) -> bytes:
    """A tar of everything that only root may change; b'' if there is nothing."""
    buffer = io.BytesIO()
    count = 0
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for folder, files in spec.readonly.items():
            for file in files:
                data = file.read()
                entry = tarfile.TarInfo(f"{folder.strip('/')}/{file.path}")
                entry.size, entry.mode = len(data), 0o555 if file.executable else 0o444
                tar.addfile(entry, io.BytesIO(data))
                count += 1
        if spec.pristine_tools and not image.default:
            link = tarfile.TarInfo(".pristine/usr")
            link.type, link.linkname = tarfile.SYMTYPE, "/usr"
            tar.addfile(link)
            count += 1
    return buffer.getvalue() if count else b""


def _save_held(held: dict[str, int], target: Path) -> None:
    """Write the trees behind descriptors to one tar, as they are: what is in it goes nowhere but into a box."""
    from clawgym.sandbox._layers import copy_layer

    staging = target.with_suffix(".new")
    try:
        with tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as tar:
            for folder, fd in sorted(held.items()):
                copy = staging / folder.strip("/").replace("/", "-")
                copy.parent.mkdir(exist_ok=True)
                copy_layer(fd, ".", copy)
                tar.add(copy, arcname=folder.strip("/"))
                shutil.rmtree(copy)
    except OSError as error:
        target.unlink(missing_ok=True)
        raise InfraError(
            f"the box's files could not be copied ({error}): free disk space in {target.parent}"
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _select(saved: Path, name: str, max_bytes: int) -> bytes:
    """The part of a saved tar at and below ``name``."""
    buffer = io.BytesIO()
    with (
        tarfile.open(saved) as source,
        tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as out,
    ):
        for member in source:
            if member.name == name or member.name.startswith(name + "/"):
                if member.size > max_bytes:
                    raise SandboxError(f"larger than {max_bytes} bytes: too much to take from the box")
                out.addfile(member, source.extractfile(member) if member.isreg() else None)
    return buffer.getvalue()


def _filtered(data: bytes, path: str, strip: str, folder: bool, max_bytes: int, max_files: int) -> Archive:
    """The promises of :mod:`_extract` for a tar made inside the box."""
    if folder:
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            top = tar.next()
        if top is None or not top.isdir():
            raise SandboxError(f"{path}: not a folder that can be taken from the box: links are not followed")
    try:
        return _extract.filter_tar(data, strip, max_bytes, max_files)
    except SandboxError as error:
        raise SandboxError(f"{path}: {error}") from error
