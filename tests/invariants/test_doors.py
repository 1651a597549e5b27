"""Requests hidden in requests, and web pages that rebind their name, at every HTTP server of ours."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from clawgym.gateway.control import Control
from clawgym.gateway.server import Gateway
from clawgym.live.page import Page
from clawgym.live.registry import ThisProcess
from clawgym.pool import Pool

from ..gateway.scripted import ScriptedEngine


@pytest.fixture(params=["gateway", "control", "watch"])
async def server(
    request: pytest.FixtureRequest, tmp_path: Path, model_folder: Path
) -> AsyncIterator[tuple[str, str, str]]:
    """Host and port, a path that is answered with 200, and a header that goes with it."""
    if request.param == "watch":
        page = Page(ThisProcess())
        host, slash, path = page.url.removeprefix("http://").partition("/")
        yield host, slash + path, "X: y"
        page.close()
        return
    with contextlib.closing(Pool(tmp_path / "pool.db")) as pool:
        async with Gateway(ScriptedEngine(model_folder, lambda *_: "x"), pool) as gateway, Control(gateway) as control:
            address = await (gateway if request.param == "gateway" else control).listen()
            path = "/healthz" if request.param == "gateway" else "/stats"
            yield address.url.removeprefix("http://"), path, f"Authorization: Bearer {control.token}"


async def answers(server: str, raw: str) -> list[int]:
    """The statuses of all answers to what was sent at once."""
    host, port = server.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(raw.encode("latin-1"))
    got = b""
    with contextlib.suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(20):  # a server that waits for more has answered all that it will
            while piece := await reader.read(65536):
                got += piece
    writer.transport.abort()
    return [int(part.split(b" ", 1)[0]) for part in got.split(b"HTTP/1.0 ")[1:] + got.split(b"HTTP/1.1 ")[1:]]


SMUGGLED = {
    "length and encoding": "Content-Length: 4\r\nTransfer-Encoding: chunked",
    "encoding and length": "Transfer-Encoding: chunked\r\nContent-Length: 4",
    "two lengths": "Content-Length: 0\r\nContent-Length: 40",
    "two encodings": "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
    "odd encoding": "Transfer-Encoding: xchunked",
    "space before the colon": "Transfer-Encoding : chunked",
    "folded": "Transfer-Encoding:\r\n chunked",
    "list of lengths": "Content-Length: 0, 40",
    "sign": "Content-Length: +4",
}


@pytest.mark.parametrize("name", SMUGGLED)
async def test_no_request_is_hidden_in_another(server: tuple[str, str, str], name: str) -> None:
    at, path, header = server
    hidden = f"GET {path} HTTP/1.1\r\nHost: {at}\r\n{header}\r\nConnection: close\r\n\r\n"
    outer = f"GET {path} HTTP/1.1\r\nHost: {at}\r\n{header}\r\n{SMUGGLED[name]}\r\n\r\n0\r\n\r\n{hidden}"
    assert len(await answers(at, outer)) <= 1, "the hidden one was answered"


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "[", "@"])
async def test_a_rebound_name_is_refused(server: tuple[str, str, str], host: str) -> None:
    at, path, header = server
    (status,) = await answers(at, f"GET {path} HTTP/1.1\r\nHost: {host}\r\n{header}\r\nConnection: close\r\n\r\n")
    assert status in (400, 421)
    (status,) = await answers(at, f"GET {path} HTTP/1.1\r\nHost: {at}\r\n{header}\r\nConnection: close\r\n\r\n")
    assert status == 200


@pytest.mark.parametrize("server", ["gateway", "control"], indirect=True)
async def test_a_page_of_another_origin_is_refused(server: tuple[str, str, str]) -> None:
    at, path, header = server
    for origin, expected in (("https://evil.example", 403), ("null", 403), (f"http://{at}", 200)):
        raw = f"GET {path} HTTP/1.1\r\nHost: {at}\r\n{header}\r\nOrigin: {origin}\r\nConnection: close\r\n\r\n"
        assert await answers(at, raw) == [expected]
