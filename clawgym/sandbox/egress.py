"""A way out of a sandbox for named hosts only: a proxy that listens inside it, and connects from here.

Invariants: it connects to no host that is not in the list, whatever a request says. It looks into no TLS connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Iterable

from clawgym.errors import SandboxError
from clawgym.sandbox.protocol import Sandbox

__all__ = ["AllowList", "way_out"]

_PORT = 3128
_MOST_HEAD = 16_384
_MOST_CONNECTIONS = 128
_SECONDS = 30.0
"""For the head of a request, and for a connection."""
_TARGET = re.compile(rb"(?:http://)?(?P<host>[A-Za-z0-9.-]{1,253})(?::(?P<port>\d{1,5}))?(?P<path>/.*)?")


class AllowList:
    """Hosts: ``example.org`` (ports 80 and 443), ``example.org:8080``, ``*.example.org`` (all names below it)."""

    def __init__(self, hosts: Iterable[str]) -> None:
        self.hosts = tuple(hosts)
        for host in self.hosts:
            if not re.fullmatch(r"(\*\.)?[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*(:\d{1,5})?", host):
                raise SandboxError(f"{host!r}: no host: write example.org, example.org:8080 or *.example.org")

    def allows(self, host: str, port: int) -> bool:
        """Whether a connection is allowed."""
        host = host.lower().rstrip(".")
        for entry in self.hosts:
            name, _, own = entry.lower().partition(":")
            fits = host.endswith(name[1:]) if name.startswith("*.") else host == name
            if fits and (port == int(own) if own else port in (80, 443)):
                return True
        return False


@contextlib.asynccontextmanager
async def way_out(sandbox: Sandbox, allowed: AllowList) -> AsyncIterator[dict[str, str]]:
    """Serve a proxy in the sandbox; gives the variables by which programs find it. Its end cuts all connections."""
    sock = await sandbox.listen(_PORT)
    room = asyncio.Semaphore(_MOST_CONNECTIONS)
    serving: set[asyncio.Task[None]] = set()

    def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(_serve(reader, writer, allowed, room))
        serving.add(task)
        task.add_done_callback(serving.discard)

    server = await asyncio.start_server(accepted, sock=sock, limit=_MOST_HEAD)
    address = f"http://127.0.0.1:{_PORT}"
    names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
    try:
        yield {**dict.fromkeys(names, address), "no_proxy": "localhost,127.0.0.1", "NO_PROXY": "localhost,127.0.0.1"}
    finally:
        server.close()
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


async def _serve(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, allowed: AllowList, room: asyncio.Semaphore
) -> None:
    try:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError):
            async with room:
                await _answer(reader, writer, allowed)
    except asyncio.CancelledError:
        writer.transport.abort()
        raise
    finally:
        writer.close()


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, allowed: AllowList) -> None:
    async with asyncio.timeout(_SECONDS):
        head = await reader.readuntil(b"\r\n\r\n")
    line, _, fields = head.partition(b"\r\n")
    method, target, version = (*line.split(b" "), b"", b"")[:3]
    match = _TARGET.fullmatch(target)
    tunnel = method == b"CONNECT"
    port = int(match["port"] or (443 if tunnel else 80)) if match else 0
    if match is None or not allowed.allows(match["host"].decode(), port):
        said = target[:200].decode(errors="replace")
        text = f"{said}: is not among the allowed hosts ({', '.join(allowed.hosts) or 'none'})\n".encode()
        writer.write(b"HTTP/1.1 403 Forbidden\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text))
        await writer.drain()
        return
    try:
        async with asyncio.timeout(_SECONDS):
            there, out = await asyncio.open_connection(match["host"].decode(), port)
    except (OSError, TimeoutError):
        writer.write(b"HTTP/1.1 502 Bad Gateway\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        return
    try:
        if tunnel:
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        else:
            kept = [one for one in fields.split(b"\r\n") if not re.match(rb"(?i)(proxy-)?connection:", one)]
            first = b" ".join([method, match["path"] or b"/", version])
            out.write(b"\r\n".join([first, b"Connection: close", *kept]))
        await asyncio.gather(_pump(reader, out), _pump(there, writer))
    finally:
        out.close()


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(65_536):
        target.write(data)
        await target.drain()
    with contextlib.suppress(OSError):
        target.write_eof()
