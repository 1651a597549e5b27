"""A daemon of signal-cli on loopback, with one person who writes to a bot: for ``channels.signal`` of OpenClaw."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

from aiohttp import web

BOT, PERSON = "+15550100001", "+15550100002"


class SignalDaemon:
    """Use as ``async with``. A message's id is its time in milliseconds, as in Signal."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, str]] = []
        """(id, text) of the bot's messages."""
        self.url = ""
        self._events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._times = self._clock()
        app = web.Application()
        app.router.add_get("/api/v1/check", self._check)
        app.router.add_get("/api/v1/events", self._stream)
        app.router.add_post("/api/v1/rpc", self._rpc)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)

    async def __aenter__(self) -> SignalDaemon:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    @property
    def channel(self) -> dict[str, Any]:
        """The channel in OpenClaw's configuration."""
        about = {"enabled": True, "account": BOT, "httpUrl": self.url, "autoStart": False}
        return {**about, "dmPolicy": "allowlist", "allowFrom": [PERSON]}

    async def ask(self, text: str, seconds: float = 60.0) -> tuple[int, str]:
        """Send a message; return the id and the text of the bot's next message."""
        before, now = len(self.sent), next(self._times)
        self._receive(now, dataMessage={"timestamp": now, "message": text})
        async with asyncio.timeout(seconds):
            while len(self.sent) == before:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        return self.sent[-1]

    def react(self, message: int, emoji: str) -> None:
        """Set the person's reaction on one of the bot's messages."""
        now = next(self._times)
        reaction = {"emoji": emoji, "targetAuthor": BOT, "targetSentTimestamp": message, "isRemove": False}
        self._receive(now, dataMessage={"timestamp": now, "reaction": reaction})

    def _receive(self, now: int, **about: Any) -> None:
        person = {"source": PERSON, "sourceNumber": PERSON, "sourceName": "Person", "timestamp": now}
        self._events.put_nowait({"account": BOT, "envelope": {**person, **about}})

    def _clock(self) -> Iterator[int]:
        last = 0
        while True:
            last = max(last + 1, time.time_ns() // 10**6)
            yield last

    async def _check(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await answer.write(f"event: receive\ndata: {json.dumps(await self._events.get())}\n\n".encode())
        return answer

    async def _rpc(self, request: web.Request) -> web.Response:
        asked = await request.json()
        result: dict[str, Any] = {}
        if asked["method"] == "send":
            now = next(self._times)
            self.sent.append((now, asked["params"]["message"]))
            result = {"timestamp": now}
        return web.json_response({"jsonrpc": "2.0", "id": asked["id"], "result": result})
