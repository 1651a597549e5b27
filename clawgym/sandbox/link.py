"""The host's end of a sandbox's control stream, shared by the backends.

The peer can be tampered with by the programs in the sandbox. So every frame is checked, and every answer is bounded in
size and time. A stream that breaks the rules ends the sandbox (:class:`SandboxDied` with cause ``protocol``).
"""

from __future__ import annotations

import asyncio
import contextlib
import glob
import itertools
import json
import os
import re
import secrets
import socket
import struct
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from clawgym.errors import InfraError, SandboxDied, SandboxError, SandboxUnavailable
from clawgym.offload import offloaded_if_large
from clawgym.records import TaskFile
from clawgym.sandbox.linux.listen import check_port, refused
from clawgym.sandbox.protocol import Archive, ExecResult, SandboxSpec
from clawgym.sandbox.stream import SocketStream
from clawgym.tars import open_tar

__all__ = ["PORT", "PRISTINE", "GuestLink", "LinkShell", "as_text", "close_late", "guest_argv", "pristine_tool"]

_HEADER = struct.Struct(">IBI")
PORT = struct.Struct(">H")
_PROGRAMS, _PROGRAM_BYTES = struct.Struct(">I"), 16_384
_ENTRY, _RUN, _DONE = struct.Struct(">II"), struct.Struct(">dI8s"), struct.Struct(">IBQd")
_CHUNK = 1 << 18
_MAX_FRAME = 1 << 20
_SLACK = 4096
"""Bytes that an answer may exceed its cap by: the marker line of omitted output."""
_GRACE = 10.0
"""Seconds that the guest has after a command's deadline to kill it and report."""
PRISTINE = "/.pristine"
"""Where ``pristine_tools`` mounts the image's untouched ``/usr``."""
_MTIME = 1577836800  # 2020-01-01: the same in every run
_LATEST = 1 << 33
"""Latest modification time of a file, in seconds since 1970."""
_AT_ONCE = 1 << 20
"""Bytes of file content that are read and framed at a time."""


def guest_argv(config: dict[str, Any], python: Sequence[str] = ("python3",)) -> list[str]:
    """The command line of process 1."""
    return [*python, "-I", "-S", "-B", "-c", as_text("guest"), json.dumps(config)]


@cache
def as_text(module: str) -> str:
    """The source of a module of ``sandbox/inside`` as one text, with its imports from that folder placed first.

    It needs the standard library only, so it runs where ClawGym is not installed.
    """
    imported: dict[str, str] = {}

    def read(name: str) -> None:
        text = resources.files("clawgym.sandbox.inside").joinpath(f"{name}.py").read_text()
        for inner in _OUR_IMPORT.findall(text):
            if inner not in imported:
                read(inner)
        imported[name] = _OUR_IMPORT.sub("", text.replace(_FUTURE, ""))

    read(module)
    return "\n".join((_FUTURE, *imported.values()))


_OUR_IMPORT = re.compile(r"^from clawgym\.sandbox\.inside\.(\w+) import .*\n", re.MULTILINE)
_FUTURE = "from __future__ import annotations\n"


def pristine_tool(name: str) -> list[str]:
    """The command that starts ``/usr/bin/<name>`` from the untouched ``/usr`` at :data:`PRISTINE`.

    The loader is named explicitly because the sandbox's own may have been replaced; ``--inhibit-cache`` and
    ``--library-path`` keep the sandbox's libraries out.

    Raises:
        SandboxUnavailable: the host has no glibc loader below ``/usr/lib``.
    """
    loaders = sorted(glob.glob("/usr/lib/*-linux-*/ld-linux-*.so.*") + glob.glob("/usr/lib*/ld-linux-*.so.*"))
    if not loaders:
        raise SandboxUnavailable(
            "no dynamic loader below /usr/lib: use the verifier mode 'clean', or a host with glibc"
        )
    folders = sorted({os.path.dirname(path) for path in loaders})
    libraries = ":".join(PRISTINE + folder for folder in folders)
    prefix = [PRISTINE + os.path.realpath(loaders[0]), "--inhibit-cache", "--library-path", libraries]
    folder = next((f for f in ("/usr/bin", "/usr/local/bin") if os.path.exists(f"{f}/{name}")), "/usr/bin")
    return [*prefix, f"{PRISTINE}{folder}/{name}"]


Entry = tuple[dict[str, Any], bytes]
"""What is to be written: ``path`` and ``kind`` with ``mode``, ``mtime``, ``target``; and the content."""
"""One file, folder or link to write: ``path``, ``kind``, ``mode``, ``mtime``, ``target``; and the content."""


def _of_files(files: Iterable[TaskFile], dest: str) -> Iterator[Entry]:
    for file in files:
        about = {"path": f"{dest}/{file.path}", "kind": "file", "mode": 0o755 if file.executable else 0o644}
        yield {**about, "mtime": _MTIME}, file.read()


def _of_tar(data: bytes, dest: str) -> Iterator[Entry]:
    with open_tar(data) as tar:
        for member in tar:
            mtime = int(min(max(0, member.mtime), _LATEST))
            about = {"path": f"{dest}/{member.name}", "mode": member.mode & 0o777, "mtime": mtime}
            if member.isdir():
                yield {**about, "kind": "folder"}, b""
            elif member.issym():
                yield {**about, "kind": "link", "target": member.linkname}, b""
            elif member.isreg() and (held := tar.extractfile(member)) is not None:
                yield {**about, "kind": "file"}, held.read()


def _framed(entries: Iterable[Entry]) -> Iterator[bytes]:
    """Payloads of W frames: entries back to back; a large file is split over several frames."""
    batch = bytearray()
    for about, data in entries:
        for start in range(0, max(len(data), 1), _CHUNK):
            head = json.dumps({**about, "more": True} if start else about).encode()
            part = data[start : start + _CHUNK]
            if batch and len(batch) + len(part) > _CHUNK:
                yield bytes(batch)
                batch.clear()
            batch += _ENTRY.pack(len(head), len(part)) + head + part
    if batch:
        yield bytes(batch)


@dataclass(eq=False)
class _Request:
    done: asyncio.Future[bytes]
    room: int
    output: list[bytes] = field(default_factory=list)
    errors: list[bytes] = field(default_factory=list)


class LinkShell:
    """:class:`~clawgym.sandbox.protocol.Shell` over a link."""

    def __init__(self, link: GuestLink, channel: int) -> None:
        self._link = link
        self._channel = channel
        self._turn = asyncio.Lock()
        self._nonce, self._count = secrets.token_hex(2).encode(), 0

    async def run(self, command: str, *, timeout: float | None = None, max_output: int | None = None) -> ExecResult:
        if "\0" in command:
            raise SandboxError("a shell command cannot hold a NUL character: remove it")
        limits = self._link.spec.limits
        timeout = limits.command_seconds if timeout is None else timeout
        cap = limits.output_bytes if max_output is None else max_output
        async with self._turn:
            self._count += 1
            nonce = b"%s%04x" % (self._nonce, self._count & 0xFFFF)
            try:
                frame = _RUN.pack(timeout, cap, nonce) + command.encode("utf-8", "surrogateescape")
            except UnicodeEncodeError:
                raise SandboxError("a shell command cannot hold lone surrogates: send text") from None
            return await self._link.request("R", self._channel, frame, timeout, cap)

    async def write(self, data: bytes) -> None:
        await self._link.send("I", self._channel, data)

    async def close(self) -> None:
        await self._link.send("K", self._channel, b"")


class GuestLink:
    """Runs commands in a sandbox over a :class:`~clawgym.sandbox.stream.SocketStream`; base class of the sandboxes."""

    def __init__(self, stream: SocketStream, spec: SandboxSpec, cause_of_death: Callable[[], Awaitable[str]]) -> None:
        self.spec = spec
        self._stream = stream
        self._cause_of_death = cause_of_death
        self._requests: dict[int, _Request] = {}
        self._channels = 0
        self._buffer = b""
        self.death: SandboxDied | None = None
        self.closed = False
        self._dying: asyncio.Task[None] | None = None
        self._listening: list[socket.socket] = []

    def start(self) -> None:
        """Start to receive; call after the guest's hello."""
        self._stream.start(self._received, self._ended)

    # -- frames

    async def send(self, op: str, channel: int, payload: bytes) -> None:
        """Send one frame. Raises :class:`SandboxDied` if the sandbox ended, :class:`SandboxError` if it is closed."""
        self._alive()
        try:
            self._stream.write(_HEADER.pack(len(payload), ord(op), channel) + payload)
        except OSError:
            await asyncio.shield(self._die(None))
            assert self.death is not None
            raise self.death from None
        await self._stream.drain()

    def _received(self, data: bytes) -> None:
        if self._buffer:
            data = self._buffer + data
        at, size = 0, len(data)
        try:
            while size - at >= _HEADER.size:
                length, op, channel = _HEADER.unpack_from(data, at)
                if length > _MAX_FRAME:
                    raise ValueError("frame too large")
                end = at + _HEADER.size + length
                if size < end:
                    break
                self._take(chr(op), channel, data[at + _HEADER.size : end])
                at = end
        except (ValueError, KeyError, TypeError, RecursionError):
            self._doom("protocol")
            return
        self._buffer = data[at:]

    def _ended(self) -> None:
        self._doom(None)

    def _doom(self, cause: str | None) -> None:
        if self._dying is None:
            self._dying = asyncio.create_task(self._die(cause))

    def _take(self, op: str, channel: int, payload: bytes) -> None:
        request = self._requests.get(channel)
        if request is None:
            if op in "OLDF":
                return  # the answer to a request that was cancelled
            raise ValueError("unknown frame")
        if op in "OL":
            request.room -= len(payload)
            if request.room < 0 or not payload:  # empty frames without end would fill the memory too
                raise ValueError("more output than the cap, or none")
            (request.output if op == "O" else request.errors).append(payload)
        elif op in "DF":
            body = json.loads(payload) if op == "F" else {}
            if not isinstance(body, dict) or (op == "D" and len(payload) < _DONE.size):
                raise ValueError("not an answer")
            del self._requests[channel]
            if request.done.done():
                return
            if op == "D":
                request.done.set_result(payload)
            else:
                cause, text = str(body.get("cause")), str(body.get("error"))[:200]
                if cause == "pids":
                    error: Exception = SandboxDied(
                        f"the sandbox cannot start a process ({text}): create another one, or raise limits.pids",
                        cause="pids",
                    )
                elif cause == "files":
                    error = SandboxError(f"files could not be put into the sandbox ({text}): check limits.disk_mb")
                else:
                    error = SandboxError(f"the sandbox refused the command ({text}): correct it")
                request.done.set_exception(error)
        else:
            raise ValueError("unknown frame")

    async def _die(self, cause: str | None) -> None:
        if self.death is None and not self.closed:
            self.death = SandboxDied("the sandbox is gone: create another one", cause=cause or "died")
            if cause is None:
                try:
                    self.death = SandboxDied(
                        "the sandbox is gone: create another one", cause=await self._cause_of_death()
                    )
                except InfraError:
                    pass
            self._stream.close()
        error = self.death or SandboxError("this sandbox was closed while it worked: create another one")
        for request in self._requests.values():
            if not request.done.done():
                request.done.set_exception(error)
        self._requests.clear()

    async def request(
        self,
        op: str,
        channel: int,
        body: bytes,
        timeout: float,
        cap: int,
        more: AsyncIterable[tuple[str, bytes]] | None = None,
    ) -> ExecResult:
        """Send one request, then the frames of ``more``, and wait up to ``timeout`` and a grace period for the
        answer."""
        if channel in self._requests:
            raise SandboxError("this shell is still busy with a command that was given up: use another shell")
        loop = asyncio.get_running_loop()
        request = _Request(loop.create_future(), room=2 * (cap + _SLACK))
        self._requests[channel] = request
        overdue = loop.call_later(timeout + _GRACE, self._doom, "unresponsive")
        try:
            if body:
                await self.send(op, channel, body)
            if more is not None:
                async for name, payload in more:
                    await self.send(name, channel, payload)
            done = await request.done
        except SandboxDied as error:
            self._requests.pop(channel, None)
            raise self.death or error from None
        except SandboxError:
            self._requests.pop(channel, None)
            raise
        except BaseException:  # cancelled, or the source of ``more`` failed
            if op != "R" and self.death is None and not self.closed:  # a shell stays busy until it answers
                self._requests.pop(channel, None)
                with contextlib.suppress(OSError):
                    self._stream.write(_HEADER.pack(0, ord("K"), channel))
            raise
        finally:
            overdue.cancel()
            if request.done.done() and not request.done.cancelled():
                request.done.exception()  # mark as retrieved: asyncio would log a warning
        return self._result(request, done)

    def _result(self, request: _Request, done: bytes) -> ExecResult:
        code, flags, omitted, seconds = _DONE.unpack_from(done)
        cwd = done[_DONE.size : _DONE.size + 4096].decode("utf-8", "replace")
        return ExecResult(
            output=b"".join(request.output),
            stderr=b"".join(request.errors),
            exit_code=code % 256,
            cwd=cwd or self.spec.workdir,
            timed_out=bool(flags & 1),
            omitted_bytes=omitted,
            shell_restarted=bool(flags & 2),
            seconds=seconds if 0 <= seconds < 1e9 else 0.0,
        )

    # -- the sandbox protocol

    def _channel(self) -> int:
        self._channels += 1
        return self._channels

    def tool(self, name: str) -> list[str]:
        return pristine_tool(name) if self.spec.pristine_tools else [name]

    async def shell(self, *, pty: bool = False) -> LinkShell:
        channel = self._channel()
        await self.request("S", channel, _json({"pty": pty, "cwd": self.spec.workdir, "env": {}}), 20.0, 0)
        return LinkShell(self, channel)

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
        limits = self.spec.limits
        timeout = limits.command_seconds if timeout is None else timeout
        cap = limits.output_bytes if max_output is None else max_output
        words = list(argv)
        if not words or any("\0" in w for w in words):
            raise SandboxError("a command needs at least one word and no NUL character: correct argv")
        body = {
            "argv": words,
            "cwd": cwd or self.spec.workdir,
            "env": dict(env or {}),
            "timeout": timeout,
            "cap": cap,
            "stdin": bool(stdin),
            "split": stdout_only,
        }
        return await self.request("X", self._channel(), _json(body), timeout, cap, _input(stdin) if stdin else None)

    async def listen(self, port: int) -> socket.socket:
        check_port(port)
        self._alive()
        try:
            sock = await self._listen(port)
        except OSError as error:
            raise refused(port, error.strerror) from None
        if self.closed:  # in the meantime
            sock.close()
            raise SandboxError("this sandbox is closed: create another one")
        self._listening.append(sock)
        return sock

    async def connect(self, port: int) -> socket.socket:
        check_port(port)
        self._alive()
        try:
            sock = await self._connect(port)
        except SandboxError:
            await asyncio.sleep(0)  # a dying sandbox refuses connections: the end of its stream may be unread
            if self._dying is not None:
                await asyncio.shield(self._dying)
            if self.death is not None:
                raise self.death from None
            raise
        try:
            self._alive()
        except (SandboxDied, SandboxError):
            sock.close()
            raise
        return sock

    def _alive(self) -> None:
        if self.death is not None:
            raise self.death
        if self.closed:
            raise SandboxError("this sandbox is closed: create another one")

    async def _listen(self, port: int) -> socket.socket:
        """Make the socket of :meth:`~clawgym.sandbox.protocol.Sandbox.listen`. May raise OSError."""
        raise NotImplementedError

    async def _connect(self, port: int) -> socket.socket:
        """Make the socket of :meth:`~clawgym.sandbox.protocol.Sandbox.connect`."""
        raise NotImplementedError

    async def programs(self) -> tuple[str, ...]:
        done = await self.request("P", self._channel(), _PROGRAMS.pack(_PROGRAM_BYTES), 20.0, _PROGRAM_BYTES)
        return tuple(done.text.splitlines())

    async def put(self, files: Iterable[TaskFile], dest: str) -> None:
        files = tuple(files)
        await self._put(_of_files(files, dest), dest, sum(_size_of(file) for file in files))

    async def put_archive(self, archive: Archive, dest: str) -> None:
        await self._put(_of_tar(archive.tar, dest), dest, len(archive.tar))

    async def _put(self, entries: Iterable[Entry], dest: str, size: int) -> None:
        if not dest.startswith("/"):
            raise SandboxError(f"{dest!r} is not an absolute folder in the sandbox: start it with '/'")
        top: Entry = {"path": dest, "kind": "top"}, b""
        frames = _read_ahead(_framed(itertools.chain([top], entries)), size)
        await self.request("W", self._channel(), b"", self.spec.limits.setup_seconds, 0, frames)

    async def end(self) -> None:
        """Stop receiving and fail the pending requests. Idempotent."""
        self.closed = True
        while self._listening:
            self._listening.pop().close()
        self._stream.close()
        if self._dying is not None:
            await asyncio.gather(self._dying, return_exceptions=True)
        await self._die(None)


def _size_of(file: TaskFile) -> int:
    """Bytes in memory; many for a file that has to be read from the disk."""
    return len(file.source) if isinstance(file.source, bytes) else _AT_ONCE


async def _read_ahead(payloads: Iterator[bytes], size: int) -> AsyncIterator[tuple[str, bytes]]:
    """W frames and the final w frame. Those of more than a few bytes are made in a thread, so that a large tree does
    not block the event loop."""

    def some() -> tuple[list[bytes], bool]:
        found, size = [], 0
        for payload in payloads:
            found.append(payload)
            size += len(payload)
            if size >= _AT_ONCE:
                return found, True
        return found, False

    more = True
    while more:
        found, more = await offloaded_if_large(size, some)
        for payload in found:
            yield "W", payload
    yield "w", b""


def _json(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


async def _input(data: bytes) -> AsyncIterator[tuple[str, bytes]]:
    for start in range(0, len(data), _CHUNK):
        yield "I", data[start : start + _CHUNK]
    yield "E", b""


_LATE: set[asyncio.Future[None]] = set()


def close_late(task: asyncio.Future[Any]) -> None:
    """Done callback: close a sandbox whose creation was cancelled, as soon as it exists."""
    if not task.cancelled() and task.exception() is None:
        closing = asyncio.ensure_future(task.result().close())
        _LATE.add(closing)
        closing.add_done_callback(_LATE.discard)
