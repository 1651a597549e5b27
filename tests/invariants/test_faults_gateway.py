"""Faults around a gateway: endpoints that refuse, die and return, agents that do not read, weights that change."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import openai
import psutil
import pytest
from aiohttp import web

from clawgym.engines.tiny import make_tiny_model
from clawgym.engines.vllm import VLLMEngine
from clawgym.gateway.calls import ChatCall
from clawgym.gateway.request import SessionRequest
from clawgym.gateway.server import Gateway
from clawgym.pool import EpisodeEnd, Pool
from clawgym.records import prompt_ids

sys.path.insert(0, str(Path(__file__).parent.parent / "gateway"))
from scripted import ScriptedEngine

SESSIONS = int(os.environ.get("CLAWGYM_SOAK", 0)) or 1000
ASK = [{"role": "user", "content": "hello"}]


class Server:
    """Speaks vLLM's wire format; ``faults`` says what becomes of the next requests."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.asked = 0
        self.port = 0
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._completions)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "max_model_len": 4096}]})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not body.get("stream"):
            top = {f"token_id:{n}": -1.0 - 0.5 * n for n in range(8)}
            logprobs = {"token_logprobs": [-1.0], "top_logprobs": [top]}
            stripped = {"token_ids": None} if "strip" in self.faults else {"token_ids": [0]}
            choice = {"logprobs": logprobs, "finish_reason": "length", "prompt_token_ids": body["prompt"], **stripped}
            return web.json_response({"choices": [choice]})
        self.asked += 1
        fault = self.faults.pop(0) if self.faults else ""
        if fault.isdigit():
            return web.json_response(
                {"error": {"message": "busy", "code": int(fault)}}, status=int(fault), headers={"retry-after": "0.05"}
            )
        if fault == "hang":
            await asyncio.sleep(30)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for n, token in enumerate([300, 301, 302, 2]):
            if fault == "cut" and n == 2:
                request.transport.abort()  # type: ignore[union-attr]
                return response
            choice = {
                "logprobs": {"token_logprobs": [-0.5]},
                "token_ids": [token],
                "finish_reason": "stop" if token == 2 else None,
                "prompt_token_ids": body["prompt"] if n == 0 else None,
            }
            await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
            await asyncio.sleep(0.005)
        await response.write(b"data: [DONE]\n\n")
        return response


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def pool(tmp_path):
    with contextlib.closing(Pool(tmp_path / "pool.db")) as pool:
        yield pool


@pytest.fixture
async def parts(model, pool) -> AsyncIterator[tuple[Server, Gateway, openai.AsyncOpenAI, str]]:
    """A gateway over a vLLM engine over :class:`Server`, an agent without retries of its own, its session."""
    server = Server()
    await server.start()
    engine = VLLMEngine(
        f"http://127.0.0.1:{server.port}/v1", "m", tokenizer=str(model), patience=5.0, first_token_seconds=1.0
    )
    async with Gateway(engine, pool) as gateway:
        await gateway.listen()
        opened = await gateway.open_session()
        async with openai.AsyncOpenAI(
            base_url=gateway.base_url(opened), api_key=opened.secret, max_retries=0
        ) as client:
            yield server, gateway, client, opened.id
    await engine.aclose()
    await server.stop()


async def ask(client, messages=ASK, **more):
    return await client.chat.completions.create(model="m", messages=messages, **more)


async def test_a_busy_endpoint_is_asked_again_and_the_turn_is_one(parts, pool):
    server, _, client, session = parts
    server.faults = ["429", "500", "503"]
    answer = await ask(client)
    assert answer.choices[0].finish_reason == "stop"
    assert server.asked == 4
    (turn,) = pool.turns(session)
    assert (turn.flaw, turn.sampled_ids) == (None, (300, 301, 302, 2))


async def test_an_endpoint_that_only_refuses_is_an_error_in_the_end(parts, pool):
    server, gateway, client, session = parts
    gateway.engine._patience = 0.3
    server.faults = ["500"] * 50
    with pytest.raises(openai.InternalServerError):
        await ask(client)
    server.faults = ["429"] * 50
    with pytest.raises(openai.RateLimitError):
        await ask(client)
    server.faults = ["hang"]
    gateway.engine._patience = 0.0
    with pytest.raises(openai.InternalServerError):
        await ask(client)
    server.faults = []
    assert (await ask(client)).choices[0].finish_reason == "stop"
    assert [t.finish_reason for t in pool.turns(session)] == ["error", "error", "error", "stop"]


async def test_an_endpoint_that_dies_and_returns(parts, pool):
    server, _, client, session = parts
    await ask(client)
    await server.stop()
    waiting = asyncio.ensure_future(ask(client, [*ASK, {"role": "user", "content": "still there?"}]))
    await asyncio.sleep(0.3)
    await server.start()
    assert (await waiting).choices[0].finish_reason == "stop"
    assert [t.flaw for t in pool.turns(session)] == [None, None]


async def test_a_stream_that_is_cut_is_recorded_and_the_session_goes_on(parts, pool):
    server, _, client, session = parts
    first = (await ask(client)).choices[0].message.content
    history = [*ASK, {"role": "assistant", "content": first}, {"role": "user", "content": "more"}]
    server.faults = ["cut"]
    with pytest.raises(openai.APIError):
        async for _ in await ask(client, history, stream=True):
            pass
    await ask(client, history)
    turns = pool.turns(session)
    assert [(t.finish_reason, t.parent) for t in turns] == [("stop", None), ("error", 0), ("stop", 0)]
    assert turns[1].sampled_ids == (300, 301)
    assert prompt_ids(turns, 2) == prompt_ids(turns, 1)


async def test_an_endpoint_that_strips_ids_is_named_at_the_first_call(parts):
    server, _, client, _ = parts
    server.faults = ["strip"]
    with pytest.raises(openai.InternalServerError) as raised:
        await ask(client)
    assert f"127.0.0.1:{server.port}" in str(raised.value)
    assert "token_ids" in str(raised.value)
    assert server.asked == 0


async def test_weights_change_under_load(model, pool):
    engine = ScriptedEngine(model, lambda prompt, n: "a few words of an answer", pause=0.002)
    async with Gateway(engine, pool, streams=16) as gateway:
        await gateway.listen()
        sessions = [await gateway.open_session() for _ in range(24)]
        going = True

        async def work(opened):
            history = list(ASK)
            async with openai.AsyncOpenAI(
                base_url=gateway.base_url(opened), api_key=opened.secret, max_retries=0
            ) as client:
                while going:
                    said = (await ask(client, history)).choices[0].message.content
                    history += [{"role": "assistant", "content": said}, {"role": "user", "content": "go on"}]
            return len(history) // 2

        agents = [asyncio.ensure_future(work(opened)) for opened in sessions]
        for version in range(1, 9):
            await asyncio.sleep(0.1)
            async with gateway.weights_change():
                assert engine.open == 0, "a turn runs while weights change"
                await asyncio.sleep(0.01)
                assert engine.open == 0
                engine.policy_version = version
        going = False
        counts = await asyncio.gather(*agents)
        assert sum(counts) > 24 * 2
        seen: set[int | None] = set()
        for opened, count in zip(sessions, counts, strict=True):
            turns = pool.turns(opened.id)
            assert len(turns) == count
            assert all(turn.flaw is None for turn in turns), "no turn of two versions, none that failed"
            versions = [turn.policy_version for turn in turns]
            assert versions == sorted(versions)
            seen |= set(versions)
        assert len(seen) > 4


async def test_an_agent_that_does_not_read_holds_the_engine_not_the_memory(model, pool):
    engine = ScriptedEngine(model, lambda prompt, n: [300] * 2_000_000, at_once=64, context_window=4_000_000)
    async with Gateway(engine, pool) as gateway:
        address = await gateway.listen()
        opened = await gateway.open_session()
        host, port = address.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        body = json.dumps({"messages": ASK, "stream": True}).encode()
        head = f"POST /s/{opened.id}/v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        head += f"Authorization: Bearer {opened.secret}\r\n"
        writer.write(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await reader.read(100)
        before = -1
        while before != len(engine.seen[0].sampled):  # until it stands still
            before = len(engine.seen[0].sampled)
            await asyncio.sleep(0.5)
        assert 0 < before < 1_900_000
        writer.transport.abort()
        async with gateway.weights_change():  # nothing runs any more
            pass
    assert pool.turns(opened.id)[0].finish_reason == "aborted"


async def test_many_sessions_do_not_grow(model, pool):
    engine = ScriptedEngine(model, lambda prompt, n: "an answer", at_once=8)
    process = psutil.Process()
    async with Gateway(engine, pool) as gateway:
        gateway.sessions._resident = 200
        sizes = []
        for part in range(4):
            for n in range(SESSIONS // 4):
                opened = await gateway.open_session(SessionRequest(task_id=f"{part}-{n}"))
                session = await gateway.sessions.get(opened.id)
                async for _ in gateway.core.answer(session, ChatCall([{"role": "user", "content": f"{part} {n}"}])):
                    pass
                if n % 2:
                    await gateway.close_session(opened.id, EpisodeEnd(outcome="solved", reward=1.0))
                engine.seen.clear()
            gc.collect()
            sizes.append(process.memory_info().rss)
        assert len(gateway.sessions) <= 200
    grown = (sizes[-1] - sizes[0]) / (SESSIONS * 3 / 4)
    assert grown < 8 * 1024, f"{grown:.0f} bytes a session"


async def test_what_stands_in_line_is_limited(model, pool):
    engine = ScriptedEngine(model, lambda prompt, n: "word " * 20, pause=0.01)
    async with Gateway(engine, pool, streams=2, waiting=4) as gateway:
        await gateway.listen()
        opened = await gateway.open_session()
        headers = {"Authorization": f"Bearer {opened.secret}"}
        async with aiohttp.ClientSession(headers=headers) as client:

            async def one(n):
                body = {"messages": [{"role": "user", "content": str(n)}]}
                async with client.post(f"{gateway.base_url(opened)}/chat/completions", json=body) as response:
                    return response.status, response.headers.get("retry-after")

            answers = await asyncio.gather(*(one(n) for n in range(12)))
    statuses = [status for status, _ in answers]
    assert sorted(statuses) == [200] * 6 + [429] * 6
    assert all(wait == "1" for status, wait in answers if status == 429)
