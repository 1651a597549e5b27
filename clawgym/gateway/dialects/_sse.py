"""A server-sent event stream that starts when there is something to say.

An error before the first event is an HTTP error with its own status, which clients retry rightly; after it, an event in
the stream. While nothing comes, comments keep the connection alive.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable

from aiohttp import web

__all__ = ["event", "send_events"]

KEEP_ALIVE_SECONDS = 10.0
_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


async def send_events(
    request: web.Request,
    events: AsyncGenerator[bytes],
    on_error: Callable[[Exception], bytes],
    *,
    comment: bytes = b": keep-alive\n\n",
) -> web.StreamResponse:
    """Send ``events`` (whole events, as bytes) as they come. What they raise before anything was sent is raised;
    later, ``on_error`` of it is sent as the last event."""
    response = web.StreamResponse(headers=_HEADERS)
    keeper = asyncio.ensure_future(_keep_alive(request, response, comment))
    try:
        async with contextlib.aclosing(events):
            async for data in events:
                if not response.prepared:
                    await response.prepare(request)
                await response.write(data)
    except ConnectionError:
        raise
    except Exception as error:
        if not response.prepared:
            raise
        await response.write(on_error(error))
    finally:
        keeper.cancel()
    if not response.prepared:
        await response.prepare(request)
    await response.write_eof()
    return response


async def _keep_alive(request: web.Request, response: web.StreamResponse, comment: bytes) -> None:
    """A comment every so often, also between tokens: harmless there, and no clock is read for each token."""
    while True:
        await asyncio.sleep(KEEP_ALIVE_SECONDS)
        if not response.prepared:
            await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            await response.write(comment)


def event(data: bytes, name: str | None = None) -> bytes:
    """One event."""
    return b"data: " + data + b"\n\n" if name is None else b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
