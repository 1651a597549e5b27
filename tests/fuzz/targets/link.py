"""The frames that process 1 of a sandbox sends, through the host's end of the link."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

from clawgym.errors import SandboxDied, SandboxError
from clawgym.sandbox.link import GuestLink
from clawgym.sandbox.protocol import SandboxSpec

from ..source import Source, run

READS = ("sandbox.link",)

_REFUSED = {"cause": "pids", "error": "no"}


class _Stream:
    """A stream that says what it is told to once somebody listens, and swallows what it is sent."""

    def __init__(self) -> None:
        self.closed = False

    def start(self, received: Any, ended: Any) -> None:
        self.received, self.ended = received, ended

    def write(self, data: bytes) -> None: ...

    async def drain(self) -> None: ...

    def close(self) -> None:
        self.closed = True


def fuzz(data: bytes) -> None:
    run(_fuzz(Source(data)))


async def _fuzz(source: Source) -> None:
    async def died() -> str:
        return "died"

    stream = _Stream()
    link = GuestLink(stream, SandboxSpec(), died)  # type: ignore[arg-type]
    link.start()
    asked = [
        asyncio.ensure_future(link.exec(["true"], max_output=100)),
        asyncio.ensure_future(link.exec(["cat"], stdin=b"x", max_output=100)),
        asyncio.ensure_future(link.shell()),
    ]
    await asyncio.sleep(0)
    for piece in source.pieces(_frames(source)):
        if stream.closed:
            break
        stream.received(piece)
        await asyncio.sleep(0)
    stream.ended()
    for result in await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 5):
        if isinstance(result, SandboxDied | SandboxError):
            continue
        if isinstance(result, BaseException):
            raise result
        if hasattr(result, "output"):
            assert len(result.output) + len(result.stderr) <= 2 * (100 + 4096)
            assert 0 <= result.exit_code < 256
    await link.end()


def _frames(source: Source) -> bytes:
    if source.byte() == 255:
        return source.rest()
    frames = b""
    while source.left:
        op = source.pick(b"ODOLFDXWK\0")
        payload = source.bytes()
        if op == ord("D") and source.byte() < 200:
            payload = struct.pack(">IBQd", source.number(0, 2**32 - 1), source.byte(), 0, 0.5) + payload
        if op == ord("F") and source.byte() < 200:
            payload = source.json(_REFUSED)
        length = source.number(0, 2**31) if source.byte() == 255 else len(payload)
        frames += struct.pack(">IBI", length, op, source.pick((1, 2, 3, 4, 2**32 - 1))) + payload
    return frames
