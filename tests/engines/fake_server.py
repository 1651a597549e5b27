"""Common code of the scripted servers: a loopback port, a script of faults, stopping and restarting."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass(frozen=True)
class Fault:
    """What one request meets instead of, or on the way to, its answer."""

    status: int = 0
    """Refuse with it."""
    message: str = "no"
    headers: Mapping[str, str] = field(default_factory=dict)
    delay: float = 0.0
    """Before anything."""
    hang: float = 0.0
    """Between the first event and the rest, with comments that keep the connection alive."""
    drop_after: int | None = None
    """Events before the connection is cut."""
    end_after: int | None = None
    """Events before the stream ends as if it were whole."""
    error_after: int | None = None
    """Events before one that says there was an error."""


class FakeServer:
    """``faults`` are taken from the left, one a request to a path that samples."""

    def __init__(self) -> None:
        self.faults: deque[Fault] = deque()
        self.requests: list[dict[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        self.gone = 0
        """Streams whose client left."""
        self.streaming = 0
        self.port = 0
        self._runner: web.AppRunner | None = None

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def routes(self, app: web.Application) -> None:
        raise NotImplementedError

    async def start(self) -> None:
        """Listen; on the same port when started again."""
        app = web.Application(client_max_size=64 * 2**20)
        self.routes(app)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def take(self, request: web.Request) -> tuple[dict[str, Any], Fault]:
        """The body, and the fault of this request. Raises for a refusal."""
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        fault = self.faults.popleft() if self.faults else Fault()
        await asyncio.sleep(fault.delay)
        return body, fault

    def refusal(self, fault: Fault) -> web.Response:
        body = {"error": {"message": fault.message, "type": "fake", "param": None, "code": fault.status}}
        return web.json_response(body, status=fault.status, headers=dict(fault.headers))

    async def stream(
        self, request: web.Request, fault: Fault, events: AsyncIterator[Any], error: Any
    ) -> web.StreamResponse:
        """Send ``events`` as an event stream, with CRLF and comments between, as far as ``fault`` lets it."""
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        self.streaming += 1
        count = 0
        try:
            async for event in events:
                if count == fault.drop_after:
                    assert request.transport is not None
                    request.transport.abort()
                    return response
                if count == fault.end_after:
                    return response
                if count == fault.error_after:
                    await response.write(b"data: " + json.dumps(error).encode() + b"\n\ndata: [DONE]\n\n")
                    return response
                end = b"\r\n\r\n" if count % 2 else b"\n\n"
                data = event if isinstance(event, bytes) else json.dumps(event).encode()
                await response.write(b"data: " + data + end)
                count += 1
                for _ in range(int(fault.hang / 0.02) if count == 1 else 0):
                    await response.write(b": still here\n\n")
                    await asyncio.sleep(0.02)
                await asyncio.sleep(0)
            await response.write(b"data: [DONE]\n\n")
            return response
        except (ConnectionResetError, asyncio.CancelledError):
            self.gone += 1
            raise
        finally:
            self.streaming -= 1
