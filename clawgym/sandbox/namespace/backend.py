"""The default backend: private namespaces of every kind, one unprivileged outer uid per sandbox, no state on disk.

All that a sandbox writes goes to a size-limited tmpfs, which exists in its own mount namespace only. The owner holds a
descriptor of the tmpfs and one of the root. It reads files through them, even after all processes have been killed;
with the owner the files are gone.

Isolation: all namespaces, seccomp, no capability, ``no_new_privs``, rlimits; as root also an outer uid per sandbox and
cgroup limits. :meth:`NamespaceBackend.probe` measures in a real sandbox what holds here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import secrets
import socket
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from clawgym.errors import InfraError, SandboxDied, SandboxError, SandboxUnavailable
from clawgym.offload import offloaded
from clawgym.records import TaskFile, packages_of
from clawgym.registry import sandboxes
from clawgym.sandbox import shared_folders
from clawgym.sandbox.images import ImageStore
from clawgym.sandbox.inside.trees import Room, remove_tree
from clawgym.sandbox.link import PORT, PRISTINE, close_late
from clawgym.sandbox.linux import rootfs, seccomp
from clawgym.sandbox.linux.launch import launch
from clawgym.sandbox.linux.layers import most_entries, save_folder
from clawgym.sandbox.linux.listen import checked, connect, refused
from clawgym.sandbox.linux.local import LocalSandbox
from clawgym.sandbox.linux.supervised import Supervised
from clawgym.sandbox.probe import Probed, probe
from clawgym.sandbox.protocol import Isolation, Sandbox, SandboxSpec, Snapshot

__all__ = ["NamespaceBackend"]

_MiB = 2**20
_DEEPEST = 200
"""Most saved layers below a fork; the kernel mounts at most 500."""


class NamespaceSandbox(LocalSandbox):
    """A sandbox of this backend; see :class:`~clawgym.sandbox.protocol.Sandbox`."""

    def __init__(
        self,
        backend: NamespaceBackend,
        lease: str,
        spec: SandboxSpec,
        control: socket.socket,
        layer: int,
        root: int,
        below: tuple[Path, ...],
    ) -> None:
        super().__init__(backend, lease, spec, control, root)
        self._backend = backend
        self._layer = layer
        self._one_gift = asyncio.Lock()
        self.below = below
        """The saved layers below this fork, bottom first."""

    async def _listen(self, port: int) -> socket.socket:
        try:
            return await self._gift(port)
        except SandboxDied:
            raise
        except SandboxError as error:
            raise refused(port, error) from None

    async def _connect(self, port: int) -> socket.socket:
        sock = await self._gift(0)
        await connect(sock, port)
        return sock

    async def _gift(self, port: int) -> socket.socket:
        """A socket made by process 1, which is in the sandbox's network: an ordinary user could not enter it."""
        task = asyncio.ensure_future(self._take_gift(port))
        try:
            return await asyncio.shield(task)  # if cancelled, the next call must not take this one's socket
        except asyncio.CancelledError:
            task.add_done_callback(lambda t: t.cancelled() or t.exception() or t.result().close())
            raise

    async def _take_gift(self, port: int) -> socket.socket:
        async with self._one_gift:
            gifts = self._stream.gifts = []
            try:
                await self.request("N", self._channel(), PORT.pack(port), 20.0, 0)
                if len(gifts) != 1:
                    raise SandboxError("no socket came with the answer")
                return checked(gifts.pop(), port)
            finally:
                self._stream.gifts = None
                for fd in gifts:
                    os.close(fd)

    async def snapshot(self) -> Snapshot:
        if len(self.below) >= _DEEPEST:
            raise SandboxError(
                f"this sandbox lies on {_DEEPEST} snapshots, each forked from the one before: begin from a new sandbox"
            )
        async with self._still():
            layer = await offloaded(self._backend.save_layer, self)
        return self._backend.register_snapshot(self, layer)

    def _let_go(self) -> None:
        super()._let_go()
        os.close(self._layer)

    async def _free(self, gone: bool) -> None:
        self._backend.sandboxes.pop(self.id, None)
        await self._backend.let_go(self.below)


class _Stack(NamedTuple):
    """The file systems of a plan."""

    lowers: dict[str, str]
    """Folder below the mount point -> the folder of this machine that root mounts there."""
    mkdirs: tuple[str, ...]
    overlays: tuple[tuple[str | None, str, list[str]], ...]
    """Name of the writable layer (None: read-only), target, lower folders, top first."""


@lru_cache(maxsize=64)  # the same for almost all sandboxes of a run
def _stack(root: rootfs.Root, layers: tuple[Path, ...], as_root: bool, pristine: tuple[Path, ...]) -> _Stack:
    """``pristine``: the lower folders of the untouched ``/usr``, bottom first, if it is asked for."""
    lowers: dict[str, str] = {}

    def lower(index: int, kind: str, path: Path) -> str:
        if not as_root:
            return str(path)
        lowers[f"low/{kind}{index}"] = str(path)
        return f"low/{kind}{index}"

    mkdirs: list[str] = []
    overlays: list[tuple[str | None, str, list[str]]] = []
    for kind, target, paths in (("root", "new", root.base), ("usr", "new/usr", root.usr)):
        if paths:
            stack = [*paths, *(saved / kind for saved in layers)]  # bottom first; overlay options start at the top
            overlays.append((kind, target, [lower(i, kind, path) for i, path in enumerate(stack)][::-1]))
            mkdirs += [kind, f"{kind}-work"]
    if pristine:  # the host's /usr without the sandbox's changes; hidden folders stay hidden
        overlays.append((None, "pristine", [lower(i, "usr", path) for i, path in enumerate(pristine)][::-1]))
        mkdirs.append("pristine")
    return _Stack(lowers, tuple(mkdirs), tuple(overlays))


@sandboxes.register("namespace")
class NamespaceBackend(Probed):
    """Sandboxes in Linux namespaces, one unprivileged user id each: the default on Linux.

    See :class:`~clawgym.sandbox.protocol.Backend`. One for each event loop.
    """

    name = "namespace"

    def __init__(self) -> None:
        self.supervised = Supervised()
        self._mountpoint = str(self.supervised.state / "layer")
        self.sandboxes: dict[str, NamespaceSandbox] = {}
        self._started: asyncio.Task[None] | None = None
        self._roots: dict[str, rootfs.Root] = {}
        self._images = ImageStore()
        self._preparing = asyncio.Lock()
        self._sending = asyncio.Semaphore(8)
        self._snapshots: dict[str, tuple[Path, ...]] = {}
        self._users: Counter[Path] = Counter()
        """Saved layer -> number of snapshots and sandboxes that need it."""

    # -- starting

    async def _start(self) -> None:
        if self._started is None:
            self._started = asyncio.create_task(self._start_once())
        await asyncio.shield(self._started)

    async def _start_once(self) -> None:
        try:
            seccomp.program()
        except KeyError:
            raise SandboxUnavailable(
                f"no seccomp table for {platform.machine()}: use the Docker backend (backend='docker')"
            ) from None
        await self.supervised.start()
        state = self.supervised.state
        try:
            (state / "layer").mkdir(parents=True, exist_ok=True)
            await self._root_of("default")
        except OSError as error:
            raise SandboxUnavailable(
                f"the default root cannot be prepared ({error}): use the Docker backend, or a rootfs folder as image"
            ) from error

    async def probe(self) -> Isolation:
        if self._isolation is not None:
            return self._isolation
        await self._start()
        try:
            sandbox = await self.create(SandboxSpec())
        except (InfraError, SandboxDied) as error:
            raise SandboxUnavailable(
                f"no sandbox could be started here ({error}): allow user namespaces "
                "(sysctl kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0), "
                "or in a container as root use backend='chroot', which isolates less (`clawgym doctor` says what), "
                "or use the Docker backend (backend='docker')"
            ) from error
        try:
            as_root = os.geteuid() == 0
            self._isolation = await probe(sandbox, self.supervised.limits, as_root)
        finally:
            await sandbox.close()
        return self._isolation

    # -- sandboxes

    async def _root_of(self, image: str) -> rootfs.Root:
        packages = packages_of(image)
        if packages is not None:
            async with self._preparing:
                if image not in self._roots:
                    prepared = await asyncio.to_thread(rootfs.prepare, self.supervised.state, packages)
                    self._roots[image] = prepared
            return self._roots[image]
        folder = Path(image)
        if folder.is_absolute() and (folder / "bin").exists():
            return rootfs.Root((folder,), (), image)
        found = await asyncio.to_thread(self._images.find, image)
        if found is not None:
            return rootfs.Root(found.layers, (), found.digest, env=tuple(found.env.items()))
        raise SandboxError(
            f"image {image!r}: is not on this machine: add it (`clawgym images add SOURCE --name {image}`), or use the "
            "Docker backend (backend='docker')"
        )

    def _plan(self, spec: SandboxSpec, root: rootfs.Root, layers: tuple[Path, ...]) -> dict[str, Any]:
        """The plan for process 1 (``unshare.py``)."""
        limits = spec.limits
        as_root = os.geteuid() == 0
        layer = self._mountpoint
        # The tools of an image's sandbox are this machine's too: an image may have no Python, or a hostile one.
        tools = root.usr or self._roots["default"].usr
        stack = _stack(root, layers, as_root, tools if spec.pristine_tools else ())
        mkdirs = [*stack.mkdirs]
        binds: list[tuple[str, str]] = []
        if spec.pristine_tools:
            binds.append((f"{layer}/pristine", f"{PRISTINE}/usr"))
            binds.append(("/dev/null", "/etc/ld.so.preload"))  # every loader reads it
        for index, folder in enumerate(spec.readonly):
            mkdirs.append(f"ro/{index}")
            binds.append((f"{layer}/ro/{index}", folder))
        mounts: dict[str, str] = {}
        for index, (target, source) in enumerate(shared_folders.checked(spec).items()):
            if as_root:
                mounts[f"mount/{index}"] = source
            binds.append((f"{layer}/mount/{index}" if as_root else source, target))
        rlimits: dict[str, int] = {"RLIMIT_CORE": 0, "RLIMIT_NOFILE": 4096, "RLIMIT_FSIZE": limits.file_mb * _MiB}
        if "memory" not in self.supervised.limits:
            rlimits["RLIMIT_DATA"] = limits.memory_mb * _MiB
        # Counts the processes of the sandbox's user namespace (Linux 5.14) or of its outer uid.
        rlimits["RLIMIT_NPROC"] = limits.pids
        nonce = secrets.token_hex(8)
        env = {**rootfs.ENV, **dict(root.env), **spec.env}
        return {
            "kind": "namespace",
            "filter": "one user" if spec.one_user else "namespace",
            "lowers": stack.lowers,
            "mounts": mounts,
            "mkdirs": mkdirs,
            "overlays": stack.overlays,
            "binds": binds,
            "mountpoint": layer,
            "layer_bytes": limits.disk_mb * _MiB,
            "layer_inodes": most_entries(limits.disk_mb),
            "limits": {
                # Files of the layer are memory: a full disk must not end the sandbox for lack of memory.
                "memory": (limits.memory_mb + limits.disk_mb) * _MiB,
                "pids": limits.pids + 4,
                "cpus": limits.cpus,
            },
            "guest": {"nonce": nonce, "rlimits": rlimits, "mkdirs": [spec.workdir], "env": env},
            "join": spec.join_network_of.id if spec.join_network_of is not None else None,
            "warm": not layers and self.supervised.warm(spec),
        }

    async def create(self, spec: SandboxSpec) -> Sandbox:
        return await self._create(spec, ())

    async def _create(self, spec: SandboxSpec, layers: tuple[Path, ...]) -> NamespaceSandbox:
        await self._start()
        if spec.join_network_of is not None and os.geteuid() != 0:
            raise SandboxUnavailable(
                "live grading needs the sandbox's network, which an ordinary user cannot share here: "
                "run as root, or use the Docker backend (backend='docker')"
            )
        try:
            root = await self._root_of(spec.image)
        except OSError as error:
            raise InfraError(f"the default root cannot be prepared ({error}): free disk space") from error
        async with self._sending:
            task = asyncio.ensure_future(self._open(spec, self._plan(spec, root, layers), layers))
            try:
                sandbox = await asyncio.shield(task)
            except asyncio.CancelledError:
                task.add_done_callback(close_late)
                raise
        return sandbox

    async def _open(self, spec: SandboxSpec, plan: dict[str, Any], layers: tuple[Path, ...]) -> NamespaceSandbox:
        self._users.update(layers)
        lease = secrets.token_hex(8)
        try:
            blob = _readonly_blob(spec.readonly.values()) if spec.readonly else None
            control, (layer, root) = await launch(self.supervised, lease, plan, blob, gifts=2)
        except BaseException:
            await self.let_go(layers)
            raise
        sandbox = NamespaceSandbox(self, lease, spec, control, layer, root, layers)
        self.sandboxes[lease] = sandbox
        sandbox.start()
        return sandbox

    # -- snapshots

    def save_layer(self, sandbox: NamespaceSandbox) -> Path:
        """Copy the writable layer of a frozen sandbox; all files become this user's. Runs in a thread.

        Raises OSError, :class:`~clawgym.sandbox.inside.trees.TooMuch`.
        """
        target = self.supervised.state / "owners" / self.supervised.owner / f"snapshot-{secrets.token_hex(8)}"
        target.mkdir()
        limits = sandbox.spec.limits
        # The tmpfs is bounded already. Twice its size, as hard links become separate files.
        room = Room(most_entries(limits.disk_mb), 2 * limits.disk_mb * _MiB)
        try:
            for kind in ("root", "usr"):
                with contextlib.suppress(FileNotFoundError):
                    save_folder(sandbox._layer, kind, target / kind, room)
        except BaseException:
            _drop(target)
            raise
        return target

    def register_snapshot(self, sandbox: NamespaceSandbox, layer: Path) -> Snapshot:
        """Register a snapshot: ``layer`` over the layers that the sandbox was forked from."""
        layers = (*sandbox.below, layer)
        self._users.update(layers)
        self._snapshots[layer.name] = layers
        return Snapshot(layer.name, self.name, sandbox.spec, layers)

    async def fork(self, snapshot: Snapshot, spec: SandboxSpec | None = None) -> Sandbox:
        layers = self._snapshots.get(snapshot.id)
        if layers is None:
            raise SandboxError("this snapshot was dropped or belongs to another backend: take a new one")
        chosen = spec or snapshot.spec
        if chosen.image != snapshot.spec.image:
            raise SandboxError("a fork keeps the snapshot's image: leave spec.image as it is")
        return await self._create(chosen, layers)

    async def drop(self, snapshot: Snapshot) -> None:
        await self.let_go(self._snapshots.pop(snapshot.id, ()))

    async def let_go(self, layers: tuple[Path, ...]) -> None:
        """Remove those saved layers that no snapshot or sandbox needs any more."""
        self._users.subtract(layers)
        for layer in layers:
            if self._users[layer] <= 0:
                del self._users[layer]
                await offloaded(_drop, layer)

    async def aclose(self) -> None:
        await asyncio.gather(*(sandbox.close() for sandbox in list(self.sandboxes.values())))
        await self.supervised.stop()


def _drop(layer: Path) -> None:
    """Remove a saved layer; what cannot be removed now is removed with the owner's folder."""
    with contextlib.suppress(OSError):
        remove_tree(layer)


def _readonly_blob(folders: Iterable[tuple[TaskFile, ...]]) -> int:
    """A memory file with the read-only files: a line of JSON ``[[path, mode, size], ...]``, then the contents."""
    rows: list[tuple[str, int, int]] = []
    contents: list[bytes] = []
    for index, files in enumerate(folders):
        for file in files:
            contents.append(file.read())
            rows.append((f"ro/{index}/{file.path}", 0o555 if file.executable else 0o444, len(contents[-1])))
    fd = os.memfd_create("readonly", os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as blob:
        blob.write(json.dumps(rows).encode() + b"\n" + b"".join(contents))
    return fd
