"""Boxes as hardened containers of a Docker engine, for hosts that have one.

One stream a container, attached for life: process 1 is the same guest as in the other backends, and the end of
the stream is the end of the container, which the engine then removes. The image is read-only; what a box may
write (its home, its workspace, /tmp, ...) is tmpfs, so nothing is left on disk, and a size is a limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import secrets
import sys
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from clawgym.errors import InfraError, SandboxError, SandboxUnavailable
from clawgym.offload import offloaded
from clawgym.registry import sandboxes
from clawgym.sandbox.docker.container import Attached, DockerSandbox, Started, inside
from clawgym.sandbox.docker.engine import LEASE_LABEL, NOT_SHARED, Engine, Image
from clawgym.sandbox.inside.trees import remove_tree
from clawgym.sandbox.leases import LABEL
from clawgym.sandbox.link import close_late, guest_argv
from clawgym.sandbox.linux.supervised import Supervised
from clawgym.sandbox.probe import Probed, missing, questions
from clawgym.sandbox.protocol import Isolation, Sandbox, SandboxSpec, Snapshot
from clawgym.sandbox.shared_folders import checked

__all__ = ["DockerBackend"]

_MiB = 2**20
_T = TypeVar("_T")


@sandboxes.register("docker")
class DockerBackend(Probed):
    """Sandboxes as hardened containers of a Docker engine.

    See :class:`~clawgym.sandbox.protocol.Backend`. One for each event loop.

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
        self._snapshots: dict[str, Path] = {}
        self._contents: dict[tuple[str, tuple[str, ...]], bytes | None] = {}
        self._preparing = asyncio.Lock()

    async def call(self, function: Callable[..., _T], *args: Any) -> _T:
        """A blocking call of the engine, in a thread. Raises :class:`InfraError` if the engine fails."""
        import requests

        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)
        except (self.engine.errors.DockerException, requests.RequestException, OSError) as error:
            raise InfraError(
                f"the Docker engine failed ({str(error)[-500:]}): see its log, start it, run the same command again"
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

    async def probe(self) -> Isolation:
        if self._isolation is not None:
            return self._isolation
        await self._start()
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
        notes += missing(features)
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
            task.add_done_callback(close_late)
            raise

    async def _open(self, spec: SandboxSpec, saved: Path | None) -> DockerSandbox:
        mounts = await asyncio.to_thread(checked, spec)
        joined = spec.join_network_of
        if joined is not None and not isinstance(joined, DockerSandbox):
            raise SandboxError("only the network of a box of the same backend can be joined: create both with one")
        async with self._preparing:
            image = await self.call(self.engine.image, spec.image)
        lease, nonce = secrets.token_hex(8), secrets.token_hex(8)
        # A range that namespace boxes do not use; a remapping engine has but 65536, unprivileged outside.
        user = 10_000 + secrets.randbelow(50_000) if self.engine.remapped else 0x60000000 + secrets.randbelow(1 << 28)
        readonly = await offloaded(_pack_readonly, spec, image)
        writable = image.writable(spec.workdir, spec.readonly)
        limits = {"RLIMIT_CORE": 0, "RLIMIT_NOFILE": 4096, "RLIMIT_FSIZE": spec.limits.file_mb * _MiB}
        limits["RLIMIT_NPROC"] = spec.limits.pids
        start: dict[str, Any] = {"nonce": nonce, "rlimits": limits, "mkdirs": [spec.workdir]}
        # The engine gives a tmpfs the mode of the image's folder; root without capabilities has to get through.
        start["passable"] = [w for w in writable if any(f.startswith(w + "/") for f in spec.readonly)]
        argv = guest_argv(start, ["python3"])
        labels = {LABEL: self.supervised.owner, LEASE_LABEL: lease}
        config = self.engine.config(
            spec,
            image,
            argv,
            user,
            writable,
            len(readonly) + _MiB,
            labels,
            joined.container if joined else None,
            mounts,
        )
        container, sock, pid = await self.call(self.engine.launch, config, f"clawgym-{lease}")
        started = Started(container, Attached(sock), pid, writable)
        try:
            await started.hello(nonce)
            started.hold(nonce)
            if readonly:
                await self._fill_readonly(container, readonly)
            box = DockerSandbox(self, lease, spec, image, user, started)
        except BaseException:
            started.stream.close()
            started.release()
            await asyncio.shield(asyncio.ensure_future(self.call(self.engine.remove, container)))
            raise
        self.boxes[lease] = box
        box.start()
        try:
            await _see(box, mounts)
            await self._fill(box, image, saved)
        except BaseException:
            await box.close()
            raise
        return box

    async def _fill_readonly(self, container: str, tar: bytes) -> None:
        """As the container's root, which has no capability but owns those folders."""
        argv = inside("fill")
        code, _, why = await self.call(self.engine.run_inside, container, argv, "0:0", tar, _MiB, 60.0)
        if code:
            raise InfraError(f"read-only files could not be put into a box ({why or code}): see the engine's log")

    async def _fill(self, box: DockerSandbox, image: Image, saved: Path | None) -> None:
        """What the writable folders start with: a snapshot's files, or the image's own."""
        if saved is not None:
            content = await offloaded(saved.read_bytes)
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
            skip = [folder.strip("/") for folder in (*box.spec.readonly, *box.spec.mounts)]
            done = await box.exec(inside("fill", *skip), cwd="/", stdin=content, timeout=box.spec.limits.setup_seconds)
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
            await offloaded(tar.unlink, True)

    async def aclose(self) -> None:
        await asyncio.gather(*(box.close() for box in list(self.boxes.values())))
        await self.supervised.stop()
        if (engine := getattr(self, "engine", None)) is not None:  # it was started
            engine.api.close()
        self._threads.shutdown(wait=False)
        with contextlib.suppress(OSError):  # what stays behind goes at a later start
            await offloaded(remove_tree, self.folder)


async def _see(box: DockerSandbox, mounts: dict[str, str]) -> None:
    """Raise :class:`SandboxError` if the engine mounted other folders than this machine's: it may have its own."""
    for target, source in mounts.items():
        script = "import os, sys; info = os.stat(sys.argv[1]); print(info.st_dev, info.st_ino)"
        seen = await box.exec(["python3", "-I", "-S", "-c", script, target], cwd="/", timeout=20)
        here = os.stat(source)
        if seen.text.split() != [str(here.st_dev), str(here.st_ino)]:
            raise SandboxError(NOT_SHARED.format(target, source))


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
