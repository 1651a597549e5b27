"""A model endpoint that wants to use up whoever asks it: each kind of attack has a path of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import zlib
from collections.abc import AsyncIterator, Callable

__all__ = ["ATTACKS", "HostileEndpoint"]

_OK = b"HTTP/1.1 200 OK\r\nContent-Type: "
_STREAM = _OK + b"text/event-stream\r\nConnection: close\r\n\r\n"
_PIECE = 1 << 18


def _chunk(choice: dict[str, object], **more: object) -> bytes:
    whole = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": "m", "choices": [choice], **more}
    return b"data: " + json.dumps(whole).encode() + b"\n\n"


def _delta(**delta: object) -> bytes:
    return _chunk({"index": 0, "delta": delta, "finish_reason": None})


def _calls() -> AsyncIterator[bytes]:
    async def pieces() -> AsyncIterator[bytes]:
        number = 0
        while True:
            some = range(number, number + 200)
            number += 200
            function = {"name": "bash", "arguments": "{}"}
            yield b"".join(
                _delta(tool_calls=[{"index": n, "id": f"c{n}", "type": "function", "function": function}]) for n in some
            )

    return pieces()


def _endless(piece: bytes) -> Callable[[], AsyncIterator[bytes]]:
    async def pieces() -> AsyncIterator[bytes]:
        while True:
            yield piece

    return pieces


def bomb(size: int, wrapped: int) -> bytes:
    """``size`` zeros in gzip's (``wrapped`` 31) or zlib's (15) form, whose checksum nobody lives to see."""
    packer = zlib.compressobj(9, zlib.DEFLATED, wrapped)
    begun = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    again = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    return begun + again * (size >> 20)


def _packed(name: str, data: Callable[[], bytes]) -> Callable[[], AsyncIterator[bytes]]:
    async def pieces() -> AsyncIterator[bytes]:
        body = await asyncio.to_thread(data)
        yield f"Connection: close\r\nContent-Encoding: {name}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body

    return pieces


async def _chunked_bomb() -> AsyncIterator[bytes]:
    yield b"Transfer-Encoding: chunked\r\n\r\n"
    while True:
        yield b"1\r\n \r\n" * 20_000


_USAGE = {"prompt_tokens": 10**4000, "completion_tokens": 10**4000, "total_tokens": 1}
_MESSAGE = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hello"}}


def _answer(text: str) -> bytes:
    return f"Connection: close\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()


def _json(**body: object) -> bytes:
    most = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return _answer(json.dumps(body))
    finally:
        sys.set_int_max_str_digits(most)


_BEGUN = b'Connection: close\r\n\r\n{"choices":[{"index":0,"message":{"role":"assistant","content":"'
_TEXT = _OK + b"application/json\r\n"
_LIST = b'Connection: close\r\n\r\n{"choices":[{"index":0,"message":{"content":"x"},"logprobs":['

ATTACKS: dict[str, tuple[bytes, Callable[[], AsyncIterator[bytes]]]] = {
    "line": (_STREAM + b"data: ", _endless(b"x" * _PIECE)),
    "event": (_STREAM, _endless(b"data: xxxxxxxxxxxxxxxxxxxxxxxxxxxx\n" * 8192)),
    "comments": (_STREAM, _endless(b": xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx\n\n" * 8192)),
    "calls": (_STREAM, _calls),
    "text": (_STREAM, _endless(_delta(content="x" * 4000) * 60)),
    "reasoning": (_STREAM, _endless(_delta(reasoning_content="x" * 4000) * 60)),
    "arguments": (
        _STREAM,
        _endless(_delta(tool_calls=[{"index": 0, "id": "c", "function": {"name": "b", "arguments": "x" * 4000}}]) * 60),
    ),
    "empty": (_STREAM, _endless(_delta(content="") * 1000)),
    "headers": (b"HTTP/1.1 200 OK\r\n", _endless(b"X-A: xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx\r\n" * 4096)),
    "early": (b"", _endless(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" * 4096)),
    "body": (_TEXT + _BEGUN, _endless(b"x" * _PIECE)),
    "wide": (_TEXT + _LIST, _endless(b"[]," * (_PIECE // 3))),
    "chunked": (_TEXT, _chunked_bomb),
    "error": (b"HTTP/1.1 400 Bad\r\nConnection: close\r\n\r\n", _endless(b"x" * _PIECE)),
    "deep": (_TEXT, lambda: _once(_answer("[" * 100_000 + "]" * 100_000))),
    "gzip": (_TEXT, _packed("gzip", lambda: bomb(4 << 30, 31))),
    "deflate": (_TEXT, _packed("deflate", lambda: bomb(1 << 30, 15))),
    "gzip-gzip": (_TEXT, _packed("gzip, gzip", lambda: _twice(4 << 30))),
    "gzip-stream": (_OK + b"text/event-stream\r\n", _packed("gzip", lambda: bomb(4 << 30, 31))),
    "usage": (_TEXT, lambda: _once(_json(choices=[_MESSAGE], usage=_USAGE))),
}


def _twice(size: int) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    return packer.compress(bomb(size, 31)) + packer.flush()


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data


_ANSWER = b'{"choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "OK"}}]}'
SOUND = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s" % (
    len(_ANSWER),
    _ANSWER,
)


class HostileEndpoint:
    """Listens on loopback. ``url(attack)`` is the base URL of an endpoint that attacks so; the first ``sound`` requests
    get a good answer. ``sent`` counts bytes."""

    def __init__(self, sound: int = 0) -> None:
        self._sound = sound
        self.sent = 0
        self.seen: list[bytes] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> HostileEndpoint:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def url(self, attack: str) -> str:
        return f"http://127.0.0.1:{self.port}/{attack}/v1"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            self.seen.append(head)
            if len(self.seen) <= self._sound:
                writer.write(SOUND)
                await reader.read()
                return
            begin, pieces = ATTACKS[head.split(b"/", 2)[1].decode()]
            writer.write(begin)
            async for piece in pieces():
                writer.write(piece)
                self.sent += len(piece)
                await writer.drain()
                await asyncio.sleep(0)
            await reader.read()
        except (OSError, EOFError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            with contextlib.suppress(OSError):
                writer.transport.abort()
