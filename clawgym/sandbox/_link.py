"""The host's end of a box's control stream, shared by every backend.

What arrives was written by code that the box's own programs can tamper with: every frame is checked, every
answer is bounded in size and time, and a stream that breaks the rules costs the box its life
(:class:`SandboxDied` with cause ``protocol``), never the host its memory or its patience.
"""

from __future__ import annotations

import asyncio
import glob
import io
import json
import os
import secrets
import struct
import tarfile
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, Protocol

from clawgym.errors import InfraError, SandboxDied, SandboxError, SandboxUnavailable
from clawgym.records import TaskFile
from clawgym.sandbox.protocol import Archive, ExecResult, SandboxSpec

__all__ = ["PRISTINE", "GuestLink", "LinkShell", "Stream", "guest_argv", "pristine_tool"]

_HEADER = struct.Struct(">IBI")
_MAX_FRAME = 1 << 20
_SLACK = 4096
"""Bytes an answer may be over its cap: the marker line of left-out output."""
_GRACE = 10.0
"""Seconds the guest has, after a command's own deadline, to kill it and to say so."""
PRISTINE = "/.pristine"
"""Where ``pristine_tools`` mounts the image's untouched ``/usr``."""
_UNPACK_PYTHON = (
    "import os, sys, tarfile; os.makedirs(sys.argv[1], exist_ok=True); "
    "tarfile.open(fileobj=sys.stdin.buffer, mode='r|').extractall(sys.argv[1])"
)
_UNPACK = 'mkdir -p -- "$1" && exec tar -xf - -C "$1" --no-same-owner --recursive-unlink'
_MTIME = 1577836800  # 2020-01-01: inputs look the same on every run


class Stream(Protocol):
    """A two-way byte stream to the guest."""

    async def read(self, size: int) -> bytes:
        """At most ``size`` bytes; b'' at the end."""
        ...

    async def write(self, data: bytes) -> None: ...

    async def close(self) -> None: ...


def guest_argv(config: dict[str, Any], python: Sequence[str] = ("python3",)) -> list[str]:
    """The command line of process 1."""
    return [*python, "-I", "-S", "-B", "-c", _guest_source(), json.dumps(config)]


@cache
def _guest_source() -> str:
    return resources.files("clawgym.sandbox").joinpath("_guest.py").read_text()


def pristine_tool(name: str) -> list[str]:
    """Start ``/usr/bin/<name>`` from the untouched ``/usr`` at :data:`PRISTINE`, with its own loader and libraries.

    The loader is called by name because the box's own may have been replaced; ``--inhibit-cache`` and
    ``--library-path`` keep the box's libraries out.
    """
    loaders = sorted(glob.glob("/usr/lib/*-linux-*/ld-linux-*.so.*") + glob.glob("/usr/lib*/ld-linux-*.so.*"))
    if not loaders:
        raise SandboxUnavailable(
            "no dynamic loader below /usr/lib: fork grading needs the glibc of a common distribution"
        )
    folders = sorted({os.path.dirname(path) for path in loaders})
    libraries = ":".join(PRISTINE + folder for folder in folders)
    prefix = [PRISTINE + os.path.realpath(loaders[0]), "--inhibit-cache", "--library-path", libraries]
    folder = next((f for f in ("/usr/bin", "/usr/local/bin") if os.path.exists(f"{f}/{name}")), "/usr/bin")
    return [*prefix, f"{PRISTINE}{folder}/{name}"]


def pack(files: Iterable[TaskFile]) -> bytes:
    """A tar of task files, the same bytes for the same files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for file in files:
            data = file.read()
            entry = tarfile.TarInfo(file.path)
            entry.size, entry.mode, entry.mtime = len(data), 0o755 if file.executable else 0o644, _MTIME
            tar.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


@dataclass(eq=False)
class _Request:
    done: asyncio.Future[dict[str, Any]]
    room: int
    output: list[bytes] = field(default_factory=list)
    errors: list[bytes] = field(default_factory=list)


class LinkShell:
    """:class:`~clawgym.sandbox.protocol.Shell` over a link."""

    def __init__(self, link: GuestLink, channel: int) -> None:
        self._link = link
        self._channel = channel
        self._turn = asyncio.Lock()

    async def run(self, command: str, *, timeout: float | None = None, max_output: int | None = None) -> ExecResult:
        if "\0" in command:
            raise SandboxError("a shell command cannot hold a NUL character: remove it")
        limits = self._link.spec.limits
        timeout = limits.command_seconds if timeout is None else timeout
        cap = limits.output_bytes if max_output is None else max_output
        async with self._turn:
            body = {"cmd": command, "timeout": timeout, "cap": cap, "nonce": secrets.token_hex(8)}
            return await self._link.request("R", self._channel, body, timeout, cap)

    async def write(self, data: bytes) -> None:
        await self._link.send("I", self._channel, data)

    async def close(self) -> None:
        await self._link.send("K", self._channel, b"")


class GuestLink:
    """Runs commands in a box over one :class:`Stream`; the backends build their boxes on it."""

    def __init__(self, stream: Stream, spec: SandboxSpec, cause_of_death: Callable[[], Awaitable[str]]) -> None:
        self.spec = spec
        self._stream = stream
        self._cause_of_death = cause_of_death
        self._requests: dict[int, _Request] = {}
        self._channels = 0
        self._writing = asyncio.Lock()
        self.death: SandboxDied | None = None
        self.closed = False
        self._reader: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to listen; call once the guest has said hello."""
        self._reader = asyncio.create_task(self._listen())

    # -- the wire

    async def send(self, op: str, channel: int, payload: bytes) -> None:
        if self.death is not None:
            raise self.death
        if self.closed:
            raise SandboxError("this box is closed: create another one")
        try:
            # Shielded: half a frame, left by a caller that was cancelled, would garble every later one.
            await asyncio.shield(self._write(_HEADER.pack(len(payload), ord(op), channel) + payload))
        except OSError:
            await asyncio.shield(self._die(None))
            assert self.death is not None
            raise self.death from None

    async def _write(self, frame: bytes) -> None:
        async with self._writing:
            await self._stream.write(frame)

    async def _listen(self) -> None:
        buffer = bytearray()
        cause: str | None = None
        try:
            while data := await self._stream.read(1 << 18):
                buffer += data
                while len(buffer) >= _HEADER.size:
                    length, op, channel = _HEADER.unpack_from(buffer)
                    if length > _MAX_FRAME:
                        raise ValueError("frame too large")
                    if len(buffer) < _HEADER.size + length:
                        break
                    payload = bytes(buffer[_HEADER.size : _HEADER.size + length])
                    del buffer[: _HEADER.size + length]
                    self._take(chr(op), channel, payload)
        except (ValueError, KeyError, TypeError, RecursionError):
            cause = "protocol"
        except OSError:
            pass
        await self._die(cause)

    def _take(self, op: str, channel: int, payload: bytes) -> None:
        request = self._requests.get(channel)
        if request is None:
            if op in "OLDF":
                return  # an answer to a request that was given up
            raise ValueError("unknown frame")
        if op in "OL":
            request.room -= len(payload)
            if request.room < 0:
                raise ValueError("more output than the cap")
            (request.output if op == "O" else request.errors).append(payload)
        elif op in "DF":
            body = json.loads(payload)
            if not isinstance(body, dict):
                raise ValueError("not an object")
            del self._requests[channel]
            if request.done.done():
                return
            if op == "D":
                request.done.set_result(body)
            else:
                cause, text = str(body.get("cause")), str(body.get("error"))[:200]
                if cause == "pids":
                    error: Exception = SandboxDied(f"the box cannot start a process ({text})", cause="pids")
                else:
                    error = SandboxError(f"the box refused the command ({text})")
                request.done.set_exception(error)
        else:
            raise ValueError("unknown frame")

    async def _die(self, cause: str | None) -> None:
        if self.death is None and not self.closed:
            self.death = SandboxDied("the box is gone", cause=cause or "died")
            if cause is None:
                try:
                    self.death = SandboxDied("the box is gone", cause=await self._cause_of_death())
                except InfraError:
                    pass
            if cause == "protocol":
                await self._stream.close()
        error = self.death or SandboxError("this box was closed while it worked: create another one")
        for request in self._requests.values():
            if not request.done.done():
                request.done.set_exception(error)
        self._requests.clear()

    async def request(
        self,
        op: str,
        channel: int,
        body: dict[str, Any],
        timeout: float,
        cap: int,
        stdin: bytes | None = None,
    ) -> ExecResult:
        """Send one request and wait for its answer, within ``timeout`` and a grace."""
        if channel in self._requests:
            raise SandboxError("this shell is still busy with a command that was given up: use another shell")
        request = _Request(asyncio.get_running_loop().create_future(), room=2 * (cap + _SLACK))
        self._requests[channel] = request
        try:
            async with asyncio.timeout(timeout + _GRACE):
                await self.send(op, channel, json.dumps(body).encode())
                if stdin is not None:
                    for start in range(0, len(stdin), 1 << 18):
                        await self.send("I", channel, stdin[start : start + (1 << 18)])
                    await self.send("E", channel, b"")
                done = await asyncio.shield(request.done)
        except TimeoutError:
            await self._die("unresponsive")
            await self._stream.close()
            assert self.death is not None
            raise self.death from None
        except asyncio.CancelledError:
            if op == "X" and self.death is None and not self.closed:
                self._requests.pop(channel, None)
                giving_up = asyncio.ensure_future(self.send("K", channel, b""))
                giving_up.add_done_callback(lambda sent: sent.cancelled() or sent.exception())
            raise
        except SandboxDied:
            self._requests.pop(channel, None)
            raise self.death or SandboxDied("the box is gone") from None
        except SandboxError:
            self._requests.pop(channel, None)
            raise
        finally:
            if request.done.done() and not request.done.cancelled():
                request.done.exception()  # retrieved: no warning for an answer nobody waits for
        return self._result(request, done)

    def _result(self, request: _Request, done: dict[str, Any]) -> ExecResult:
        def number(name: str, kind: type[int] | type[float]) -> Any:
            value = done.get(name, 0)
            return kind(value) if isinstance(value, int | float) and abs(value) < 1e15 else kind(0)

        cwd = done.get("cwd", "")
        return ExecResult(
            output=b"".join(request.output),
            stderr=b"".join(request.errors),
            exit_code=number("code", int) % 256,
            cwd=(cwd[:4096] if isinstance(cwd, str) else "") or self.spec.workdir,
            timed_out=done.get("timed_out") is True,
            omitted_bytes=number("omitted", int),
            shell_restarted=done.get("restarted") is True,
            seconds=number("seconds", float),
        )

    # -- what boxes offer

    def _channel(self) -> int:
        self._channels += 1
        return self._channels

    def tool(self, name: str) -> list[str]:
        return pristine_tool(name) if self.spec.pristine_tools else [name]

    async def shell(self, *, pty: bool = False) -> LinkShell:
        channel = self._channel()
        await self.request("S", channel, {"pty": pty, "cwd": self.spec.workdir, "env": {}}, 20.0, 0)
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
        return await self.request("X", self._channel(), body, timeout, cap, stdin or None)

    async def put(self, files: Iterable[TaskFile], dest: str) -> None:
        await self._unpack(pack(files), dest)

    async def put_archive(self, archive: Archive, dest: str) -> None:
        await self._unpack(archive.tar, dest)

    async def _unpack(self, tar: bytes, dest: str) -> None:
        if not dest.startswith("/"):
            raise SandboxError(f"{dest!r} is not an absolute folder in the box: start it with '/'")
        argv = ["sh", "-c", _UNPACK, "sh", dest]
        if self.spec.pristine_tools:
            argv = [*self.tool("python3"), "-I", "-S", "-c", _UNPACK_PYTHON, dest]
        done = await self.exec(argv, cwd="/", stdin=tar, timeout=self.spec.limits.setup_seconds)
        if done.exit_code:
            cause = done.text.strip()[-300:]
            raise SandboxError(f"files could not be put into {dest} ({cause}): check limits.disk_mb and the paths")

    async def end(self) -> None:
        """Stop listening; pending requests fail. Idempotent."""
        self.closed = True
        await self._stream.close()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        await self._die(None)
