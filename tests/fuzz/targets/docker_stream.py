"""What a Docker engine frames: a container's output, cut anyhow."""

from __future__ import annotations

from clawgym.sandbox.docker.engine import Frames

from ..source import Source

READS = ("sandbox.docker.engine",)


def fuzz(data: bytes) -> None:
    source = Source(data)
    framed = b""
    while source.left > 1:
        payload = source.bytes()
        length = source.number(0, 2**32 - 1) if source.byte() == 255 else len(payload)
        framed += bytes([source.pick((1, 2, 0, 3, 255)), 0, 0, 0]) + length.to_bytes(4, "big") + payload
    cut, whole = Frames(), Frames()
    heard = b"".join(chunk for piece in source.pieces(framed) for chunk in cut.feed(piece))
    assert heard == b"".join(whole.feed(framed))
    assert cut.errors == whole.errors
    assert len(cut.errors) <= 4096
