"""HTTP to a hostile program in a sandbox, over real sockets and in a real sandbox."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from clawgym.agents.blackbox import ClawStopped, http
from clawgym.agents.blackbox.http import request
from clawgym.errors import SandboxDied
from clawgym.sandbox import Backend, Sandbox, SandboxSpec
from clawgym.sandbox import backend as make_backend

from ..conftest import kill_from_outside

pytestmark = pytest.mark.asyncio(loop_scope="module")

PORT = 8000
SERVER = r"""
import base64, json, socketserver, sys

class Answers(socketserver.StreamRequestHandler):
    def handle(self):
        head = self.rfile.readline().decode()
        size = 0
        while (line := self.rfile.readline().strip()):
            if line.lower().startswith(b"content-length:"):
                size = int(line.split(b":")[1])
        body = self.rfile.read(size)
        path = head.split()[1]
        if path == "/echo":
            text = json.dumps([head, body.decode()]).encode()
            self.wfile.write(b"HTTP/1.1 201 Created\r\ncontent-length: %d\r\n\r\n%b" % (len(text), text))
            return
        first, again, times = json.loads(base64.urlsafe_b64decode(path[1:]))
        try:
            self.wfile.write(first.encode("latin-1"))
            while times:
                self.wfile.write(again.encode("latin-1"))
                times -= 1
        except OSError:
            pass

socketserver.ThreadingTCPServer.allow_reuse_address = True
socketserver.ThreadingTCPServer(("127.0.0.1", 8000), Answers).serve_forever()
"""


def path_for(first: str, again: str = "", times: int = 0) -> str:
    """The path at which the server sends ``first``, then ``again`` so often (-1: without end), and closes."""
    return "/" + base64.urlsafe_b64encode(json.dumps([first, again, times]).encode()).decode()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandboxes() -> AsyncIterator[Backend]:
    made = make_backend("namespace")
    await made.probe()
    yield made
    await made.aclose()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(sandboxes: Backend) -> AsyncIterator[Sandbox]:
    sandbox = await sandboxes.create(SandboxSpec())
    serves = asyncio.ensure_future(sandbox.exec(["python3", "-c", SERVER], timeout=600))
    async with asyncio.timeout(30):
        while True:
            try:
                await request(sandbox, PORT, "GET", "/echo")
                break
            except ClawStopped:
                await asyncio.sleep(0.05)
    yield sandbox
    await sandbox.close()
    await asyncio.gather(serves, return_exceptions=True)


async def test_request_and_response(server: Sandbox) -> None:
    status, answer = await request(server, PORT, "POST", "/echo", headers={"x-a": "b"}, body={"é": ["\n"] * 3})
    assert status == 201
    head, body = json.loads(answer)
    assert head.startswith("POST /echo HTTP/1.1")
    assert json.loads(body) == {"é": ["\n"] * 3}
    assert await request(server, PORT, "GET", path_for("HTTP/1.1 204 No Content\r\n\r\n")) == (204, b"")


@pytest.mark.parametrize(
    ("first", "again", "status", "body"),
    [
        ("HTTP/1.1 200 OK\r\n\r\n", "until the end", 200, b"until the end"),
        ("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", "3\r\nabc\r\n0\r\n\r\n", 200, b"abc"),
        ("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 500 Oh\r\ncontent-length: 1\r\n\r\n", "!", 500, b"!"),
        ("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok", "HTTP/1.1 200 OK\r\n\r\nmore", 200, b"ok"),
    ],
)
async def test_valid_response_forms(server: Sandbox, first: str, again: str, status: int, body: bytes) -> None:
    assert await request(server, PORT, "GET", path_for(first, again, 1)) == (status, body)


@pytest.mark.parametrize(
    "first",
    [
        "",
        "\0\xff\xfe garbage",
        "SSH-2.0-OpenSSH_9.9\r\n",
        "HTTP/1.1 999999999 What\r\n\r\n",
        "HTTP/1.1 200 OK\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nshort",
        "HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nnot-a-size\r\n",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nffffffffffffffffffff\r\nabc",
        "HTTP/1.1 200 OK\r\nx y: z\r\n\r\n",
        "HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
    ],
)
async def test_invalid_response_raises_claw_stopped(server: Sandbox, first: str) -> None:
    async with asyncio.timeout(30):
        with pytest.raises(ClawStopped) as stopped:
            await request(server, PORT, "GET", path_for(first))
    assert stopped.value.cause == "agent-stopped"


@pytest.mark.parametrize(
    ("first", "again"),
    [
        ("HTTP/1.1 200 OK\r\n\r\n", "x" * 4096),
        ("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", "1\r\nx\r\n"),
        ("HTTP/1.1 200 OK\r\ncontent-length: 99999999999999\r\n\r\n", "x" * 4096),
        ("HTTP/1.1 200 OK\r\n", "x-more: of this\r\n"),
        ("HTTP/1.1 200 OK\r\nx-long: ", "x" * 4096),
        ("", "x"),
    ],
)
async def test_endless_response_is_bounded(
    server: Sandbox, monkeypatch: pytest.MonkeyPatch, first: str, again: str
) -> None:
    monkeypatch.setattr(http, "LARGEST_ANSWER", 2**18)
    async with asyncio.timeout(60):
        with pytest.raises(ClawStopped):
            await request(server, PORT, "GET", path_for(first, again, -1))


async def test_cause_of_too_large_response(server: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "LARGEST_ANSWER", 8192)
    with pytest.raises(ClawStopped) as stopped:
        await request(server, PORT, "GET", path_for("HTTP/1.1 200 OK\r\n\r\n", "x" * 8193, 1))
    assert stopped.value.cause == "agent-output"
    assert await request(server, PORT, "GET", path_for("HTTP/1.1 200 OK\r\n\r\n", "x" * 8192, 1)) == (200, b"x" * 8192)


async def test_cancelled_request_closes_connection(server: Sandbox) -> None:
    waits = asyncio.ensure_future(request(server, PORT, "GET", path_for("HTTP/1.1 200 OK\r\n\r\n", "\r", -1)))
    await asyncio.sleep(0.05)
    waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits


async def test_closed_port_raises_claw_stopped(server: Sandbox) -> None:
    with pytest.raises(ClawStopped, match="nothing listens on port"):
        await request(server, PORT + 1, "GET", "/")


async def test_dead_sandbox_raises_sandbox_died(sandboxes: Backend) -> None:
    sandbox: Any = await sandboxes.create(SandboxSpec())
    await kill_from_outside(sandbox)
    dead: SandboxDied | None = None
    async with asyncio.timeout(30):
        while dead is None:
            try:
                await request(sandbox, PORT, "GET", "/")
            except SandboxDied as error:
                dead = error
            except ClawStopped:
                await asyncio.sleep(0.01)  # it is still ending
    await sandbox.close()
