"""A listener that takes so many connections at once and no more: what one box opens must not use up what all share."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl

from aiohttp import web

__all__ = ["LimitedSite"]

_SOME = 64
_NEW_SECONDS = 2.0


class LimitedSite(web.SockSite):
    """aiohttp on ``sock``, with at most ``most`` connections; further ones are closed as they come."""

    def __init__(
        self, runner: web.AppRunner, sock: socket.socket, *, most: int, tls: ssl.SSLContext | None = None
    ) -> None:
        super().__init__(runner, sock, ssl_context=tls, backlog=min(most, 1024))  # how many asyncio accepts at once
        self._listening = sock
        self._most = most
        self._open: dict[web.RequestHandler, float] = {}
        """Connections and when they came; also some that have ended, until somebody looks."""
        self._look = _SOME
        """How many there are when somebody looks."""

    async def start(self) -> None:
        await web.BaseSite.start(self)
        loop = asyncio.get_running_loop()
        making = asyncio.ensure_future(
            loop.create_server(self._protocol, sock=self._listening, ssl=self._ssl_context, backlog=self._backlog)
        )
        try:
            self._server = await asyncio.shield(making)
        except BaseException:  # interrupted in the middle it would listen, and nobody could stop it
            with contextlib.suppress(OSError):
                self._server = await making
            await self.stop()
            raise

    def _protocol(self) -> asyncio.BaseProtocol:
        now = asyncio.get_running_loop().time()
        if len(self._open) >= min(self._look, self._most):
            # A new one is not connected for a moment.
            self._open = {p: t for p, t in self._open.items() if p.transport is not None or now - t < _NEW_SECONDS}
            self._look = max(_SOME, 2 * len(self._open))
            if len(self._open) >= self._most:
                return _Refused()
        server = self._runner.server
        assert server is not None
        protocol = server()
        self._open[protocol] = now
        return protocol


class _Refused(asyncio.Protocol):
    """Not even an answer: whoever has so many connections has them for something else."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()
