"""A port in one sandbox whose connections are forwarded to another sandbox.

Until a target is set, clients get an empty page, so that the browser can start before the site does.
"""

from __future__ import annotations

import asyncio
import contextlib

from clawgym.errors import SandboxError
from clawgym.sandbox.protocol import Sandbox

__all__ = ["Relay"]

_PIECE = 1 << 16
_MOST = 64
"""Most concurrent connections; more wait."""
_NOTHING = b"""HTTP/1.1 200 OK\r
Content-Type: text/html\r
Cache-Control: no-store\r
Content-Length: 0\r
Connection: close\r
\r
"""


class Relay:
    """Forwards bytes; see :meth:`open`.

    Only parses enough of the first request to find its end; used while no target is set.
    """

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
        """Forward connections to the same port of ``target`` from now on."""
        self._target = target

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            async with self._room:
                # A browser connects in advance: its request may come when a target is set.
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
            pass  # the client sees a closed connection
        except* asyncio.CancelledError:  # by aclose(); asyncio's server would print it
            if self._server is not None:
                raise
        finally:
            self._running.discard(task)
            writer.close()

    async def aclose(self) -> None:
        """Stop listening and close all connections. Idempotent."""
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
