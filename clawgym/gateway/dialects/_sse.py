"""Server-sent event streams that start with the first event.

An error before the first event is an HTTP error with its own status, which clients can retry. A later error is an event
in the stream. Comments keep the connection alive while there are no events.
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
    """Send ``events`` (complete events, as bytes) as they arrive.

    An exception before the first event is raised. A later one is sent as the last event, made by ``on_error``.
    """
    response = web.StreamResponse(headers=_HEADERS)
    loop = asyncio.get_running_loop()
    keepers: set[asyncio.Task[None]] = set()

    def keep_alive() -> None:
        """Send comments in regular intervals, also between events: a check for silence would cost time per token."""
        keepers.add(loop.create_task(_keep_alive(request, response, comment)))

    timer = loop.call_later(KEEP_ALIVE_SECONDS, keep_alive)  # most streams end before, and need no task
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
        timer.cancel()
        for keeper in keepers:
            keeper.cancel()
    if not response.prepared:
        await response.prepare(request)
    await response.write_eof()
    return response


async def _keep_alive(request: web.Request, response: web.StreamResponse, comment: bytes) -> None:
    while True:
        if not response.prepared:
            await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            await response.write(comment)
        await asyncio.sleep(KEEP_ALIVE_SECONDS)


def event(data: bytes, name: str | None = None) -> bytes:
    """Return one server-sent event."""
    return b"data: " + data + b"\n\n" if name is None else b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
