"""Send mounted folders to the nodes, once to each, where they are kept by the digest of their content.

A folder is sent even if the nodes could see it at the same path: a local copy serves all sandboxes of the node, and no
sandbox waits for a shared file system.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import shutil
import stat
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import IO, Any, Protocol

from clawgym.errors import InfraError, SandboxError
from clawgym.sandbox import leases

__all__ = ["Parcels", "Shelf", "pack"]

PART = 8 << 20
"""Bytes of one piece in transit."""
_FRESH = 2.0
"""Seconds during which a folder is not examined again."""
_KEPT_DAYS = 30
_TREE = "tree"


class _Parts:
    """A writable file object that passes on pieces of :data:`PART` bytes."""

    def __init__(self, take: Callable[[bytes], None]) -> None:
        self._take = take
        self._held = bytearray()
        self.sha256 = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.sha256.update(data)
        self._held += data
        while len(self._held) >= PART:
            self._take(bytes(self._held[:PART]))
            del self._held[:PART]
        return len(data)

    def finish(self) -> str:
        if self._held:
            self._take(bytes(self._held))
        return self.sha256.hexdigest()


def _entries(top: str) -> Iterator[tuple[str, os.stat_result]]:
    """Every folder, file and link below ``top``, with its relative path, always in the same order."""
    yield "", os.stat(top)
    stack = [""]
    while stack:
        within = stack.pop()
        for entry in sorted(os.scandir(os.path.join(top, within)), key=lambda e: e.name):
            path = os.path.join(within, entry.name)
            info = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(info.st_mode):
                stack.append(path)
            if stat.S_IFMT(info.st_mode) in (stat.S_IFDIR, stat.S_IFREG, stat.S_IFLNK):
                yield path, info


def pack(top: str, take: Callable[[bytes], None]) -> str:
    """Write the folder ``top`` as a tar, passed to ``take`` in pieces. Returns the hex SHA-256 of the tar.

    The same content, modes and times give the same digest. Owners and set-uid bits are left out. Raises OSError.
    """
    parts = _Parts(take)
    with tarfile.open(fileobj=parts, mode="w|", format=tarfile.PAX_FORMAT, bufsize=1 << 20) as tar:  # type: ignore[call-overload]
        for path, info in _entries(top):
            member = tarfile.TarInfo(path or ".")
            member.mode, member.mtime = stat.S_IMODE(info.st_mode) & 0o777, int(info.st_mtime)
            where = os.path.join(top, path)
            if stat.S_ISDIR(info.st_mode):
                member.type, member.mode = tarfile.DIRTYPE, member.mode | 0o700  # so that the receiver can remove it
                tar.addfile(member)
            elif stat.S_ISLNK(info.st_mode):
                member.type, member.linkname = tarfile.SYMTYPE, os.readlink(where)
                member.mode, member.mtime = 0o777, 0  # unpacking does not set them
                tar.addfile(member)
            else:
                with open(where, "rb") as file:
                    member.size = info.st_size
                    tar.addfile(member, file)
    return parts.finish()


# -- on the owner's machine


class _Node(Protocol):
    layers: dict[str, asyncio.Task[None]]

    async def call(self, what: str, *args: Any, **more: Any) -> Any: ...


class Parcels:
    """Sends folders to nodes. ``store(piece)`` stores a piece where nodes find it, and returns a reference to it."""

    def __init__(self, store: Callable[[bytes], Any]) -> None:
        self._store = store
        self._looks: dict[str, tuple[float, asyncio.Task[str]]] = {}
        self._digests: dict[tuple[str, str], str] = {}
        self._sent: dict[str, asyncio.Task[list[Any]]] = {}
        self._waiting: dict[str, int] = {}

    async def deliver(self, source: str, node: _Node) -> str:
        """Make sure that ``node`` has the folder ``source``. Returns the digest under which the node keeps it.

        Raises:
            SandboxError: the folder cannot be read, or changes meanwhile.
            InfraError: the node failed.
        """
        digest = await self._digest(source)
        task = node.layers.get(digest)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = node.layers[digest] = asyncio.create_task(self._send(source, digest, node))
        await asyncio.shield(task)
        return digest

    async def _digest(self, source: str) -> str:
        at, task = self._looks.get(source, (0.0, None))
        if task is None or time.monotonic() - at > _FRESH:
            task = asyncio.create_task(self._look(source))
            self._looks[source] = time.monotonic(), task
        return await asyncio.shield(task)

    async def _look(self, source: str) -> str:
        try:
            seen = await asyncio.to_thread(_seen, source)
            if (source, seen) not in self._digests:
                self._digests[source, seen] = await asyncio.to_thread(pack, source, lambda _: None)
        except OSError as error:
            raise _unreadable(source, error) from None
        return self._digests[source, seen]

    async def _send(self, source: str, digest: str, node: _Node) -> None:
        if await node.call("has_layer", digest):
            return
        self._waiting[digest] = self._waiting.get(digest, 0) + 1
        try:
            if digest not in self._sent:
                self._sent[digest] = asyncio.create_task(self._pieces(source, digest))
            await node.call("keep_layer", digest, await asyncio.shield(self._sent[digest]))
        finally:
            self._waiting[digest] -= 1
            if not self._waiting[digest]:  # Ray frees the pieces once no reference is left
                del self._waiting[digest], self._sent[digest]

    async def _pieces(self, source: str, digest: str) -> list[Any]:
        references: list[Any] = []
        try:
            found = await asyncio.to_thread(pack, source, lambda piece: references.append(self._store(piece)))
        except OSError as error:
            raise _unreadable(source, error) from None
        if found != digest:
            raise SandboxError(f"{source}: changed while it was sent to the nodes: leave it as it is, and try again")
        return references


def _seen(source: str) -> str:
    """A digest of the metadata, which changes if the folder may have changed."""
    digest = hashlib.sha256()
    for path, info in _entries(source):
        line = f"{path}\0{info.st_mode}\0{info.st_size}\0{info.st_mtime_ns}\0{info.st_ino}\n"
        digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _unreadable(source: str, error: OSError) -> SandboxError:
    return SandboxError(
        f"{source}: cannot be read to send it to the nodes ({error}): make it readable, and leave it so"
    )


# -- on the node


class Shelf:
    """Folders that this node has received, in ``layers/`` of the state folder. Removed if unused for 30 days."""

    def __init__(self) -> None:
        self._state = leases.state_dir()
        self._top = self._state / "layers"

    def folder(self, digest: str) -> Path:
        """Path of a folder. Raises :class:`InfraError` if it was removed."""
        if not self.has(digest):
            raise InfraError(f"{self._top / digest}: was removed while it was in use: run the same command again")
        return self._top / digest / _TREE

    def has(self, digest: str) -> bool:
        """Whether the folder is here; counts as a use of it."""
        try:
            os.utime(self._top / digest)
        except OSError:
            return False
        return True

    @contextlib.asynccontextmanager
    async def receiving(self, digest: str) -> AsyncIterator[IO[bytes]]:
        """Yields a file for the tar, which is unpacked afterwards. Raises :class:`InfraError`."""
        try:
            with tempfile.TemporaryFile() as tar:
                yield tar
                await asyncio.to_thread(self._unpack, tar, digest)
        except OSError as error:
            raise InfraError(
                f"a folder could not be kept on this node ({error}): free disk space under {self._top}"
            ) from error

    def _unpack(self, tar: IO[bytes], digest: str) -> None:
        tar.seek(0)
        if hashlib.file_digest(tar, "sha256").hexdigest() != digest:  # type: ignore[arg-type]
            raise InfraError("a folder came to this node other than it was sent: run the same command again")
        tar.seek(0)
        self._top.mkdir(parents=True, exist_ok=True)
        scratch = self._state / f"new-{secrets.token_hex(8)}"
        held = leases.claim(scratch)  # if this process dies, the next start on this node removes it
        try:
            whole = scratch / digest
            whole.mkdir()
            with tarfile.open(fileobj=tar, mode="r:") as members:
                members.extraction_filter = staticmethod(lambda member, _: member)  # links are the owner's
                members.extractall(whole / _TREE)
            try:
                whole.rename(self._top / digest)
            except OSError:
                if not self.has(digest):  # otherwise another process was faster
                    raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            os.close(held)
        self._prune()

    def _prune(self) -> None:
        for other in self._top.iterdir():
            with contextlib.suppress(OSError):
                if time.time() - other.stat().st_mtime > _KEPT_DAYS * 86400:
                    shutil.rmtree(other, ignore_errors=True)
