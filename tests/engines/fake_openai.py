"""A scripted OpenAI-compatible server on loopback: each request takes the next behaviour of the script."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from aiohttp import web


@dataclass(frozen=True)
class Streamed:
    """An event stream. ``pause`` is before each event but the first; ``cut`` breaks the connection at the end."""

    events: Sequence[Any]
    pause: float = 0.0
    cut: bool = False
    done: bool = True


Behaviour = Callable[[dict[str, Any]], Awaitable[web.Response | Streamed]]
USAGE = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}


def reply(
    text: str | None = "hello",
    *,
    tool_calls: list[dict[str, Any]] | None = None,
    usage: Mapping[str, Any] | None = USAGE,
    finish_reason: str = "stop",
    **message: Any,
) -> Behaviour:
    """A completion. ``usage=None`` leaves usage out."""

    async def answer(request: dict[str, Any]) -> web.Response:
        body: dict[str, Any] = {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 0,
            "model": request.get("model"),
            "choices": [
                {
                    "index": 0,
                    "finish_reason": finish_reason,
                    "message": {"role": "assistant", "content": text, "tool_calls": tool_calls, **message},
                }
            ],
        }
        if usage is not None:
            body["usage"] = dict(usage)
        return web.json_response(body)

    return answer


def chunk(finish_reason: str | None = None, usage: Any = None, **delta: Any) -> dict[str, Any]:
    """One chunk of a streamed completion; without a choice where it has neither a delta nor a reason."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    choices = [choice] if delta or finish_reason else []
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 0,
        "model": "m",
        "choices": choices,
        "usage": usage,
    }


WORDS = (
    chunk(role="assistant", content=""),
    chunk(content="hel"),
    chunk(content="lo"),
    chunk("stop"),
    chunk(usage=USAGE),
)


def streamed(*events: Any, **options: Any) -> Behaviour:
    """An event stream of ``events`` (dicts, or raw text); a short answer without any."""

    async def answer(request: dict[str, Any]) -> Streamed:
        return Streamed(events or WORDS, **options)

    return answer


def call(name: str, arguments: Any, id: str = "call_1") -> dict[str, Any]:
    """One tool call; ``arguments`` that are no string are encoded."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": text}}


def error(status: int, message: str = "no", *, headers: Mapping[str, str] | None = None, **fields: Any) -> Behaviour:
    """An OpenAI error envelope."""

    async def answer(request: dict[str, Any]) -> web.Response:
        body = {"error": {"message": message, "type": "fake", "param": None, "code": None, **fields}}
        return web.json_response(body, status=status, headers=headers)

    return answer


def raw(text: str, *, status: int = 200, content_type: str = "application/json") -> Behaviour:
    """Any bytes."""

    async def answer(request: dict[str, Any]) -> web.Response:
        return web.Response(text=text, status=status, content_type=content_type)

    return answer


def slow(seconds: float, then: Behaviour) -> Behaviour:
    """``then``, later."""

    async def answer(request: dict[str, Any]) -> web.Response | Streamed:
        await asyncio.sleep(seconds)
        return await then(request)

    return answer


class FakeOpenAI:
    """``script`` is taken from the left; when it is empty, ``default`` answers."""

    def __init__(self) -> None:
        self.script: deque[Behaviour] = deque()
        self.default: Behaviour = reply()
        self.requests: list[dict[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        self.times: list[float] = []
        self.arrived = asyncio.Event()
        self.in_flight = 0
        self.most_in_flight = 0
        self.gone = 0
        """Streams whose client left."""
        self.base_url = ""
        self.models: list[Any] | None = None
        """What ``GET /models`` lists; ``None``: it is not served."""
        self.listed = 0
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_post("/v1/chat/completions", self._handle)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.base_url = f"http://{host}:{port}/v1"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        self.listed += 1
        if self.models is None:
            return web.json_response({"error": {"message": "no such page"}}, status=404)
        return web.json_response({"object": "list", "data": [{"id": name, "object": "model"} for name in self.models]})

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        self.times.append(asyncio.get_running_loop().time())
        self.arrived.set()
        behaviour = self.script.popleft() if self.script else self.default
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            answer = await behaviour(body)
            return await self._stream(request, answer) if isinstance(answer, Streamed) else answer
        except (ConnectionResetError, asyncio.CancelledError):
            self.gone += 1
            raise
        finally:
            self.in_flight -= 1

    async def _stream(self, request: web.Request, answer: Streamed) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for number, event in enumerate(answer.events):
            await asyncio.sleep(answer.pause if number else 0)
            await response.write(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode())
        if answer.cut:
            assert request.transport is not None
            request.transport.abort()
        elif answer.done:
            await response.write(b"data: [DONE]\n\n")
        return response


@pytest.fixture
async def fake_openai() -> AsyncIterator[FakeOpenAI]:
    """A running server; import this name into a conftest to use it there."""
    server = FakeOpenAI()
    await server.start()
    yield server
    await server.stop()
