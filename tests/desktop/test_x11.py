"""The X client against hostile servers: every violation ends in a sandbox error, in bounded time and memory."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawgym.desktop import _x11
from clawgym.desktop._x11 import Rectangle, XClient
from clawgym.errors import SandboxDied, SandboxError

SETUP = (
    struct.pack("<IIIIHHBBBBBBBBI", 1, 0x400000, 0x1FFFFF, 0, 4, 0xFFFF, 1, 1, 0, 0, 32, 32, 8, 255, 0)
    + b"test"
    + struct.pack("<BBB5x", 24, 32, 32)
    + struct.pack("<IIIIIHHHHHHIBBBB", 77, 0, 0, 0, 0, 64, 48, 17, 13, 1, 1, 1, 0, 0, 24, 0)
)
HELLO = struct.pack("<BxHHH", 1, 11, 0, len(SETUP) // 4) + SETUP
REPLY = struct.pack("<BBHI24x", 1, 0, 1, 0)


@contextlib.asynccontextmanager
async def client(hello: bytes, answer: Callable[[bytes], bytes] = lambda request: b"") -> AsyncIterator[XClient]:
    """A client of a server that says ``hello`` and, to every request, ``answer``."""
    ours, theirs = socket.socketpair()

    async def serve() -> None:
        reader, writer = await asyncio.open_connection(sock=theirs)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readexactly(12)
            writer.write(hello)
            while head := await reader.readexactly(4):
                request = head + await reader.readexactly(4 * struct.unpack_from("<H", head, 2)[0] - 4)
                writer.write(answer(request))
        writer.close()

    serving = asyncio.ensure_future(serve())
    try:
        made = await XClient.connect(ours)
        try:
            yield made
        finally:
            await made.aclose()
    finally:
        serving.cancel()
        await asyncio.wait([serving])
        theirs.close()


async def test_honest_server() -> None:
    pixels = bytes(range(48))

    def answer(request: bytes) -> bytes:
        event = struct.pack("<B31x", 200)  # of something else: left out
        return event + struct.pack("<BBHII20x", 1, 24, 1, 12, 0) + pixels

    async with client(HELLO, answer) as made:
        assert (made.setup.root, made.setup.width, made.setup.height) == (77, 64, 48)
        assert await made.image(Rectangle(1, 2, 4, 3)) == pixels


@pytest.mark.parametrize(
    "hello",
    [
        b"",
        b"\0" * 8,
        struct.pack("<BxHHH", 1, 11, 0, 0xFFFF),
        HELLO[:30],
        HELLO[:8] + b"\xff" * len(SETUP),
        HELLO.replace(struct.pack("<BBB5x", 24, 32, 32), struct.pack("<BBB5x", 24, 16, 32)),
    ],
)
async def test_invalid_greetings_end_the_connection(hello: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_x11, "_REPLY_SECONDS", 1.0)
    with pytest.raises(SandboxDied, match="begin the episode again"):
        async with client(hello + b"\0" * 4 if hello else b"\0" * 7):
            pass


@pytest.mark.parametrize(
    "answer",
    [
        struct.pack("<BBHI24x", 1, 0, 1, 0xFFFFFFFF),  # 16 GiB
        struct.pack("<BBHI24x", 1, 0, 1, 13) + bytes(52),  # more than was asked for
        struct.pack("<BBHI24x", 1, 0, 1, 11) + bytes(44),  # less
        struct.pack("<BBHI24x", 1, 0, 9, 12) + bytes(48),  # to another request
        struct.pack("<BBHI24x", 35, 0, 1, 0xFFFFFF),  # an event of any length
    ],
)
async def test_invalid_answers_end_the_connection(answer: bytes) -> None:
    async with client(HELLO, lambda request: answer) as made:
        with pytest.raises(SandboxDied):
            await made.image(Rectangle(0, 0, 4, 3))
        with pytest.raises(SandboxDied):
            await made.synchronise()


async def test_refused_request_does_not_affect_others() -> None:
    async with client(HELLO, lambda request: struct.pack("<BBH28x", 0, 3, 1)) as made:
        with pytest.raises(SandboxError, match="refused"):
            await made.synchronise()


async def test_silent_server_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_x11, "_REPLY_SECONDS", 0.2)
    async with client(HELLO) as made:
        with pytest.raises(SandboxDied, match="does not answer"):
            await made.synchronise()


@settings(max_examples=25)
@given(st.binary(max_size=200))
def test_random_bytes_end_the_connection(noise: bytes) -> None:
    async def run() -> None:
        async with client(HELLO, lambda request: noise + bytes(-len(noise) % 32)) as made:
            with contextlib.suppress(SandboxError):
                async with asyncio.timeout(0.05):
                    await made.image(Rectangle(0, 0, 4, 3))

    with contextlib.suppress(TimeoutError):
        asyncio.run(run())


rectangles = st.builds(Rectangle, st.integers(-50, 50), st.integers(-50, 50), st.integers(1, 60), st.integers(1, 60))


@given(rectangles, rectangles)
def test_rectangles(a: Rectangle, b: Rectangle) -> None:
    both = a.united(b)
    for one in (a, b):
        assert both.united(one) == both
    inside = a.within(40, 30)
    if inside is not None:
        assert inside.x >= 0
        assert inside.y >= 0
        assert inside.x + inside.width <= 40
        assert inside.y + inside.height <= 30
        assert a.united(inside) == a
    else:
        assert a.x >= 40 or a.y >= 30 or a.x + a.width <= 0 or a.y + a.height <= 0
