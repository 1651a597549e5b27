"""Boxes of this machine, whatever holds them in: frozen and ended by the supervisor, read through a descriptor."""

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

__all__ = ["LocalBox"]

_MiB = 2**20


class _Owner(Protocol):
    supervised: Supervised

    @property
    def isolation(self) -> Isolation: ...


class LocalBox(GuestLink):
    """One box; ``root`` is a descriptor of its root folder, which is closed with it. Left to write: ``_free``."""

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
        """Why the box died: the limits that were hit say it."""
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
            raise SandboxError("this box is closed: take files before close()")
        return self._root

    async def stop(self) -> None:
        self.closed = True  # whatever fails from now on is our doing, not the box's
        await asyncio.shield(self._kill())
        await self.end()

    @contextlib.asynccontextmanager
    async def _still(self) -> AsyncIterator[None]:
        """Nothing in the box runs meanwhile. Copies of its files are made in here: for what they raise see
        :func:`~clawgym.sandbox.extract.blamed`."""
        if self._freed:
            raise SandboxError("this box is closed: take the snapshot before close()")
        running = self._stopping is None
        if running:
            await self._owner.supervised.ask("freeze", self.id, frozen=True)
        try:
            with extract.blamed("the box's files"):
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
        # The last descriptor of a mount takes its whole tree down: of a large one that takes seconds.
        await offloaded(os.close, self._root)
        await self._free(gone)

    async def _free(self, gone: bool) -> None:
        """Give back what the box held; ``gone``: whether surely nothing of it runs."""
        raise NotImplementedError
