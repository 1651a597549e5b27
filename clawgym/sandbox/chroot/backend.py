"""Sandboxes in a container that may neither make namespaces nor mount: chroot, a uid per sandbox, Landlock, seccomp.

Ownership of files and processes separates sandboxes from each other and from the rest of the machine. So this needs
root, with at most the capabilities of a default container. Each sandbox's root is a folder of its own: a reused,
hard-linked copy of ``/usr`` that only root can change, and other files, which are removed with the sandbox.
The method :meth:`ChrootBackend.probe` reports what is not isolated; docs/how-to/sandboxes.md has a table.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import platform
import secrets
import socket
from pathlib import Path
from typing import Any

from clawgym.errors import InfraError, SandboxDied, SandboxError, SandboxUnavailable
from clawgym.offload import offloaded
from clawgym.records import packages_of
from clawgym.registry import sandboxes
from clawgym.sandbox import shared_folders
from clawgym.sandbox.chroot import rootdir
from clawgym.sandbox.chroot.clones import LEFT_OUT, FolderStore, store_of, store_of_usr
from clawgym.sandbox.inside.trees import remove_tree
from clawgym.sandbox.link import close_late
from clawgym.sandbox.linux import landlock, rootfs, seccomp
from clawgym.sandbox.linux.launch import launch
from clawgym.sandbox.linux.listen import at_path, connect_path
from clawgym.sandbox.linux.local import LocalSandbox
from clawgym.sandbox.linux.supervised import Supervised
from clawgym.sandbox.probe import Probed, by_cgroup, missing, questions
from clawgym.sandbox.protocol import Isolation, Sandbox, SandboxSpec, Snapshot

__all__ = ["ChrootBackend"]

_log = logging.getLogger("clawgym.sandbox")
_MiB = 2**20
_CAPABILITIES = {
    "CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "KILL": 5, "SETGID": 6, "SETUID": 7, "SETPCAP": 8, "SYS_CHROOT": 18,
    "MKNOD": 27,
}  # fmt: skip


class ChrootSandbox(LocalSandbox):
    """A sandbox of this backend; see :class:`~clawgym.sandbox.protocol.Sandbox`."""

    def __init__(
        self,
        backend: ChrootBackend,
        lease: str,
        spec: SandboxSpec,
        control: socket.socket,
        folder: Path,
        store: FolderStore,
        mounts: dict[str, FolderStore],
    ):
        root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        super().__init__(backend, lease, spec, control, root)
        self._backend = backend
        self._folder = folder
        self._store = store
        self._mounts = mounts

    def tool(self, name: str) -> list[str]:
        if not self.spec.pristine_tools:
            return [name]
        # Sandboxes cannot change /usr, or what the loader reads before a program: the path is enough.
        folder = next((f for f in ("/usr/local/bin", "/usr/bin") if os.path.exists(f"{f}/{name}")), "/usr/bin")
        return [f"{folder}/{name}"]

    async def _listen(self, port: int) -> socket.socket:
        return at_path(self._open_root(), port)

    async def _connect(self, port: int) -> socket.socket:
        return await connect_path(self._open_root(), port)

    async def snapshot(self) -> Snapshot:
        async with self._still():
            saved = await offloaded(
                rootdir.save,
                self._folder,
                self._backend.folder,
                (*self.spec.readonly, *self.spec.mounts),
                self.spec.limits.disk_mb,
            )
        return self._backend.register_snapshot(self.spec, saved)

    async def _free(self, gone: bool) -> None:
        if gone:
            await self._backend.recycle(self._store, self._folder, self._mounts)
        self._backend.sandboxes.pop(self.id, None)


@sandboxes.register("chroot")
class ChrootBackend(Probed):
    """Sandboxes for containers that may neither make namespaces nor mount; isolates less than other backends.

    See :class:`~clawgym.sandbox.protocol.Backend`. One for each event loop.
    """

    name = "chroot"

    def __init__(self) -> None:
        self.supervised = Supervised()
        self.folder = self.supervised.state / "owners" / self.supervised.owner
        self.sandboxes: dict[str, ChrootSandbox] = {}
        self._started: asyncio.Task[None] | None = None
        self._stores_of_usr: dict[str, FolderStore] = {}
        """Image -> the store of ``/usr`` with its packages."""
        self._snapshots: dict[str, Path] = {}
        self._mounted: dict[str, FolderStore] = {}
        """Folder of this machine -> its store."""
        self._mounting = asyncio.Lock()

    # -- starting

    async def _start(self) -> None:
        if self._started is None:
            self._started = asyncio.create_task(self._start_once())
        await asyncio.shield(self._started)

    async def _start_once(self) -> None:
        _check_host()
        await self.supervised.start()
        try:
            await self._store_of("default")
        except OSError as error:
            raise SandboxUnavailable(
                f"the copy of /usr could not be made ({error}): free disk space under {self.supervised.state}, "
                "or use the Docker backend (backend='docker')"
            ) from error

    async def _store_of(self, image: str) -> FolderStore:
        """The copies of ``/usr`` for ``image``. Raises OSError."""
        async with self._mounting:
            if image not in self._stores_of_usr:
                state, packages = self.supervised.state, packages_of(image) or ()
                root = await asyncio.to_thread(rootfs.prepare, state, packages)
                store = self._stores_of_usr[image] = await asyncio.to_thread(store_of_usr, state, root)
                store.roots(self.folder).mkdir(mode=0o700, exist_ok=True)
        return self._stores_of_usr[image]

    async def probe(self) -> Isolation:
        if self._isolation is not None:
            return self._isolation
        await self._start()
        try:
            sandbox = await self.create(SandboxSpec())
        except (InfraError, SandboxDied) as error:
            raise SandboxUnavailable(
                f"no sandbox could be started here ({error}): see the message, or use the Docker backend "
                "(backend='docker')"
            ) from error
        try:
            features = await questions(sandbox)
        finally:
            await sandbox.close()
        features["own_outer_uid"] = True
        unlimited = by_cgroup(features, self.supervised.limits)
        features["disk_limit"] = False
        features["landlock"] = landlock.abi() > 0
        self._isolation = Isolation(self.name, "chroot", features, (*_notes(features), *unlimited, *missing(features)))
        _warn_once(self._isolation.notes)
        return self._isolation

    # -- sandboxes

    def _plan(self, spec: SandboxSpec, root: Path, new: bool, owned: dict[str, list[str]]) -> dict[str, Any]:
        """The plan for process 1 (``jail.py``)."""
        limits = spec.limits
        rlimits = {"RLIMIT_CORE": 0, "RLIMIT_NOFILE": 4096, "RLIMIT_FSIZE": limits.file_mb * _MiB}
        if "memory" not in self.supervised.limits:
            rlimits["RLIMIT_DATA"] = limits.memory_mb * _MiB
        rlimits["RLIMIT_NPROC"] = limits.pids  # counts the processes of the sandbox's uid
        env = {**rootfs.ENV, "USER": "box", "LOGNAME": "box", **spec.env}
        guest = {"nonce": secrets.token_hex(8), "rlimits": rlimits, "mkdirs": [spec.workdir], "env": env}
        return {
            "kind": "chroot",
            "root": str(root),
            "new": new,
            **owned,
            "limits": {"memory": limits.memory_mb * _MiB, "pids": limits.pids + 4, "cpus": limits.cpus},
            "guest": guest,
            "warm": new and self.supervised.warm(spec),
        }

    async def create(self, spec: SandboxSpec) -> Sandbox:
        return await self._create(spec, None)

    async def _create(self, spec: SandboxSpec, saved: Path | None) -> ChrootSandbox:
        await self._start()
        if packages_of(spec.image) is None:
            raise SandboxError(
                f"image {spec.image!r}: the chroot backend knows 'default' and 'default:PACKAGE,PACKAGE' only: "
                "use the Docker backend for images"
            )
        if spec.join_network_of is not None:
            raise SandboxUnavailable(
                "live grading needs a network that sandboxes share, and chroot sandboxes have none: "
                "use the namespace or the Docker backend (backend='docker')"
            )
        task = asyncio.ensure_future(self._open(spec, saved))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(close_late)
            raise

    async def _open(self, spec: SandboxSpec, saved: Path | None) -> ChrootSandbox:
        lease = secrets.token_hex(8)
        try:
            store = await self._store_of(spec.image)
        except OSError as error:
            raise InfraError(f"the copy of /usr could not be made ({error}): free disk space there") from error
        root = store.roots(self.folder) / lease
        mounts: dict[str, FolderStore] = {}
        try:
            mounts = await self._stores(spec)
            owned = await offloaded(rootdir.build, store, root, spec.readonly, mounts, saved)
            control, _ = await launch(self.supervised, lease, self._plan(spec, root, saved is None, owned))
        except BaseException as error:
            await self.recycle(store, root, mounts)
            if isinstance(error, OSError):
                raise InfraError(f"a sandbox's files could not be made ({error}): free disk space there") from error
            raise
        sandbox = self.sandboxes[lease] = ChrootSandbox(self, lease, spec, control, root, store, mounts)
        sandbox.start()
        return sandbox

    async def _stores(self, spec: SandboxSpec) -> dict[str, FolderStore]:
        """Folder in the sandbox -> the store whose copy is put there, as nothing can be mounted."""
        found: dict[str, FolderStore] = {}
        for target, source in (await asyncio.to_thread(shared_folders.checked, spec)).items():
            async with self._mounting:
                if source not in self._mounted:
                    self._mounted[source] = await asyncio.to_thread(store_of, self.supervised.state, source)
            found[target] = self._mounted[source]
        return found

    async def recycle(self, store: FolderStore, root: Path, mounts: dict[str, FolderStore]) -> None:
        """Return the copies of folders and remove the rest. What stays is removed with the owner's folder."""
        with contextlib.suppress(OSError):
            await asyncio.to_thread(rootdir.take_down, root, mounts)
        with contextlib.suppress(OSError):
            await offloaded(store.recycle, root)

    # -- snapshots

    def register_snapshot(self, spec: SandboxSpec, saved: Path) -> Snapshot:
        """Register a snapshot of the files in ``saved``."""
        self._snapshots[saved.name] = saved
        return Snapshot(saved.name, self.name, spec, saved)

    async def fork(self, snapshot: Snapshot, spec: SandboxSpec | None = None) -> Sandbox:
        saved = self._snapshots.get(snapshot.id)
        if saved is None:
            raise SandboxError("this snapshot was dropped or belongs to another backend: take a new one")
        chosen = spec or snapshot.spec
        if chosen.image != snapshot.spec.image:
            raise SandboxError("a fork keeps the snapshot's image: leave spec.image as it is")
        return await self._create(chosen, saved)

    async def drop(self, snapshot: Snapshot) -> None:
        saved = self._snapshots.pop(snapshot.id, None)
        if saved is not None:
            with contextlib.suppress(OSError):  # what stays is removed with the owner's folder
                await offloaded(remove_tree, saved)

    async def aclose(self) -> None:
        await asyncio.gather(*(sandbox.close() for sandbox in list(self.sandboxes.values())))
        await self.supervised.stop()
        if self._stores_of_usr:
            for store in (*self._stores_of_usr.values(), *self._mounted.values()):
                store.close()
            self._stores_of_usr.clear()
            self._mounted.clear()


def _check_host() -> None:
    """Raise :class:`SandboxUnavailable` if this host cannot run the backend."""
    if os.geteuid() != 0:
        raise SandboxUnavailable(
            "the chroot backend needs root, to give each sandbox a uid of its own: run as root in the container "
            "(docker run --user 0), or allow user namespaces and use the namespace backend, or use the Docker backend"
        )
    status = Path("/proc/self/status").read_text()
    held = int(status.partition("CapEff:\t")[2].partition("\n")[0], 16)
    missing = [name for name, bit in _CAPABILITIES.items() if not held >> bit & 1]
    if missing:
        raise SandboxUnavailable(
            f"the chroot backend needs the capabilities of a default container, and {', '.join(missing)} is missing: "
            f"start the container with --cap-add {' --cap-add '.join(missing)}"
        )
    if Path("/proc/self/uid_map").read_text().split() != ["0", "0", str(2**32 - 1)]:
        raise SandboxUnavailable(
            "the chroot backend needs device files, which root of a user namespace (a rootless container) cannot make: "
            "allow nested user namespaces and use the namespace backend, or use the Docker backend"
        )
    if not Path("/bin").is_symlink():
        raise SandboxUnavailable(
            "this host keeps programs outside /usr (/bin is not a link to usr/bin): use the Docker backend"
        )
    try:
        seccomp.program()
    except KeyError:
        raise SandboxUnavailable(
            f"no seccomp table for {platform.machine()}: use the Docker backend (backend='docker')"
        ) from None


@functools.cache
def _warn_once(notes: tuple[str, ...]) -> None:
    """Warn once per process about what ``chroot`` does not isolate."""
    _log.warning("the chroot backend isolates less than the others:%s", "".join(f"\n- {note}" for note in notes))


def _notes(features: dict[str, bool]) -> list[str]:
    left_out = ", ".join(f"/usr/{name}" for name in sorted(LEFT_OUT))
    notes = [
        "processes: no pid namespace; the sandbox's processes are seen by the host's tools, and find out which pids "
        "exist",
        "files: /usr is read-only and nothing can be installed in it; sandboxes do without " + left_out,
        "files: no /proc, /sys, /dev/fd or /dev/pts in a sandbox: ps, <(...), /dev/stdout, terminals that a program "
        "opens, "
        "and every task that reads /proc do not work",
        "network: none, not even a loopback; no live grading",
        "users: commands run as 'box', which is not root inside either",
        "disk: not limited for the sandbox as a whole (limits.file_mb holds for each file)",
        "host: hostname, clock, load and the number of processors are the machine's",
    ]
    if not features["landlock"]:
        notes.append("files: no Landlock in this kernel; only chroot and ownership guard the host's files")
    if not features["abstract_sockets"]:
        notes.append(
            "sockets: abstract unix sockets of this machine and of other sandboxes can be reached (Linux 6.12)"
        )
    return notes
