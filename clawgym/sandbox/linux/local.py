"""Sandboxes on this machine: the supervisor freezes and kills them, and their files are read through a descriptor."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from typing import Any, Protocol

from clawgym.errors import InfraError, SandboxError
from clawgym.offload import offloaded
from clawgym.sandbox import extract, shared_folders
from clawgym.sandbox.link import GuestLink
from clawgym.sandbox.linux.supervised import Supervised
from clawgym.sandbox.protocol import Archive, Isolation, SandboxSpec
from clawgym.sandbox.stream import SocketStream

__all__ = ["LocalSandbox"]

_MiB = 2**20


class _Owner(Protocol):
    supervised: Supervised

    @property
    def isolation(self) -> Isolation: ...


class LocalSandbox(GuestLink):
    """Base class of the local sandboxes. A subclass implements ``_free``, ``_listen``, ``_connect`` and ``snapshot``.

    ``root`` is a descriptor of the sandbox's root folder, closed with the sandbox.
    """

    def __init__(self, owner: _Owner, lease: str, spec: SandboxSpec, control: socket.socket, root: int) -> None:
        super().__init__(SocketStream(control), spec, self._autopsy)
        self.id = lease
        self._owner = owner
        self._root = root
        self._stopping: asyncio.Task[dict[str, Any]] | None = None
        self._freed = False

    @property
    def isolation(self) -> Isolation:
        return self._owner.isolation

    async def _autopsy(self) -> str:
        """Why the sandbox died, by the cgroup limits that it hit."""
        events = await self._kill()
        return "oom" if events.get("oom") else "pids" if events.get("pids") else "died"

    def _kill(self) -> asyncio.Task[dict[str, Any]]:
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._owner.supervised.ask("kill", self.id))
        return self._stopping

    async def get(self, path: str, *, max_bytes: int = 16 * _MiB) -> bytes:
        shared_folders.refuse_taking(self.spec, path)
        return await extract.in_thread(self._open_root(), extract.take_file, path, max_bytes)

    async def get_archive(self, path: str, *, max_bytes: int = 256 * _MiB, max_files: int = 20_000) -> Archive:
        shared_folders.refuse_taking(self.spec, path)
        mounts = frozenset(self.spec.mounts)
        return await extract.in_thread(self._open_root(), extract.take_tree, path, max_bytes, max_files, mounts)

    def _open_root(self) -> int:
        if self._freed:
            raise SandboxError("this sandbox is closed: take files before close()")
        return self._root

    async def stop(self) -> None:
        self.closed = True  # errors from now on are caused by this call, not by the sandbox
        await asyncio.shield(self._kill())
        await self.end()

    @contextlib.asynccontextmanager
    async def _still(self) -> AsyncIterator[None]:
        """Freeze the sandbox while its files are copied. Errors are translated by
        :func:`~clawgym.sandbox.extract.blamed`."""
        if self._freed:
            raise SandboxError("this sandbox is closed: take the snapshot before close()")
        running = self._stopping is None
        if running:
            await self._owner.supervised.ask("freeze", self.id, frozen=True)
        try:
            with extract.blamed("the sandbox's files"):
                yield
        finally:
            if running:
                await self._owner.supervised.ask("freeze", self.id, frozen=False)

    async def close(self) -> None:
        await asyncio.shield(asyncio.ensure_future(self._close()))

    async def _close(self) -> None:
        if self._freed:
            return
        self._freed = self.closed = True
        gone = True
        try:
            await self._kill()
        except InfraError:
            gone = False  # something may still run in there: the next start clears it
        await self.end()
        await offloaded(self._let_go)
        await self._free(gone)

    def _let_go(self) -> None:
        """Close the descriptors of files. Closing the last one of a mount removes its files, which can take seconds."""
        os.close(self._root)

    async def _free(self, gone: bool) -> None:
        """Free the backend's resources. ``gone``: whether certainly no process of the sandbox is left."""
        raise NotImplementedError
