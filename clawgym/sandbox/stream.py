"""A socket driven by callbacks of the event loop.

asyncio's own streams take two or three iterations of the loop between a command and its answer; this takes none.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

__all__ = ["SocketStream"]

_HIGH = 1 << 20
"""Bytes that may be queued for sending before :meth:`SocketStream.drain` waits."""


class SocketStream:
    """One connected socket; closed with :meth:`close`."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.socket = sock
        self._fd = sock.fileno()
        self._loop = asyncio.get_running_loop()
        self._waiting = bytearray()
        self._drained: asyncio.Future[None] | None = None
        self._received: Callable[[bytes], None] | None = None
        self._ended: Callable[[], None] | None = None
        self.gifts: list[int] | None = None
        """Receives the file descriptors that arrive. While it is None the kernel drops them."""

    def start(self, received: Callable[[bytes], None], ended: Callable[[], None]) -> None:
        """Call ``received`` with each piece of data (never empty), and ``ended`` once at the end of the stream."""
        self._received, self._ended = received, ended
        self._loop.add_reader(self._fd, self._read)

    def decode(self, data: bytes) -> bytes:
        """The payload in ``data``; a subclass may remove a framing."""
        return data

    def _read(self) -> None:
        try:
            if self.gifts is None:
                data = self.socket.recv(1 << 16)  # a larger buffer would be mapped and unmapped for every answer
            else:
                data, gifts, _, _ = socket.recv_fds(self.socket, 1 << 16, 4, socket.MSG_CMSG_CLOEXEC)
                self.gifts += gifts
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._fd)
            if self._ended is not None:
                self._ended()
            return
        inner = self.decode(data)
        if inner and self._received is not None:
            self._received(inner)

    def write(self, data: bytes) -> None:
        """Send ``data`` now, or queue it. Raises OSError if the peer has closed the connection."""
        if not self._waiting:
            try:
                sent = self.socket.send(data)
            except (BlockingIOError, InterruptedError):
                sent = 0
            if sent == len(data):
                return
            data = data[sent:]
            self._loop.add_writer(self._fd, self._flush)
        self._waiting += data

    def _flush(self) -> None:
        try:
            sent = self.socket.send(self._waiting)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            sent = len(self._waiting)  # the reader sees the end of the stream
        del self._waiting[:sent]
        if not self._waiting:
            self._loop.remove_writer(self._fd)
        if len(self._waiting) < _HIGH and self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    async def drain(self) -> None:
        """Wait while too much is queued for sending."""
        while len(self._waiting) >= _HIGH:
            if self._drained is None or self._drained.done():
                self._drained = self._loop.create_future()
            await asyncio.shield(self._drained)

    def close(self) -> None:
        """Close the socket; no callback is called afterwards. Idempotent."""
        if self._fd < 0:
            return
        with contextlib.suppress(OSError, ValueError):
            self._loop.remove_reader(self._fd)
            self._loop.remove_writer(self._fd)
        self._fd = -1
        self._waiting.clear()
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        self.socket.close()
