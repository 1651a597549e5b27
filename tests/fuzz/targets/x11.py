"""What an X server answers that nobody trusts."""

from __future__ import annotations

import asyncio
import struct
from unittest.mock import patch

from clawgym.desktop import _x11
from clawgym.desktop._x11 import Rectangle, XClient, _setup
from clawgym.errors import SandboxDied, SandboxError

from ..source import Source, run

READS = ("desktop._x11",)

_SETUP = (
    struct.pack("<IIIIHHBBBBBBBBI", 1, 0x400000, 0x1FFFFF, 0, 4, 0xFFFF, 1, 1, 0, 0, 32, 32, 8, 12, 0)
    + b"test"
    + struct.pack("<BBB5x", 24, 32, 32)
    + struct.pack("<IIIIIHHHHHHIBBBB", 77, 0, 0, 0, 0, 64, 48, 17, 13, 1, 1, 1, 0, 0, 24, 0)
)


class _Writer:
    """Answers each request as the input says."""

    def __init__(self, source: Source, reader: asyncio.StreamReader) -> None:
        self._source, self._reader, self._sequence = source, reader, 0

    def write(self, request: bytes) -> None:
        source = self._source
        self._sequence += 1
        if source.byte() > 230:
            self._reader.feed_data(source.bytes())
        if source.byte() > 240:
            self._reader.feed_eof()
            return
        extra = source.pick((0, 12, 40, 4096, 3, 2**30))
        sequence = self._sequence if source.byte() < 230 else source.byte()
        kind = source.pick((1, 0, 1, 35, 91, 0x81))
        head = struct.pack("<BBHI24s", kind, source.pick((0, 8, 1, 32)), sequence, extra, source.bytes(24))
        self._reader.feed_data(head + bytes(4 * extra if extra < 5000 else 0))

    def close(self) -> None: ...


def fuzz(data: bytes) -> None:
    source = Source(data)
    setup = bytearray(_SETUP)
    for _ in range(source.number(0, 4)):
        setup[source.number(0, len(setup) - 1)] = source.byte()
    with patch.object(_x11, "_REPLY_SECONDS", 0.01):
        run(_fuzz(source, bytes(setup[: -source.byte()] if source.byte() > 230 else setup)))


async def _fuzz(source: Source, setup: bytes) -> None:
    reader = asyncio.StreamReader()
    client = XClient(reader, _Writer(source, reader))  # type: ignore[arg-type]
    try:
        client.setup = _setup(setup)
    except _x11._WRONG:  # what connect() takes for a lie
        return
    client._task = asyncio.ensure_future(client._listen())
    heard: list[bytes] = []
    client.on(91, heard.append)
    try:
        async with asyncio.timeout(5):
            for _ in range(6):
                match source.number(0, 6):
                    case 0:
                        await client.extension("DAMAGE")
                    case 1:
                        await client.atom("WM_NAME")
                    case 2:
                        await client.pointer()
                    case 3:
                        assert len(await client.image(Rectangle(0, 0, 4, 3))) == 48
                    case 4:
                        assert len(await client.property(1, 2, 160)) <= 160
                    case 5:
                        await client.keys()
                    case 6:
                        await client.synchronise()
    except (SandboxDied, SandboxError):
        pass
    finally:
        await client.aclose()
