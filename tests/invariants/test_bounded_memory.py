"""Hostile requests and hostile endpoints: the memory of the gateway and of an evaluation stays bounded throughout."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from clawgym.bounds import HELD_BODIES, LARGEST_BODY
from clawgym.records.run_folder import RunFolder

from .faults import Eval
from .hostile_endpoint import HostileEndpoint, bomb

pytestmark = [pytest.mark.timeout(300), pytest.mark.alone]
MOST = 200 * 2**20
HEALTH_SECONDS = 3.0  # about one, on a machine that does much else
PROGRAM = [sys.executable, "-c", "from clawgym.cli import main; main()"]
KEY = "sk-of-the-endpoint"


class GatewayProcess:
    """A gateway in a process of its own, and one session of it."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, key: str) -> None:
        self.process = psutil.Process(process.pid)
        self.url, self.key = url, key
        self.root = url.partition("/s/")[0]

    def head(self, extra: str) -> bytes:
        host = self.root.removeprefix("http://")
        path = self.url.removeprefix(self.root)
        lines = [f"POST {path}/chat/completions HTTP/1.1", f"Host: {host}", f"Authorization: Bearer {self.key}", extra]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    async def send(self, head: str, pieces: Callable[[], AsyncIterator[bytes]]) -> bytes:
        """One raw request; the first line of its answer."""
        host, port = self.root.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        answer = asyncio.ensure_future(reader.readline())
        try:
            writer.write(self.head(head))
            with contextlib.suppress(ConnectionError):
                async for piece in pieces():
                    if answer.done():
                        break
                    writer.write(piece)
                    await writer.drain()
            with contextlib.suppress(ConnectionError):
                return await answer
            return b""
        finally:
            answer.cancel()
            writer.transport.abort()

    async def held(self, attack: list[asyncio.Future[Any]], seconds: float) -> None:
        """Watch until ``attack`` has ended, at most for so long."""
        before, worst, slowest = self.process.memory_info().rss, 0, 0.0
        until = time.monotonic() + seconds
        async with aiohttp.ClientSession() as client:
            while time.monotonic() < until and not all(one.done() for one in attack):
                asked = time.monotonic()
                async with client.get(f"{self.root}/healthz") as answer:
                    assert answer.status == 200
                slowest = max(slowest, time.monotonic() - asked)
                worst = max(worst, self.process.memory_info().rss - before)
                await asyncio.sleep(0.02)
        for one in attack:
            one.cancel()
        print(f"{worst >> 20} MiB more, /healthz within {slowest:.2f} s")
        assert worst < MOST
        assert slowest < HEALTH_SECONDS


@contextlib.asynccontextmanager
async def start_gateway(folder: Path, endpoint: str) -> AsyncIterator[GatewayProcess]:
    argv = [*PROGRAM, "gateway", "--engine", "openai", "--model", "m", "--base-url", endpoint]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *argv, "--pool", str(folder / "pool.db"), stdout=pipe, env={**os.environ, "OPENAI_API_KEY": KEY}
    )
    assert process.stdout is not None
    try:
        words = [(await process.stdout.readline()).decode().split()[1] for _ in range(2)]
        yield GatewayProcess(process, *words)
    finally:
        process.kill()
        await process.wait()


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[GatewayProcess]:
    """A gateway whose endpoint does not exist: it refuses these requests before it asks one."""
    async with start_gateway(tmp_path, "http://127.0.0.1:9/v1") as made:
        yield made


def once(data: bytes) -> Callable[[], AsyncIterator[bytes]]:
    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(data), 1 << 18):
            yield data[start : start + (1 << 18)]

    return pieces


async def endless() -> AsyncIterator[bytes]:
    while True:
        yield b"40000\r\n" + b"x" * 0x40000 + b"\r\n"


async def trickle() -> AsyncIterator[bytes]:
    while True:
        yield b"1\r\n \r\n" * 1000
        await asyncio.sleep(0.001)


def say(content: str) -> bytes:
    return b'{"messages":[{"role":"user","content":' + content.encode() + b"}]}"


SIZE = LARGEST_BODY - 100
REQUESTS: dict[str, Callable[[], tuple[str, Callable[[], AsyncIterator[bytes]], set[int]]]] = {
    "gzip": lambda: packed("gzip", bomb(4 << 30, 31)),
    "deflate": lambda: packed("deflate", bomb(4 << 30, 15)),
    "gzip, gzip": lambda: packed("gzip, gzip", bomb(1 << 30, 31)),
    "zstd": lambda: packed("zstd", b"(\xb5/\xfd" * 100),
    "no end": lambda: ("Transfer-Encoding: chunked", endless, {413, 429}),
    "small chunks": lambda: ("Transfer-Encoding: chunked", trickle, set()),
    "too long": lambda: (f"Content-Length: {LARGEST_BODY + 1}", once(b""), {413}),
    "wide": lambda: whole(say("[" + "[]," * (SIZE // 3) + "[]]"), {413, 429}),
    "objects": lambda: whole(say("[" + '{"a":1},' * (SIZE // 8) + "1]"), {413, 429}),
    "deep": lambda: whole(say("[" * 100_000 + "]" * 100_000), {400, 413}),
    "deep tools": lambda: whole(b'{"tools":' + b"[" * 900 + b"]" * 900 + b',"messages":[]}', {413}),
    "long text": lambda: whole(say('"' + "x" * SIZE + '"'), {400, 429}),
    "wide characters": lambda: whole(say('"\U0001f600' + "x" * SIZE + '"'), {400, 429}),
}


def packed(name: str, data: bytes) -> tuple[str, Callable[[], AsyncIterator[bytes]], set[int]]:
    return f"Content-Encoding: {name}\r\nContent-Length: {len(data)}", once(data), {415}


def whole(data: bytes, statuses: set[int]) -> tuple[str, Callable[[], AsyncIterator[bytes]], set[int]]:
    return f"Content-Length: {len(data)}", once(data), statuses


@pytest.mark.parametrize("attack", REQUESTS)
async def test_six_hostile_requests_at_once(gateway: GatewayProcess, attack: str) -> None:
    head, pieces, statuses = await asyncio.to_thread(REQUESTS[attack])
    sent = [asyncio.ensure_future(gateway.send(head, pieces)) for _ in range(6)]
    await gateway.held(list(sent), 60 if statuses else 5)
    if statuses:
        said = {int(line.split()[1]) for one in sent if (line := one.result())}
        assert said <= statuses
        assert said, "nobody was told why"


async def test_bodies_of_one_session_are_bounded_together_and_given_back(gateway: GatewayProcess) -> None:
    most = HELD_BODIES // 2 + 1000
    first, second = [
        asyncio.ensure_future(gateway.send(f"Content-Length: {most + 1}", once(b" " * most))) for _ in range(2)
    ]
    done, _ = await asyncio.wait((first, second), return_when=asyncio.FIRST_COMPLETED)
    assert done.pop().result().split()[1] == b"429"
    for one in (first, second):
        one.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    answer = await gateway.send(*whole(b" " * most, set())[:2])
    assert answer.split()[1] == b"400", "read to its end: no JSON"


ENDS = {
    "line": "LARGEST_EVENT", "event": "LARGEST_EVENT", "calls": "MOST_CALLS", "text": "LONGEST_REPLY",
    "reasoning": "LONGEST_REPLY", "arguments": "LONGEST_REPLY", "gzip-stream": "compressed", "error": "(400)",
    "empty": "LARGEST_STREAM", "comments": "LARGEST_STREAM", "headers": None, "early": None,
}  # fmt: skip
"""What an agent is told; None where it is not over in the time of a test."""


@pytest.mark.parametrize("attack", ENDS)
async def test_the_gateway_before_a_hostile_endpoint(tmp_path: Path, attack: str) -> None:
    async with HostileEndpoint() as endpoint, start_gateway(tmp_path, endpoint.url(attack)) as gateway:

        async def ask() -> bytes:
            body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
            end = b""
            async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {gateway.key}"}) as client:
                async with client.post(f"{gateway.url}/chat/completions", json=body) as answer:
                    async for piece in answer.content.iter_any():
                        end = (end + piece)[-2000:]
            return end

        asked = [asyncio.ensure_future(ask()) for _ in range(3)]
        expected = ENDS[attack]
        await gateway.held(list(asked), 240 if expected else 10)
        if expected:
            assert all(expected in one.result().decode() for one in asked)


EVALUATED = {
    "body": "LARGEST_ANSWER", "chunked": "LARGEST_ANSWER", "wide": "LARGEST_ANSWER", "deep": "DEEPEST_JSON",
    "gzip": "compressed", "deflate": "compressed", "gzip-gzip": "compressed", "error": None, "usage": "",
}  # fmt: skip


@pytest.mark.parametrize("attack", ["body", "chunked", "deep", "gzip"])
async def test_the_call_before_an_evaluation_with_a_hostile_endpoint(tmp_path: Path, attack: str) -> None:
    async with HostileEndpoint() as endpoint:
        work = Eval(tmp_path, samples=1, env={"OPENAI_API_KEY": KEY})
        argv = work.argv()
        where = argv.index("--agent")
        argv[where : where + 4] = ["--agent", "tool-loop", "--model", "m", "--base-url", endpoint.url(attack)]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*argv, env=work.environment(), stdout=pipe, stderr=pipe)
        watched, most, before = psutil.Process(process.pid), 0, None
        reading = asyncio.ensure_future(process.communicate())
        with contextlib.suppress(psutil.Error):
            while not reading.done():
                if before is None and endpoint.seen:
                    before = watched.memory_info().rss
                most = max(most, watched.memory_info().rss)
                await asyncio.sleep(0.02)
        _, errors = await reading
    assert process.returncode == 2
    assert before is not None
    assert most - before < MOST
    assert EVALUATED[attack] in errors.decode()
    assert len(errors) < 4000
    assert not work.out.exists()


@pytest.mark.parametrize("attack", EVALUATED)
async def test_an_evaluation_with_a_hostile_endpoint(tmp_path: Path, attack: str) -> None:
    async with HostileEndpoint(sound=1) as endpoint:
        work = Eval(tmp_path, samples=2, env={"OPENAI_API_KEY": KEY})
        argv = work.argv()
        where = argv.index("--agent")
        argv[where : where + 4] = ["--agent", "tool-loop", "--model", "m", "--base-url", endpoint.url(attack)]
        quiet = asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(*argv, env=work.environment(), stdout=quiet, stderr=quiet)
        watched, most, before = psutil.Process(process.pid), 0, None
        with contextlib.suppress(psutil.Error):
            while process.returncode is None:
                if before is None and endpoint.seen:
                    before = watched.memory_info().rss
                most = max(most, watched.memory_info().rss)
                await asyncio.sleep(0.02)
        await process.wait()
    assert before is not None
    print(f"{(most - before) >> 20} MiB more")
    assert most - before < MOST
    rows = RunFolder.read(work.out).rows
    assert rows
    expected = EVALUATED[attack]
    if expected:
        assert {row["outcome"] for row in rows} == {"infra"}
        assert all(expected in row["cause"] for row in rows)
    elif expected is None:
        assert {row["outcome"] for row in rows} <= {"infra", "failed"}
    else:
        assert {row["outcome"] for row in rows} == {"failed"}, "what it says of tokens is left out"
    assert KEY not in json.dumps(rows)
