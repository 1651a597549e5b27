"""Sandboxes as hardened containers of a Docker engine.

Each container has one stream, attached until its end. Process 1 is the same guest as in the other backends; when the
stream closes, the container ends and the engine removes it. The image is read-only. What a sandbox may write (its home,
its workspace, /tmp, ...) is tmpfs, so nothing is left on disk, and each size is a limit.
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
from clawgym.sandbox.docker.engine import LEASE_LABEL, NOT_SHARED, DockerEngine, DockerImage
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

    Any image but ``default`` must be on the engine already, with python3, bash and tar in it.

    Args:
        default_image: stands for the image ``default`` where this machine's /usr cannot be shared with the engine;
            ``CLAWGYM_DOCKER_IMAGE`` by default.
    """

    name = "docker"

    def __init__(self, default_image: str | None = None) -> None:
        self.supervised = Supervised()
        self.sandboxes: dict[str, DockerSandbox] = {}
        self.engine: DockerEngine
        self.folder = self.supervised.state / "owners" / self.supervised.owner
        self._default_image = default_image or os.environ.get("CLAWGYM_DOCKER_IMAGE") or None
        self._threads = ThreadPoolExecutor(8, "clawgym-docker")
        self._started: asyncio.Task[None] | None = None
        self._snapshots: dict[str, Path] = {}
        self._contents: dict[tuple[str, tuple[str, ...]], bytes | None] = {}
        self._preparing = asyncio.Lock()

    async def call(self, function: Callable[..., _T], *args: Any) -> _T:
        """Run a blocking call of the engine in a thread. Raises :class:`InfraError` if the engine fails."""
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
        self.engine = await asyncio.to_thread(DockerEngine, self._default_image)
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
            sandbox = await self.create(SandboxSpec())
        except InfraError as error:
            raise SandboxUnavailable(
                f"no container could be started ({error}): see the engine's log, or use the namespace backend"
            ) from error
        try:
            features = await questions(sandbox)
        finally:
            await sandbox.close()
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

    # -- sandboxes

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
            raise SandboxError("only the network of a sandbox of the same backend can be joined: create both with one")
        async with self._preparing:
            image = await self.call(self.engine.image, spec.image)
        lease, nonce = secrets.token_hex(8), secrets.token_hex(8)
        # A range that namespace sandboxes do not use; a remapping engine has 65536 uids, unprivileged outside.
        user = 10_000 + secrets.randbelow(50_000) if self.engine.remapped else 0x60000000 + secrets.randbelow(1 << 28)
        readonly = await offloaded(_pack_readonly, spec, image)
        writable = image.writable(spec.workdir, spec.readonly)
        limits = {"RLIMIT_CORE": 0, "RLIMIT_NOFILE": 4096, "RLIMIT_FSIZE": spec.limits.file_mb * _MiB}
        limits["RLIMIT_NPROC"] = spec.limits.pids
        start: dict[str, Any] = {"nonce": nonce, "rlimits": limits, "mkdirs": [spec.workdir]}
        # The engine gives a tmpfs the mode of the image's folder; root without capabilities must be able to pass.
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
            sandbox = DockerSandbox(self, lease, spec, image, user, started)
        except BaseException:
            started.stream.close()
            started.release()
            await asyncio.shield(asyncio.ensure_future(self.call(self.engine.remove, container)))
            raise
        self.sandboxes[lease] = sandbox
        sandbox.start()
        try:
            await _see(sandbox, mounts)
            await self._fill(sandbox, image, saved)
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    async def _fill_readonly(self, container: str, tar: bytes) -> None:
        """Unpack ``tar`` as the container's root, which has no capability but owns the read-only folders."""
        argv = inside("fill")
        code, _, why = await self.call(self.engine.run_inside, container, argv, "0:0", tar, _MiB, 60.0)
        if code:
            raise InfraError(f"read-only files could not be put into a sandbox ({why or code}): see the engine's log")

    async def _fill(self, sandbox: DockerSandbox, image: DockerImage, saved: Path | None) -> None:
        """Fill the writable folders with a snapshot's files, or with the image's own."""
        if saved is not None:
            content = await offloaded(saved.read_bytes)
        elif image.default:
            return
        else:
            key = (image.id, tuple(sandbox._writable))
            async with self._preparing:
                if key not in self._contents:
                    labels = {LABEL: self.supervised.owner}
                    self._contents[key] = await self.call(self.engine.content, image, sandbox._writable, labels)
            content = self._contents[key]
            missing = await sandbox.exec(["sh", "-c", "command -v bash && command -v tar"], timeout=20)
            if missing.exit_code:
                raise SandboxError(
                    f"image {sandbox.spec.image!r} has no bash or no tar: choose one with python3, bash and tar"
                )
        if content:
            skip = [folder.strip("/") for folder in (*sandbox.spec.readonly, *sandbox.spec.mounts)]
            done = await sandbox.exec(
                inside("fill", *skip), cwd="/", stdin=content, timeout=sandbox.spec.limits.setup_seconds
            )
            if done.exit_code:
                raise SandboxError(
                    f"the sandbox's own files do not fit into it ({done.text.strip()[-300:]}): raise limits.disk_mb"
                )

    # -- snapshots

    def register_snapshot(self, name: str, spec: SandboxSpec, tar: Path) -> Snapshot:
        """Register a snapshot with the files in ``tar``."""
        self._snapshots[name] = tar
        return Snapshot(name, self.name, spec, tar)

    def forget(self, lease: str) -> None:
        """Drop a closed sandbox from the list of open ones."""
        self.sandboxes.pop(lease, None)

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
        await asyncio.gather(*(sandbox.close() for sandbox in list(self.sandboxes.values())))
        await self.supervised.stop()
        if isinstance(engine := getattr(self, "engine", None), DockerEngine):  # set once started
            engine.api.close()
        self._threads.shutdown(wait=False)
        with contextlib.suppress(OSError):  # a later start removes what stays
            await offloaded(remove_tree, self.folder)


async def _see(sandbox: DockerSandbox, mounts: dict[str, str]) -> None:
    """Raise :class:`SandboxError` if the engine mounted folders of another machine than this one."""
    for target, source in mounts.items():
        script = "import os, sys; info = os.stat(sys.argv[1]); print(info.st_dev, info.st_ino)"
        seen = await sandbox.exec(["python3", "-I", "-S", "-c", script, target], cwd="/", timeout=20)
        here = os.stat(source)
        if seen.text.split() != [str(here.st_dev), str(here.st_ino)]:
            raise SandboxError(NOT_SHARED.format(target, source))


def _pack_readonly(spec: SandboxSpec, image: DockerImage) -> bytes:
    """A tar of all read-only files; b'' if there are none."""
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
