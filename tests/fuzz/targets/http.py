"""HTTP answers of a program in a sandbox."""

from __future__ import annotations

import socket

from clawgym.agents.blackbox.http import request
from clawgym.agents.blackbox.protocol import ClawStopped

from ..source import Source, run

READS = ("agents.blackbox.http",)

_LINES = (
    *(b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 100 Continue\r\n\r\n", b"Content-Length: 5\r\n", b"Content-Length: 6\r\n", b"\r\n"),
    *(b"Transfer-Encoding: chunked\r\n", b"5\r\nhello\r\n", b"0\r\n\r\n", b"hello", b"HTTP/1.0 204 x\r\n", b"X: \x00\r\n"),
    *(b" folded\r\n", b"Transfer-Encoding: gzip\r\n", b"ffffffffffffffff\r\n", b"Content-Length: -1\r\n", b"HTTP/1.1 101 x\r\n"),
    *(b"Upgrade: x\r\n", b"Connection: upgrade\r\n", b"Content-Length: 9" + b"9" * 5000 + b"\r\n"),
)  # fmt: skip


_MOST = 64 << 10
"""Bytes of an answer: less than a socket holds before anybody reads."""


class _Box:
    def __init__(self, said: bytes) -> None:
        self._said = said

    async def connect(self, port: int) -> socket.socket:
        ours, theirs = socket.socketpair()
        theirs.send(self._said)
        theirs.shutdown(socket.SHUT_WR)
        self._theirs = theirs
        return ours


def fuzz(data: bytes) -> None:
    source = Source(data)
    said = b""
    while len(said) < _MOST and source.left > 1 and source.byte() < 250:
        said += source.pick(_LINES)
    box = _Box(said + source.rest())
    try:
        status, body = run(request(box, 1, "POST", "/x", body={}))  # type: ignore[arg-type]
    except ClawStopped:
        return
    finally:
        box._theirs.close()
    assert 100 <= status < 1000
    assert len(body) <= len(box._said)
