"""Harbor's trials in the sandboxes of this library, without Docker.

    harbor run -p TASKS -a oracle --environment-import-path clawgym.harbor:Environment

Harbor runs the agents and the verifiers; this module is its environment. Needs the package ``harbor`` (Python 3.12).

Invariants: what a task needs and a sandbox lacks (a container image, a GPU, another user, several containers) is named
in an error of the one trial, when it starts; other trials go on. Files of a sandbox are written to this machine without
following a link and within bounds. All sandboxes of an event loop share one backend, which ends with the loop.
"""

from __future__ import annotations

import asyncio
import io
import os
import secrets
import shlex
import stat
import tarfile
import tempfile
import weakref
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import Field, field_validator

from clawgym.errors import ClawGymError, MissingDependency, SandboxError, UnsupportedTask
from clawgym.offload import offloaded
from clawgym.records import Limits, TaskFile
from clawgym.sandbox import Archive, Sandbox, SandboxSpec, backend
from clawgym.sandbox.egress import AllowList, way_out
from clawgym.sandbox.extract import filter_tar, write_tree
from clawgym.tars import open_tar
from clawgym.tasks.formats.harbor import HarborPlace, MissingImage, place_of, script_needs, user_needs
from clawgym.visible import visible

try:
    from harbor.environments.base import (  # pyright: ignore[reportMissingImports]
        BaseEnvironment,
        ExecResult,
        SandboxBuildFailedError,
    )
    from harbor.environments.capabilities import (  # pyright: ignore[reportMissingImports]
        EnvironmentCapabilities,
        EnvironmentResourceCapabilities,
    )
    from harbor.environments.options import EnvironmentOptions  # pyright: ignore[reportMissingImports]
    from harbor.models.task.config import NetworkMode  # pyright: ignore[reportMissingImports]
    from harbor.utils.path_filter import filter_paths_by_patterns  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise MissingDependency("clawgym.harbor needs Harbor: pip install harbor, with Python 3.12 or later") from error

__all__ = ["Environment", "EnvironmentSettings"]

_MiB = 2**20
_MOST = 256 * _MiB
"""Bytes of one download."""
_MOST_FILES = 20_000
"""Files and folders of one download."""
_OUTPUT = 4 * _MiB
"""Bytes kept of each stream of a command, from its beginning and end."""
_FOREVER = 10.0**6
"""Seconds of a command without a time limit: Harbor cancels it with its phase."""
_PROCESSES = 4096
_TAR_SECONDS = 600
_DOWNLOADS = 4
"""Downloads at a time, whose files are held in memory."""
_ALLOW = "name the hosts that it may reach (--ek allow=example.org), or use Harbor's docker environment"
_ROOT = (None, "", 0, "0", "root")


class EnvironmentSettings(EnvironmentOptions):  # type: ignore[misc]
    """The options of :class:`Environment` (``--ek NAME=VALUE``)."""

    allow: tuple[str, ...] = Field(
        default=(),
        description="Hosts that tasks with a public network reach through a proxy: example.org, *.example.org, "
        "separated by commas. Without any, a task that declares the network or downloads in its scripts is refused.",
    )

    @field_validator("allow", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        hosts = tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else tuple(value)
        try:
            AllowList(hosts)
        except (SandboxError, TypeError) as error:
            raise ValueError(str(error)) from error
        return hosts


class _Shared:
    """What the environments of one event loop have in common."""

    def __init__(self) -> None:
        self.backend = backend()
        self.downloads = asyncio.Semaphore(_DOWNLOADS)
        self.builds: dict[str, asyncio.Lock] = {}


_held: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[_Shared, AsyncGenerator[None]]]
_held = weakref.WeakKeyDictionary()


async def _shared() -> _Shared:
    loop = asyncio.get_running_loop()
    if loop not in _held:
        shared = _Shared()
        closing = _until_the_loop_ends(shared)
        _held[loop] = shared, closing
        await anext(closing)
    return _held[loop][0]


async def _until_the_loop_ends(shared: _Shared) -> AsyncGenerator[None]:
    """A loop closes its asynchronous generators at its end (``asyncio.run`` does)."""
    try:
        yield
    finally:
        _held.pop(asyncio.get_running_loop(), None)
        await shared.backend.aclose()


class Environment(BaseEnvironment):  # type: ignore[misc]
    """Harbor's environment of one trial: a sandbox of this library.

    A simple Dockerfile is interpreted, any other is built in the image store (``docs/how-to/images.md``), and
    ``docker_image`` is looked up there.

    - Every command runs as root, the only user.
    - ``cpus``, ``memory_mb`` and ``storage_mb`` are limits; by default those of :class:`~clawgym.records.Limits`.
    - ``no-network`` and ``allowlist`` of host names are enforced, also between phases. The hosts are reached through a
      proxy that programs find in ``http_proxy`` and ``https_proxy``. A task that says nothing of the network has none.
    - Log folders are downloaded. A mount of yours must be read-only.
    - A download has at most 256 MiB and 20,000 entries. Output above 4 MiB loses its middle.
    """

    options_model = EnvironmentSettings

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._needs: list[str] = []
        self._sandbox: Sandbox | None = None
        self._workdir = "/"
        self._proxy: AbstractAsyncContextManager[dict[str, str]] | None = None
        self._proxy_env: dict[str, str] = {}
        super().__init__(*args, **kwargs)

    # -- what it can do

    @staticmethod
    def type() -> str:
        """``clawgym``."""
        return "clawgym"

    @property
    def capabilities(self) -> Any:
        """The network can be closed, limited to hosts, and changed; nothing else of Harbor's list."""
        return EnvironmentCapabilities(
            disable_internet=True,
            network_allowlist=True,
            network_allowlist_hostnames=True,
            network_allowlist_wildcard_hostnames=True,
            network_allowlist_ipv4_addresses=True,
            dynamic_network_policy=True,
        )

    @classmethod
    def resource_capabilities(cls) -> Any:
        """Limits of the whole sandbox, where it runs as root."""
        as_root = os.geteuid() == 0
        return EnvironmentResourceCapabilities(cpu_limit=as_root, memory_limit=as_root, fractional_cpus=True)

    # An exception of the constructor would end the whole job. So these checks note what is missing, and start() raises.

    def _validate_definition(self) -> None:
        for mount in self._host_mounts:
            if mount["type"] != "bind" or not mount.get("read_only"):
                self._needs.append(f"mounts {mount['source']} to write in it: add read_only, or upload the files")

    def _note(self, check: Callable[[], None]) -> None:
        try:
            check()
        except (RuntimeError, ValueError) as error:
            self._needs.append(str(error))

    def _validate_gpu_support(self) -> None:
        self._note(super()._validate_gpu_support)

    def _validate_tpu_support(self) -> None:
        self._note(super()._validate_tpu_support)

    def _validate_windows_support(self) -> None:
        self._note(super()._validate_windows_support)

    def _validate_network_policy_support(self) -> None:
        self._note(super()._validate_network_policy_support)
        if self.options.allow:
            return
        public = NetworkMode.PUBLIC
        stated = "network_mode" in self.task_env_config.model_fields_set or self._network_policy.network_mode != public
        if stated and any(one.network_mode == public for one in (self._network_policy, *self._phase_network_policies)):
            self._needs.append(f"needs the network (network_mode is 'public'): {_ALLOW}")

    def _task_needs(self) -> list[str]:
        """What the files of the task say; none for the folder of a verifier."""
        folder = self.environment_dir.parent
        found = user_needs(folder)
        if not self.options.allow and self._network_policy.network_mode != NetworkMode.ALLOWLIST:
            found += [f"{need}: {_ALLOW}" for need in script_needs(folder)]
        return found

    # -- its life

    async def start(self, force_build: bool) -> None:
        """Start the sandbox.

        Raises:
            harbor.environments.base.SandboxBuildFailedError: the task needs what a sandbox does not have, or an image
                that cannot be built; the message says what to do.
        """
        try:
            if needs := self._needs or await offloaded(self._task_needs):
                raise UnsupportedTask(needs[0])
            shared = await _shared()
            place = await self._place(shared)
            self._workdir = self.task_env_config.workdir or place.workdir or "/"
            spec = SandboxSpec(
                image=place.image,
                limits=self._limits(),
                env=place.env,
                workdir=self._workdir,
                mounts={mount["target"]: Path(mount["source"]) for mount in self._host_mounts},
            )
            self._sandbox = await shared.backend.create(spec)
            files = [replace(file, path=path.lstrip("/")) for path, file in place.files.items()]
            await self._put(files, [_entry(path.lstrip("/")) for path in sorted(place.folders - {"/"})], "/")
            await self._apply_network_policy(self._network_policy)
        except ClawGymError as error:
            await self.stop(delete=True)
            raise SandboxBuildFailedError(f"{self.environment_name}: {error}") from error
        await self._upload_environment_dir_after_start()
        await self.ensure_dirs(self._mount_targets(writable_only=True))

    async def _place(self, shared: _Shared) -> HarborPlace:
        docker_image = self.task_env_config.docker_image
        try:
            return await offloaded(place_of, self.environment_dir, docker_image)
        except MissingImage as error:
            if error.name is None:
                raise
            async with shared.builds.setdefault(error.name, asyncio.Lock()):
                await self._build(shared, error.name, error)
        return await offloaded(place_of, self.environment_dir, docker_image)

    async def _build(self, shared: _Shared, name: str, missing: MissingImage) -> None:
        from clawgym.sandbox.images import ImageStore
        from clawgym.sandbox.images.build import build_image

        store = ImageStore()
        if store.find(name) is not None:  # built while this trial waited
            return
        self.logger.info(f"building {self.environment_dir} as {name}")
        try:
            await build_image(self.environment_dir, name, store=store, backend=shared.backend, allow=self.options.allow)
        except SandboxError as error:
            raise UnsupportedTask(f"{error}; to build it by hand: {missing}") from error

    def _limits(self) -> Limits:
        given = {
            "cpus": self._effective_cpus,
            "memory_mb": self._effective_memory_mb,
            "disk_mb": self._effective_storage_mb,
        }
        limits = Limits(pids=_PROCESSES, **{name: value for name, value in given.items() if value is not None})
        return limits.plus(file_mb=max(0, limits.disk_mb - limits.file_mb))

    async def stop(self, delete: bool) -> None:
        """End the sandbox and everything in it. Nothing is kept, whatever ``delete`` says."""
        sandbox, self._sandbox = self._sandbox, None
        try:
            await self._close_proxy()
        finally:
            if sandbox is not None:
                await sandbox.close()

    async def _apply_network_policy(self, network_policy: Any) -> None:
        await self._close_proxy()
        mode = network_policy.network_mode
        hosts = {NetworkMode.ALLOWLIST: network_policy.allowed_hosts, NetworkMode.PUBLIC: self.options.allow}.get(mode)
        if hosts:
            proxy = way_out(self._running(), AllowList(hosts))
            self._proxy_env = await proxy.__aenter__()
            self._proxy = proxy

    async def _close_proxy(self) -> None:
        proxy, self._proxy, self._proxy_env = self._proxy, None, {}
        if proxy is not None:
            await proxy.__aexit__(None, None, None)

    def _running(self) -> Sandbox:
        if self._sandbox is None:
            raise RuntimeError(f"{self.session_id}: the sandbox is not running: call start() first")
        return self._sandbox

    # -- commands

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> Any:
        """Run ``bash -c command``; what it leaves in the background goes on.

        Raises:
            RuntimeError: ``timeout_sec`` seconds were over, or ``user`` is not root.
            clawgym.errors.SandboxDied: the sandbox ended, for example for lack of memory.
        """
        if (wanted := self._resolve_user(user)) not in _ROOT:
            raise RuntimeError(f"needs the user {wanted!r}, and sandboxes have one user, root: leave it out")
        done = await self._running().exec(
            ["bash", "-c", command],
            cwd=cwd or self._workdir,
            env={**self._proxy_env, **(self._merge_env(env) or {})},
            timeout=timeout_sec or _FOREVER,
            max_output=_OUTPUT,
            stdout_only=True,
        )
        if done.timed_out:
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds")
        stdout, stderr = done.output.decode(errors="replace"), done.stderr.decode(errors="replace")
        if callback := self._output_callback():
            for text, stream in ((stdout, "stdout"), (stderr, "stderr")):
                if text:
                    await callback(text, stream)
        return ExecResult(stdout=stdout or None, stderr=stderr or None, return_code=done.exit_code)

    # -- files

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """Write a file of this machine to ``target_path``, or into it if it is a folder.

        Raises :class:`~clawgym.errors.SandboxError` if it cannot be written, :class:`~clawgym.errors.TaskError` if it
        is larger than 256 MiB.
        """
        source = Path(source_path).resolve()
        if target_path.endswith("/") or await self.is_dir(target_path, user="root"):
            target_path = f"{target_path.rstrip('/')}/{Path(source_path).name}"
        folder, _, name = target_path.rpartition("/")
        await self._put([TaskFile(name, source, os.access(source, os.X_OK))], [], folder or "/")

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """Write what is in a folder of this machine into ``target_dir``. Links are written as links.

        Raises like :meth:`upload_file`.
        """
        files, others = await offloaded(_tree, Path(source_dir))
        await self._put(files, others, target_dir)

    async def _put(self, files: Sequence[TaskFile], others: Sequence[tarfile.TarInfo], folder: str) -> None:
        sandbox = self._running()
        if others:
            packed = io.BytesIO()
            with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
                for one in others:
                    tar.addfile(one)
            await sandbox.put_archive(Archive(packed.getvalue()), folder)
        if files or not others:
            await sandbox.put(files, folder)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """Read a file of the sandbox into the file ``target_path``, in place of a link there.

        Raises :class:`~clawgym.errors.SandboxError` for anything but a regular file of at most 256 MiB.
        """
        target = Path(target_path)
        if target.is_dir() and not target.is_symlink():
            target /= PurePosixPath(source_path).name
        async with (await _shared()).downloads:
            data = await self._running().get(await self._without_links(source_path), max_bytes=_MOST)
            await offloaded(_write_file, target, data)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Write what is in a folder of the sandbox into a folder of this machine.

        Left out are links that lead out of the folder, sockets and devices. No link in ``target_dir`` is followed.

        Raises :class:`~clawgym.errors.SandboxError` if it is no folder, or over the bounds of a download.
        """
        await self._download(source_dir, target_dir, None)

    async def download_dir_with_exclusions(
        self, *, source_dir: str, target_dir: Path | str, exclude: list[str]
    ) -> None:
        """Like :meth:`download_dir`, without what the patterns of ``tar --exclude`` match."""
        packed = f"/tmp/.clawgym-{secrets.token_hex(8)}.tar"
        flags = " ".join(f"--exclude={shlex.quote(pattern)}" for pattern in exclude)
        command = f"tar cf {packed} {flags} -C {shlex.quote(source_dir)} ."
        done = await self.exec(command, timeout_sec=_TAR_SECONDS, user="root")
        try:
            if done.return_code not in (0, 1):  # 1: a file changed while it was read
                raise SandboxError(f"{source_dir}: cannot be packed ({(done.stderr or '')[-400:]}): check the folder")
            async with (await _shared()).downloads:
                data = await self._running().get(packed, max_bytes=_MOST)
                archive = await offloaded(filter_tar, data, "", _MOST, _MOST_FILES)
                await self._write(source_dir, archive, target_dir)
        finally:
            await self.exec(f"rm -f {packed}", user="root")

    async def download_dir_filtered(
        self,
        *,
        source_dir: str,
        target_dir: Path | str,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        protect: Sequence[str] | None = None,
    ) -> None:
        """Like :meth:`download_dir`, for the files that the patterns choose; those in ``protect`` always."""

        def chosen(paths: list[str]) -> set[str]:
            found = filter_paths_by_patterns(paths, include=include, exclude=exclude)
            return {*found, *(path for path in paths if path in (protect or ()))}

        await self._download(source_dir, target_dir, chosen)

    async def _download(
        self, source: str, target: Path | str, chosen: Callable[[list[str]], Collection[str]] | None
    ) -> None:
        async with (await _shared()).downloads:
            path = await self._without_links(source)
            archive = await self._running().get_archive(path, max_bytes=_MOST, max_files=_MOST_FILES)
            await self._write(source, archive, target, chosen)

    async def _write(
        self,
        source: str,
        archive: Archive,
        target: Path | str,
        chosen: Callable[[list[str]], Collection[str]] | None = None,
    ) -> None:
        only = chosen(await offloaded(_files_of, archive)) if chosen is not None else None
        await offloaded(write_tree, archive, Path(target), only)
        if archive.dropped:
            self.logger.warning(f"{source}: left out: {'; '.join(map(visible, archive.dropped[:8]))}")

    async def _without_links(self, path: str) -> str:
        """The path in the sandbox without links, which downloads do not follow; ``path`` if it cannot be found."""
        try:
            done = await self.exec(f"realpath -e -z -- {shlex.quote(path)}", cwd="/", timeout_sec=10, user="root")
        except (SandboxError, RuntimeError):  # it ended, or hangs; its files can still be read
            return path
        found = (done.stdout or "").rstrip("\0")
        return found if done.return_code == 0 and found.startswith("/") else path


def _entry(path: str, kind: bytes = tarfile.DIRTYPE, target: str = "", mode: int = 0o755) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(path)
    entry.type, entry.linkname, entry.mode = kind, target, mode
    return entry


def _tree(folder: Path) -> tuple[list[TaskFile], list[tarfile.TarInfo]]:
    """The files of a folder of this machine; and its folders and links. Links are not followed."""
    files: list[TaskFile] = []
    others: list[tarfile.TarInfo] = []
    for above, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = Path(above, name)
            inner, info = path.relative_to(folder).as_posix(), path.lstat()
            if stat.S_ISLNK(info.st_mode):
                others.append(_entry(inner, tarfile.SYMTYPE, os.readlink(path)))
            elif stat.S_ISDIR(info.st_mode):
                others.append(_entry(inner, mode=info.st_mode & 0o777 | 0o700))
            elif stat.S_ISREG(info.st_mode):
                files.append(TaskFile(inner, path, bool(info.st_mode & 0o100), folder))
    return files, others


def _files_of(archive: Archive) -> list[str]:
    with open_tar(archive.tar) as tar:
        return [member.name for member in tar if not member.isdir()]


def _write_file(target: Path, data: bytes) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".clawgym-") as scratch:
        written = Path(scratch, "file")
        written.write_bytes(data)
        os.replace(written, target)
