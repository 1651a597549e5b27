"""An X11 client for one screen. It does not trust the server, which runs in a sandbox.

Invariants: answers are at most as long as their request allows, every wait ends, and any violation of the protocol ends
the connection with :class:`~clawgym.errors.SandboxDied`. Requests are sent and answered in order, on one event loop.

Formats: X Window System Protocol, version 11; XTEST 2.2; DAMAGE 1.1; XFIXES 4.0.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from clawgym.errors import SandboxDied, SandboxError

__all__ = ["Rectangle", "X11Setup", "XClient"]

_MAX_SETUP = 1 << 18
"""Most bytes of the server's set-up message."""
_REPLY_SECONDS = 10.0
_KEYS_MAX = 256 * 64 * 4
_WRONG = (OSError, EOFError, ValueError, IndexError, struct.error)


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A part of the screen, in pixels."""

    x: int
    y: int
    width: int
    height: int

    def united(self, other: Rectangle) -> Rectangle:
        """The smallest rectangle that contains both."""
        x, y = min(self.x, other.x), min(self.y, other.y)
        right = max(self.x + self.width, other.x + other.width)
        bottom = max(self.y + self.height, other.y + other.height)
        return Rectangle(x, y, right - x, bottom - y)

    def within(self, width: int, height: int) -> Rectangle | None:
        """The part that lies on a screen of this size; None if nothing does."""
        x, y = max(self.x, 0), max(self.y, 0)
        right, bottom = min(self.x + self.width, width), min(self.y + self.height, height)
        return Rectangle(x, y, right - x, bottom - y) if right > x and bottom > y else None


@dataclass(frozen=True, slots=True)
class X11Setup:
    """The server's set-up message."""

    id_base: int
    id_mask: int
    root: int
    width: int
    height: int
    first_key: int
    last_key: int


@dataclass(slots=True)
class _Waiting:
    sequence: int
    answer: asyncio.Future[bytes]
    most: int
    """Most bytes of the answer after the first 32."""


class XClient:
    """One connection; see :meth:`connect`. The caller closes it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._waiting: deque[_Waiting] = deque()
        self._sequence = 0
        self._next_id = 0
        self._over: str | None = None
        self._listeners: dict[int, Callable[[bytes], None]] = {}
        self._task: asyncio.Task[None] | None = None
        self.setup: X11Setup

    @classmethod
    async def connect(cls, sock: socket.socket) -> XClient:
        """Connect to the server over ``sock``. Raises :class:`SandboxDied`; then the socket is closed."""
        reader, writer = await asyncio.open_connection(sock=sock)
        made = cls(reader, writer)
        try:
            async with asyncio.timeout(_REPLY_SECONDS):
                writer.write(struct.pack("<BxHHHHxx", ord("l"), 11, 0, 0, 0))
                head = await reader.readexactly(8)
                size = 4 * struct.unpack_from("<H", head, 6)[0]
                if head[0] != 1 or size > _MAX_SETUP:
                    raise ValueError("it refused the connection")
                made.setup = _setup(await reader.readexactly(size))
        except BaseException as error:
            writer.close()
            if isinstance(error, _WRONG):
                raise _died(error) from error
            raise
        made._task = asyncio.ensure_future(made._listen())
        return made

    # -- sending and receiving

    def send(self, request: bytes) -> None:
        """Send a request without an answer; its length field is filled in here. Raises :class:`SandboxDied`."""
        if self._over is not None:
            raise _died(self._over)
        padded = request + bytes(-len(request) % 4)
        self._sequence = (self._sequence + 1) & 0xFFFF
        self._writer.write(padded[:2] + struct.pack("<H", len(padded) // 4) + padded[4:])

    async def ask(self, request: bytes, most: int = 0) -> bytes:
        """Send a request and wait for its answer: 32 bytes and at most ``most`` more.

        Raises :class:`SandboxError` if the server refuses it, :class:`SandboxDied` if the connection ends.
        """
        self.send(request)
        waiting = _Waiting(self._sequence, asyncio.get_running_loop().create_future(), most)
        self._waiting.append(waiting)
        try:
            async with asyncio.timeout(_REPLY_SECONDS):
                return await waiting.answer
        except TimeoutError:
            self._end("it does not answer")
            raise _died(self._over) from None

    async def _listen(self) -> None:
        try:
            while True:
                head = await self._reader.readexactly(32)
                kind = head[0] & 0x7F
                if kind in (0, 1):
                    await self._answer(kind, head)
                elif kind == 35:
                    raise ValueError("it sent an event that nobody asked for")
                elif (on_event := self._listeners.get(kind)) is not None:
                    on_event(head)
        except _WRONG as error:
            self._end(str(error) or type(error).__name__)

    async def _answer(self, kind: int, head: bytes) -> None:
        sequence = struct.unpack_from("<H", head, 2)[0]
        asked = self._waiting[0] if self._waiting and self._waiting[0].sequence == sequence else None
        if kind == 0:  # errors of requests without an answer are ignored
            if asked is not None:
                self._waiting.popleft()
                if not asked.answer.done():
                    asked.answer.set_exception(
                        SandboxError(f"the X server refused a request (error {head[1]}): begin the episode again")
                    )
            return
        extra = 4 * struct.unpack_from("<I", head, 4)[0]
        if asked is None or extra > asked.most:
            raise ValueError("it sent an answer that nobody asked for")
        body = await self._reader.readexactly(extra)
        self._waiting.popleft()
        if not asked.answer.done():
            asked.answer.set_result(head + body)

    def _end(self, why: str) -> None:
        if self._over is None:
            self._over = why
        for waiting in self._waiting:
            if not waiting.answer.done():
                waiting.answer.set_exception(_died(self._over))
                waiting.answer.exception()  # mark as retrieved: the caller may have been cancelled
        self._waiting.clear()
        self._writer.close()

    async def aclose(self) -> None:
        """Close the connection. Idempotent."""
        self._end("it was closed")
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    # -- requests

    def new_id(self) -> int:
        """A new resource id."""
        self._next_id += 1
        return self.setup.id_base | (self._next_id & self.setup.id_mask)

    def on(self, event: int, on_event: Callable[[bytes], None]) -> None:
        """Call ``on_event`` with the 32 bytes of each event of this kind. It may only raise ValueError."""
        self._listeners[event] = on_event

    async def extension(self, name: str) -> tuple[int, int]:
        """Major opcode and first event of an extension. Raises :class:`SandboxDied` if the server lacks it."""
        answer = await self.ask(struct.pack("<BxHHxx", 98, 0, len(name)) + name.encode())
        if not answer[8]:
            self._end(f"it has no {name}")
            raise _died(self._over)
        return answer[9], answer[10]

    async def atom(self, name: str) -> int:
        answer = await self.ask(struct.pack("<BBHHxx", 16, 0, 0, len(name)) + name.encode())
        return struct.unpack_from("<I", answer, 8)[0]

    async def synchronise(self) -> None:
        """Wait until the server has processed all requests so far."""
        await self.ask(struct.pack("<BxH", 43, 0))

    async def pointer(self) -> tuple[int, int]:
        """The pointer's position in pixels."""
        answer = await self.ask(struct.pack("<BxHI", 38, 0, self.setup.root))
        return struct.unpack_from("<hh", answer, 16)

    async def image(self, area: Rectangle) -> bytes:
        """The pixels of a part of the screen: 4 bytes each, blue, green, red and padding."""
        size = area.width * area.height * 4
        request = struct.pack(
            "<BBHIhhHHI", 73, 2, 0, self.setup.root, area.x, area.y, area.width, area.height, 0xFFFFFFFF
        )
        answer = await self.ask(request, size)
        if len(answer) != 32 + size:
            self._end("it sent another image than was asked for")
            raise _died(self._over)
        return answer[32:]

    async def property(self, window: int, name: int, most: int = 4096) -> bytes:
        """The first ``most`` bytes (a multiple of 4) of a property; empty if it or the window does not exist."""
        request = struct.pack("<BBHIIIII", 20, 0, 0, window, name, 0, 0, most // 4)
        try:
            answer = await self.ask(request, most)
        except SandboxDied:
            raise
        except SandboxError:  # the window was closed
            return b""
        size = struct.unpack_from("<I", answer, 16)[0] * (answer[1] // 8)
        return answer[32 : 32 + min(size, most)]

    async def keys(self) -> list[list[int]]:
        """The keysyms of each keycode from ``setup.first_key`` on."""
        count = self.setup.last_key - self.setup.first_key + 1
        answer = await self.ask(struct.pack("<BxHBB", 101, 0, self.setup.first_key, count), _KEYS_MAX)
        per = answer[1]
        if not per or len(answer) != 32 + 4 * per * count:
            self._end("it sent another keyboard than was asked for")
            raise _died(self._over)
        syms = struct.unpack_from(f"<{per * count}I", answer, 32)
        return [list(syms[n * per : (n + 1) * per]) for n in range(count)]

    def bind_key(self, code: int, keysym: int) -> None:
        """Map the key ``code`` to ``keysym``."""
        self.send(struct.pack("<BBHBBxxII", 100, 1, 0, code, 2, keysym, keysym))


def _setup(data: bytes) -> X11Setup:
    (base, mask) = struct.unpack_from("<II", data, 4)
    vendor = struct.unpack_from("<H", data, 16)[0]
    screens, formats, order = data[20], data[21], data[22]
    first, last = data[26], data[27]
    at = 32 + vendor + (-vendor % 4)
    bits = {data[n]: data[n + 1] for n in range(at, at + 8 * formats, 8)}
    at += 8 * formats
    root, width, height, depth = (
        struct.unpack_from("<I", data, at)[0],
        *struct.unpack_from("<HH", data, at + 20),
        data[at + 38],
    )
    if not screens or order != 0 or bits.get(depth) != 32 or not (8 <= first <= last) or not mask:
        raise ValueError("its screen is not one of 32 bits a pixel")
    return X11Setup(base, mask, root, width, height, first, last)


def _died(why: object) -> SandboxDied:
    return SandboxDied(f"the X server of the desktop is gone ({why}): begin the episode again", cause="protocol")
