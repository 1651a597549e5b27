"""The owner's side of a sandbox on a node: a :class:`Sandbox` that forwards every call to the node's actor."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import tempfile
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from clawgym.errors import InfraError, SandboxError
from clawgym.records import TaskFile
from clawgym.sandbox import shared_folders
from clawgym.sandbox.link import pristine_tool
from clawgym.sandbox.protocol import Archive, ExecResult, Isolation, SandboxSpec, Snapshot
from clawgym.sandbox.ray.host import CHUNK, OpenedSandbox, streams

__all__ = ["NodeLike", "RaySandbox", "RayShell"]

_MiB = 2**20
_STREAMS, _AT_A_TIME = 1024, 16
"""Most concurrent connections out of a sandbox per listening socket (more wait in the sandbox); accepted at a time."""


class NodeLike(Protocol):
    id: str

    async def call(self, what: str, *args: Any, **more: Any) -> Any:
        """Call a method of the node's actor. Raises its errors, and :class:`InfraError` if node or actor is gone."""
        ...


class RayShell:
    """A shell on a node; see :class:`~clawgym.sandbox.protocol.Shell`."""

    def __init__(self, sandbox: RaySandbox, name: str) -> None:
        self._sandbox = sandbox
        self._name = name

    async def run(self, command: str, *, timeout: float | None = None, max_output: int | None = None) -> ExecResult:
        return await self._ask("run", command, timeout=timeout, max_output=max_output)

    async def write(self, data: bytes) -> None:
        await self._ask("write", data)

    async def close(self) -> None:
        await self._ask("close")

    async def _ask(self, what: str, *args: Any, **more: Any) -> Any:
        self._sandbox.alive()
        return await self._sandbox.node.call("ask_shell", self._name, what, *args, **more)


class RaySandbox:
    """A sandbox on a node; see :class:`~clawgym.sandbox.protocol.Sandbox`."""

    def __init__(
        self,
        node: NodeLike,
        opened: OpenedSandbox,
        spec: SandboxSpec,
        isolation: Isolation,
        forget: Callable[[str], None],
    ) -> None:
        self.id = opened.id
        self.spec = spec
        self.node = node
        self.isolation = isolation
        self._tools = opened.tools
        self._forget = forget
        self._closing: asyncio.Task[None] | None = None
        self._pumps: set[asyncio.Task[None]] = set()
        self._listening: list[socket.socket] = []

    def alive(self) -> None:
        """Raise :class:`SandboxError` if the sandbox was closed."""
        if self._closing is not None:
            raise SandboxError("this sandbox is closed: create another one")

    async def _ask(self, what: str, *args: Any, **more: Any) -> Any:
        self.alive()
        return await self.node.call("ask", self.id, what, *args, **more)

    def tool(self, name: str) -> list[str]:
        if not self.spec.pristine_tools:
            return [name]
        return list(self._tools[name]) if name in self._tools else pristine_tool(name)

    async def shell(self, *, pty: bool = False) -> RayShell:
        self.alive()
        return RayShell(self, await self.node.call("shell", self.id, pty))

    async def exec(
        self,
        argv: Iterable[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout: float | None = None,
        max_output: int | None = None,
        stdout_only: bool = False,
    ) -> ExecResult:
        more: dict[str, Any] = {"cwd": cwd, "env": env, "stdin": stdin, "timeout": timeout}
        return await self._ask("exec", list(argv), **more, max_output=max_output, stdout_only=stdout_only)

    async def programs(self) -> tuple[str, ...]:
        return await self._ask("programs")

    async def put(self, files: Iterable[TaskFile], dest: str) -> None:
        self.alive()
        await self._ask("put", await asyncio.to_thread(held, files), dest)

    async def put_archive(self, archive: Archive, dest: str) -> None:
        await self._ask("put_archive", archive, dest)

    async def get(self, path: str, *, max_bytes: int = 16 * _MiB) -> bytes:
        shared_folders.refuse_taking(self.spec, path)
        return await self._ask("get", path, max_bytes=max_bytes)

    async def get_archive(self, path: str, *, max_bytes: int = 256 * _MiB, max_files: int = 20_000) -> Archive:
        shared_folders.refuse_taking(self.spec, path)
        return await self._ask("get_archive", path, max_bytes=max_bytes, max_files=max_files)

    async def stop(self) -> None:
        await self._ask("stop")

    async def snapshot(self) -> Snapshot:
        self.alive()
        name = await self.node.call("snapshot", self.id)
        return Snapshot(name, self.isolation.backend, self.spec, self.node)

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        while self._listening:
            self._listening.pop().close()
        try:
            await self.node.call("close", self.id)
        except InfraError:
            pass  # it is gone with its node
        finally:
            for pump in list(self._pumps):
                if pump.get_name() == "accepting":  # streams end by themselves after all their data is read
                    pump.cancel()
            self._forget(self.id)

    # -- sockets

    async def listen(self, port: int) -> socket.socket:
        self.alive()
        name = await self.node.call("listen", self.id, port)
        sock, door = _door()
        self._listening.append(sock)
        self._pump(self._accept(name, door), "accepting")
        if self._closing is not None:  # closed meanwhile
            sock.close()
            self.alive()
        return sock

    async def connect(self, port: int) -> socket.socket:
        self.alive()
        task = asyncio.ensure_future(self.node.call("connect", self.id, port))
        try:
            stream = await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(self._unwanted)
            raise
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        self._pump(self._carry(stream, theirs))
        return ours

    def _unwanted(self, task: asyncio.Future[str]) -> None:
        if not task.cancelled() and task.exception() is None:
            self._pump(self._hang_up(task.result()))

    def _pump(self, work: Any, name: str = "") -> None:
        task = asyncio.create_task(work, name=name or None)
        self._pumps.add(task)
        task.add_done_callback(self._pumps.discard)

    async def _accept(self, listening: str, door: int) -> None:
        """Connect each connection from the sandbox to the local socket, through the descriptor ``door``."""
        room = asyncio.Semaphore(_STREAMS)

        async def carry(stream: str) -> None:
            try:
                sock = socket.socket(socket.AF_UNIX)
                sock.setblocking(False)
                try:
                    await asyncio.get_running_loop().sock_connect(sock, f"/proc/self/fd/{door}")
                except OSError:  # the local socket was closed, or its queue is full
                    sock.close()
                    await self._hang_up(stream)
                    return
                await self._carry(stream, sock)
            finally:
                room.release()

        try:
            while True:
                await room.acquire()
                room.release()
                came = await self.node.call("accept", listening, _AT_A_TIME)
                if not came:
                    return
                for stream in came:
                    await room.acquire()
                    self._pump(carry(stream))
        except InfraError:
            pass  # the sandbox is gone with its node
        finally:
            os.close(door)

    async def _carry(self, stream: str, sock: socket.socket) -> None:
        """Copy bytes in both directions until the local end is closed, with at most :data:`CHUNK` in transit each
        way."""
        reader, writer = await streams(sock)

        async def outwards() -> None:
            while data := await self.node.call("read", stream):
                writer.write(data)
                await writer.drain()
            writer.write_eof()

        async def inwards() -> None:
            while data := await reader.read(CHUNK):
                if not await self.node.call("write", stream, data):
                    return
            if not _closed(sock):
                await self.node.call("write", stream, b"")
            while not _closed(sock):  # noqa: ASYNC110 - only half closed: what the sandbox answers is still read
                await asyncio.sleep(0.2)

        out, into = asyncio.ensure_future(outwards()), asyncio.ensure_future(inwards())
        try:
            await asyncio.wait((out, into), return_when=asyncio.FIRST_COMPLETED)
            if not into.done():
                out.result()
            await into
        except (OSError, InfraError):
            pass  # one end is gone; close the other
        finally:
            await _end(out, into)
            writer.close()
            await self._hang_up(stream)

    async def _hang_up(self, stream: str) -> None:
        with contextlib.suppress(InfraError):
            await self.node.call("hang_up", stream)


def _closed(sock: socket.socket) -> bool:
    """Whether the other end of a unix socket is closed in both directions."""
    if sock.fileno() < 0:
        return True
    watch = select.poll()
    watch.register(sock.fileno(), select.POLLHUP)
    return bool(watch.poll(0))


async def _end(*tasks: asyncio.Future[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def held(files: Iterable[TaskFile]) -> tuple[TaskFile, ...]:
    """``files`` with their contents, as nodes cannot read this disk. Raises :class:`~clawgym.errors.TaskError`."""
    return tuple(TaskFile(file.path, file.read(), file.executable) for file in files)


def _door() -> tuple[socket.socket, int]:
    """A listening unix socket, and a descriptor to connect to it. It has no path, so no other process can."""
    folder = tempfile.mkdtemp(prefix="clawgym-")
    path = os.path.join(folder, "s")
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.bind(path)
        door = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except BaseException:
        sock.close()
        raise
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
        os.rmdir(folder)
    sock.listen(1024)
    sock.setblocking(False)
    return sock, door
