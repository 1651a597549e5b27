"""One node's half of the ``ray`` backend: an actor that owns a local backend, and everything of it by id.

Whatever ends the actor (its owner's death, Ray's order, a crash) ends its boxes: they are its supervisor's to clear,
which sees it go. Methods raise as the protocol says; what is no error of this library is the host's fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import platform
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

from clawgym.errors import SandboxError
from clawgym.sandbox import backend as make_backend
from clawgym.sandbox.machine import Machine
from clawgym.sandbox.protocol import Isolation, Sandbox, SandboxSpec, Shell, Snapshot
from clawgym.sandbox.ray.layers import Shelf

__all__ = ["CHUNK", "Opened", "SandboxHost", "Vitals", "streams"]

CHUNK = 1 << 18
"""Most bytes of a stream in one message, and kept at either end of it."""
_TOOLS = ("python3", "bash", "sh", "ls")
"""Whose whereabouts are told with a box that has pristine ones."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A new box, as its owner gets to know it."""

    id: str
    tools: Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class Vitals:
    """How a node is."""

    memory_mb: float
    load: float
    """Runnable processes per core."""


async def streams(sock: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Both ends of a connected socket."""
    if sock.family == socket.AF_UNIX:
        return await asyncio.open_unix_connection(sock=sock, limit=CHUNK)
    return await asyncio.open_connection(sock=sock, limit=CHUNK)


class SandboxHost:
    """The actor (async, one for each node and owner)."""

    def __init__(self, backend: str) -> None:
        self._backend = make_backend(backend)
        self._machine = Machine.this()
        self._shelf = Shelf()
        self._boxes: dict[str, Sandbox] = {}
        self._shells: dict[str, Shell] = {}
        self._snapshots: dict[str, Snapshot] = {}
        self._listening: dict[str, socket.socket] = {}
        self._accepting: dict[str, asyncio.Task[Any]] = {}
        self._of_box: dict[str, set[str]] = {}
        """Ids of what goes with a box."""
        self._streams: dict[str, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}

    async def probe(self) -> tuple[str, str, Isolation]:
        """This node's name, its version of ClawGym, and what its boxes isolate."""
        return platform.node(), metadata.version("clawgym"), await self._backend.probe()

    async def vitals(self) -> Vitals:
        return Vitals(self._machine.memory_mb(), self._machine.load())

    # -- boxes

    async def has_layer(self, digest: str) -> bool:
        return await asyncio.to_thread(self._shelf.has, digest)

    async def keep_layer(self, digest: str, parts: Sequence[Any]) -> None:
        """``parts``: references to the pieces of a tar."""
        async with self._shelf.receiving(digest) as writer:
            for part in parts:
                await asyncio.to_thread(writer.write, await part)

    def _here(self, spec: SandboxSpec, joined: str | None, layers: Mapping[str, str]) -> SandboxSpec:
        mounts = {target: self._shelf.folder(digest) for target, digest in layers.items()}
        return replace(spec, mounts=mounts, join_network_of=self._box(joined) if joined is not None else None)

    def _keep(self, box: Sandbox) -> Opened:
        self._boxes[box.id], self._of_box[box.id] = box, set()
        return Opened(box.id, {name: box.tool(name) for name in _TOOLS} if box.spec.pristine_tools else {})

    async def create(self, spec: SandboxSpec, joined: str | None, layers: Mapping[str, str]) -> Opened:
        return self._keep(await self._backend.create(self._here(spec, joined, layers)))

    async def fork(self, snapshot: str, spec: SandboxSpec, joined: str | None, layers: Mapping[str, str]) -> Opened:
        held = self._snapshots.get(snapshot)
        if held is None:
            raise SandboxError("this snapshot was dropped or belongs to another backend: take a new one")
        return self._keep(await self._backend.fork(held, self._here(spec, joined, layers)))

    def _box(self, box: str) -> Sandbox:
        try:
            return self._boxes[box]
        except KeyError:
            raise SandboxError("this box is closed: create another one") from None

    async def ask(self, box: str, what: str, *args: Any, **more: Any) -> Any:
        """A method of a box that takes and gives plain data."""
        return await getattr(self._box(box), what)(*args, **more)

    async def close(self, box: str) -> None:
        held = self._boxes.pop(box, None)
        for one in self._of_box.pop(box, ()):
            self._shells.pop(one, None)
            self._listening.pop(one, None)
            if (accepting := self._accepting.pop(one, None)) is not None:
                accepting.cancel()
        await asyncio.sleep(0)  # those let go of their sockets before these are closed
        if held is not None:
            await held.close()

    async def snapshot(self, box: str) -> str:
        taken = await self._box(box).snapshot()
        self._snapshots[taken.id] = taken
        return taken.id

    async def drop(self, snapshot: str) -> None:
        if (held := self._snapshots.pop(snapshot, None)) is not None:
            await self._backend.drop(held)

    # -- shells

    async def shell(self, box: str, pty: bool) -> str:
        return self._named(box, self._shells, await self._box(box).shell(pty=pty))

    async def ask_shell(self, shell: str, what: str, *args: Any, **more: Any) -> Any:
        try:
            held = self._shells[shell]
        except KeyError:
            raise SandboxError("this shell was closed, or its box was: open another one") from None
        return await getattr(held, what)(*args, **more)

    # -- sockets

    async def listen(self, box: str, port: int) -> str:
        return self._named(box, self._listening, await self._box(box).listen(port))

    async def accept(self, listening: str, most: int) -> list[str]:
        """The next connections from the box, as streams; none once there will be no more."""
        sock = self._listening.get(listening)
        if sock is None:
            return []
        task = asyncio.ensure_future(asyncio.get_running_loop().sock_accept(sock))
        self._accepting[listening] = task
        try:
            peer, _ = await task
        except asyncio.CancelledError:
            if listening in self._listening:  # this call was given up, not the socket
                task.cancel()
                raise
            return []
        except OSError:
            return []
        finally:
            self._accepting.pop(listening, None)
        peers = [peer]
        with contextlib.suppress(OSError):  # those that wait already
            while len(peers) < most:
                peers.append(sock.accept()[0])
        for peer in peers:
            peer.setblocking(False)
        return [await self._stream(peer) for peer in peers]

    async def connect(self, box: str, port: int) -> str:
        return await self._stream(await self._box(box).connect(port))

    async def _stream(self, sock: socket.socket) -> str:
        name = secrets.token_hex(8)
        self._streams[name] = await streams(sock)
        return name

    async def read(self, stream: str) -> bytes:
        """What came from the box; b"" at the end."""
        try:
            return await self._streams[stream][0].read(CHUNK)
        except (KeyError, OSError):
            return b""

    async def write(self, stream: str, data: bytes) -> bool:
        """Send to the box, b"" for the end; returns when there is room for more, False if nobody reads it any more."""
        try:
            writer = self._streams[stream][1]
            if data:
                writer.write(data)
                await writer.drain()
            else:
                writer.write_eof()
        except (KeyError, OSError):
            return False
        return True

    async def hang_up(self, stream: str) -> None:
        if (held := self._streams.pop(stream, None)) is not None:
            held[1].close()

    def _named(self, box: str, among: dict[str, Any], what: Any) -> str:
        self._box(box)  # closed meanwhile
        name = secrets.token_hex(8)
        among[name] = what
        self._of_box[box].add(name)
        return name

    async def aclose(self) -> None:
        """Close every box and the helper processes."""
        for box in list(self._boxes):
            await self.close(box)
        with contextlib.suppress(OSError):
            for _, writer in self._streams.values():
                writer.close()
        await self._backend.aclose()
