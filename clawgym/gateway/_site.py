"""A listener with a limit on concurrent connections, so that one sandbox cannot use up this process's descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl

from aiohttp import web

__all__ = ["LimitedSite"]

_MIN_CHECK = 64
_NEW_SECONDS = 2.0


class LimitedSite(web.SockSite):
    """An aiohttp site on ``sock`` with at most ``most`` connections; further ones are closed at once."""

    def __init__(
        self, runner: web.AppRunner, sock: socket.socket, *, most: int, tls: ssl.SSLContext | None = None
    ) -> None:
        super().__init__(
            runner, sock, ssl_context=tls, backlog=min(most, 1024)
        )  # most connections that asyncio accepts at once
        self._listening = sock
        self._most = most
        self._open: dict[web.RequestHandler, float] = {}
        """Connection -> time of arrival. Ended connections are removed at the next check."""
        self._check_at = _MIN_CHECK
        """Number of connections at which ended ones are removed."""

    async def start(self) -> None:
        await web.BaseSite.start(self)
        loop = asyncio.get_running_loop()
        making = asyncio.ensure_future(
            loop.create_server(self._protocol, sock=self._listening, ssl=self._ssl_context, backlog=self._backlog)
        )
        try:
            self._server = await asyncio.shield(making)
        except BaseException:  # the server may already listen: stop it
            with contextlib.suppress(OSError):
                self._server = await making
            await self.stop()
            raise

    def _protocol(self) -> asyncio.BaseProtocol:
        now = asyncio.get_running_loop().time()
        if len(self._open) >= min(self._check_at, self._most):
            # A new connection has no transport yet.
            self._open = {p: t for p, t in self._open.items() if p.transport is not None or now - t < _NEW_SECONDS}
            self._check_at = max(_MIN_CHECK, 2 * len(self._open))
            if len(self._open) >= self._most:
                return _Refused()
        server = self._runner.server
        assert server is not None
        protocol = server()
        self._open[protocol] = now
        return protocol


class _Refused(asyncio.Protocol):
    """Closes the connection without an answer."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()
