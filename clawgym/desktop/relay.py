"""A port of one sandbox inside another: what connects to it there talks to the first sandbox, through us.

Until there is a first sandbox, whoever asks gets an empty page: so a browser has been there before there is a site.
"""

from __future__ import annotations

import asyncio
import contextlib

from clawgym.errors import SandboxError
from clawgym.sandbox.protocol import Sandbox

__all__ = ["Relay"]

_PIECE = 1 << 16
_MOST = 64
"""Connections at once; more wait."""
_NOTHING = b"""HTTP/1.1 200 OK\r
Content-Type: text/html\r
Cache-Control: no-store\r
Content-Length: 0\r
Connection: close\r
\r
"""


class Relay:
    """Made by :meth:`open`. Bytes only: of what passes, nothing here is read but where a first request ends that came
    before there was a first sandbox."""

    def __init__(self, port: int) -> None:
        self._target: Sandbox | None = None
        self._port = port
        self._room = asyncio.Semaphore(_MOST)
        self._server: asyncio.Server | None = None
        self._running: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(cls, where: Sandbox, port: int) -> Relay:
        """Listen at 127.0.0.1:``port`` in ``where``. Raises :class:`SandboxError`."""
        relay = cls(port)
        relay._server = await asyncio.start_server(relay._serve, sock=await where.listen(port))
        return relay

    def lead_to(self, target: Sandbox) -> None:
        """From now on to the same port of ``target``."""
        self._target = target

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            async with self._room:
                # A browser connects ahead: what it asks for may come when there is a first sandbox.
                begun = b"" if self._target is not None else await reader.readuntil(b"\r\n\r\n")
                if self._target is None:
                    writer.write(_NOTHING)
                    return
                there = await asyncio.open_connection(sock=await self._target.connect(self._port))
                there[1].write(begun)
                try:
                    async with asyncio.TaskGroup() as group:
                        group.create_task(_pump(reader, there[1]))
                        group.create_task(_pump(there[0], writer))
                finally:
                    there[1].close()
        except* (OSError, EOFError, asyncio.LimitOverrunError, SandboxError):
            pass  # whoever connected sees the end of it
        except* asyncio.CancelledError:  # by aclose(); the server's own callback would print it
            if self._server is not None:
                raise
        finally:
            self._running.discard(task)
            writer.close()

    async def aclose(self) -> None:
        """End it and what runs over it. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(_PIECE):
        writer.write(piece)
        await writer.drain()
    with contextlib.suppress(OSError):
        if writer.can_write_eof():
            writer.write_eof()
