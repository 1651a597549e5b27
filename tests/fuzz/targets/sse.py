"""Server-sent events of an endpoint: the same ones, however they are cut."""

from __future__ import annotations

from clawgym.engines._sse import EventReader

from ..source import Source

READS = ("engines._sse",)


def fuzz(data: bytes) -> None:
    source = Source(data)
    stream = b""
    while source.left > 1 and source.byte() < 250:
        stream += source.pick((b"data: ", b"\n", b"\r", b"\r\n", b":", b"event: x", b"\xef\xbb\xbf", b"data", b"\n\n"))
        stream += source.bytes(20)
    stream += source.rest()
    whole = EventReader().feed(stream)
    cut, apart = EventReader(), EventReader()
    assert [event for piece in Source(data).pieces(stream) for event in cut.feed(piece)] == whole
    assert [event for n in range(len(stream)) for event in apart.feed(stream[n : n + 1])] == whole
