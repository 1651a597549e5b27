"""The node's side of the ``ray`` backend: an actor that owns a local backend and refers to its objects by id.

Whatever ends the actor (its owner's death, Ray, a crash) also ends its sandboxes: its supervisor notices and clears
them. Methods raise the errors of the sandbox protocol; the owner counts other exceptions as errors of the node.
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

__all__ = ["CHUNK", "OpenedSandbox", "SandboxHost", "Vitals", "streams"]

CHUNK = 1 << 18
"""Most bytes of a stream in one message, and buffered at each end."""
_TOOLS = ("python3", "bash", "sh", "ls")
"""Programs whose :meth:`Sandbox.tool` command is sent with a new sandbox that has pristine tools."""


@dataclass(frozen=True, slots=True)
class OpenedSandbox:
    """A new sandbox, as described to its owner."""

    id: str
    tools: Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class Vitals:
    """Memory and load of a node."""

    memory_mb: float
    load: float
    """Runnable processes per core."""


async def streams(sock: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Reader and writer of a connected socket."""
    if sock.family == socket.AF_UNIX:
        return await asyncio.open_unix_connection(sock=sock, limit=CHUNK)
    return await asyncio.open_connection(sock=sock, limit=CHUNK)


class SandboxHost:
    """The actor: asynchronous, one for each node and owner."""

    def __init__(self, backend: str) -> None:
        self._backend = make_backend(backend)
        self._machine = Machine.this()
        self._shelf = Shelf()
        self._sandboxes: dict[str, Sandbox] = {}
        self._shells: dict[str, Shell] = {}
        self._snapshots: dict[str, Snapshot] = {}
        self._listening: dict[str, socket.socket] = {}
        self._accepting: dict[str, asyncio.Task[Any]] = {}
        self._of_sandbox: dict[str, set[str]] = {}
        """Sandbox id -> ids of its shells and listening sockets."""
        self._streams: dict[str, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}

    async def probe(self) -> tuple[str, str, Isolation]:
        """The node's name, its version of ClawGym, and what its sandboxes isolate."""
        return platform.node(), metadata.version("clawgym"), await self._backend.probe()

    async def vitals(self) -> Vitals:
        return Vitals(self._machine.memory_mb(), self._machine.load())

    # -- sandboxes

    async def has_layer(self, digest: str) -> bool:
        return await asyncio.to_thread(self._shelf.has, digest)

    async def keep_layer(self, digest: str, parts: Sequence[Any]) -> None:
        """Store a mounted folder. ``parts`` are references to the pieces of a tar."""
        async with self._shelf.receiving(digest) as writer:
            for part in parts:
                await asyncio.to_thread(writer.write, await part)

    def _here(self, spec: SandboxSpec, joined: str | None, layers: Mapping[str, str]) -> SandboxSpec:
        mounts = {target: self._shelf.folder(digest) for target, digest in layers.items()}
        return replace(spec, mounts=mounts, join_network_of=self._sandbox(joined) if joined is not None else None)

    def _keep(self, sandbox: Sandbox) -> OpenedSandbox:
        self._sandboxes[sandbox.id], self._of_sandbox[sandbox.id] = sandbox, set()
        return OpenedSandbox(
            sandbox.id, {name: sandbox.tool(name) for name in _TOOLS} if sandbox.spec.pristine_tools else {}
        )

    async def create(self, spec: SandboxSpec, joined: str | None, layers: Mapping[str, str]) -> OpenedSandbox:
        return self._keep(await self._backend.create(self._here(spec, joined, layers)))

    async def fork(
        self, snapshot: str, spec: SandboxSpec, joined: str | None, layers: Mapping[str, str]
    ) -> OpenedSandbox:
        held = self._snapshots.get(snapshot)
        if held is None:
            raise SandboxError("this snapshot was dropped or belongs to another backend: take a new one")
        return self._keep(await self._backend.fork(held, self._here(spec, joined, layers)))

    def _sandbox(self, sandbox: str) -> Sandbox:
        try:
            return self._sandboxes[sandbox]
        except KeyError:
            raise SandboxError("this sandbox is closed: create another one") from None

    async def ask(self, sandbox: str, what: str, *args: Any, **more: Any) -> Any:
        """Call a method of a sandbox that takes and returns plain data."""
        return await getattr(self._sandbox(sandbox), what)(*args, **more)

    async def close(self, sandbox: str) -> None:
        held = self._sandboxes.pop(sandbox, None)
        for one in self._of_sandbox.pop(sandbox, ()):
            self._shells.pop(one, None)
            self._listening.pop(one, None)
            if (accepting := self._accepting.pop(one, None)) is not None:
                accepting.cancel()
        await asyncio.sleep(0)  # the cancelled tasks release their sockets first
        if held is not None:
            await held.close()

    async def snapshot(self, sandbox: str) -> str:
        taken = await self._sandbox(sandbox).snapshot()
        self._snapshots[taken.id] = taken
        return taken.id

    async def drop(self, snapshot: str) -> None:
        if (held := self._snapshots.pop(snapshot, None)) is not None:
            await self._backend.drop(held)

    # -- shells

    async def shell(self, sandbox: str, pty: bool) -> str:
        return self._named(sandbox, self._shells, await self._sandbox(sandbox).shell(pty=pty))

    async def ask_shell(self, shell: str, what: str, *args: Any, **more: Any) -> Any:
        try:
            held = self._shells[shell]
        except KeyError:
            raise SandboxError("this shell was closed, or its sandbox was: open another one") from None
        return await getattr(held, what)(*args, **more)

    # -- sockets

    async def listen(self, sandbox: str, port: int) -> str:
        return self._named(sandbox, self._listening, await self._sandbox(sandbox).listen(port))

    async def accept(self, listening: str, most: int) -> list[str]:
        """Wait for connections from the sandbox. Returns stream ids; an empty list at the end."""
        sock = self._listening.get(listening)
        if sock is None:
            return []
        task = asyncio.ensure_future(asyncio.get_running_loop().sock_accept(sock))
        self._accepting[listening] = task
        try:
            peer, _ = await task
        except asyncio.CancelledError:
            if listening in self._listening:  # the call was cancelled, the socket is still in use
                task.cancel()
                raise
            return []
        except OSError:
            return []
        finally:
            self._accepting.pop(listening, None)
        peers = [peer]
        with contextlib.suppress(OSError):  # take those already waiting
            while len(peers) < most:
                peers.append(sock.accept()[0])
        for peer in peers:
            peer.setblocking(False)
        return [await self._stream(peer) for peer in peers]

    async def connect(self, sandbox: str, port: int) -> str:
        return await self._stream(await self._sandbox(sandbox).connect(port))

    async def _stream(self, sock: socket.socket) -> str:
        name = secrets.token_hex(8)
        self._streams[name] = await streams(sock)
        return name

    async def read(self, stream: str) -> bytes:
        """Read from the sandbox; b"" at the end."""
        try:
            return await self._streams[stream][0].read(CHUNK)
        except (KeyError, OSError):
            return b""

    async def write(self, stream: str, data: bytes) -> bool:
        """Send to the sandbox (b"" for the end) and wait for room in the buffer. Returns False if nobody reads it."""
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

    def _named(self, sandbox: str, among: dict[str, Any], what: Any) -> str:
        self._sandbox(sandbox)  # raises if it was closed meanwhile
        name = secrets.token_hex(8)
        among[name] = what
        self._of_sandbox[sandbox].add(name)
        return name

    async def aclose(self) -> None:
        """Close every sandbox and the helper processes."""
        for sandbox in list(self._sandboxes):
            await self.close(sandbox)
        with contextlib.suppress(OSError):
            for _, writer in self._streams.values():
                writer.close()
        await self._backend.aclose()
