"""HTTP requests to a program in a sandbox. Responses are untrusted: their size and form are checked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from clawgym.agents.blackbox.protocol import ClawStopped
from clawgym.bounds import LARGEST_ANSWER
from clawgym.errors import MissingDependency, SandboxDied, SandboxError
from clawgym.sandbox.protocol import Sandbox

__all__ = ["request"]

_PIECE = 1024
"""Average size of a chunk, in bytes, that a response must reach: parsing a response of single bytes costs much time."""
_READ = 4096
"""Bytes that are parsed before other tasks of the event loop run."""


async def request(
    sandbox: Sandbox,
    port: int,
    method: str,
    path: str,
    *,
    headers: Mapping[str, str] | None = None,
    body: Any = None,
) -> tuple[int, bytes]:
    """Send one request to 127.0.0.1:``port`` in ``sandbox`` and return the status and body of the response.

    ``body`` is sent as JSON.

    Raises:
        ClawStopped: nothing listens on the port, or the response is not HTTP or too large.
        SandboxDied: the sandbox ended.
        MissingDependency: h11 is not installed.
    """
    try:
        import h11
    except ImportError as error:
        raise MissingDependency("black-box agents need h11: pip install 'clawgym[openclaw]'") from error
    data = b"" if body is None else json.dumps(body).encode()
    sent = [("host", f"127.0.0.1:{port}"), ("connection", "close"), ("content-length", str(len(data)))]
    sent += [("content-type", "application/json")] if data else []
    sent += (headers or {}).items()
    try:
        sock = await sandbox.connect(port)
    except SandboxDied:
        raise
    except SandboxError as error:
        raise ClawStopped(f"nothing listens on port {port} in the sandbox ({error})") from error
    connection = h11.Connection(h11.CLIENT)
    reader, writer = await asyncio.open_connection(sock=sock)
    try:
        for event in (h11.Request(method=method, target=path, headers=sent), h11.Data(data), h11.EndOfMessage()):
            writer.write(connection.send(event) or b"")
        await writer.drain()
        status, parts, room, pieces = 0, [], LARGEST_ANSWER, LARGEST_ANSWER // _PIECE
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await reader.read(_READ))
                await asyncio.sleep(0)
                continue
            if isinstance(event, h11.Data | h11.InformationalResponse):
                pieces -= 1
                room -= len(event.data) if isinstance(event, h11.Data) else 0
            if min(room, pieces) < 0:
                raise ClawStopped(f"the response is larger than {LARGEST_ANSWER >> 20} MiB", cause="agent-output")
            if isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                parts.append(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
                return status, b"".join(parts)
    except (h11.ProtocolError, OSError) as error:
        raise ClawStopped(f"the program in the sandbox sent an incomplete or malformed response ({error})") from error
    finally:
        writer.transport.abort()
