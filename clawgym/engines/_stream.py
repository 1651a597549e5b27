"""Streams of sampled ids from the thread that samples to the coroutines that read, one for each request."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from clawgym.engines.protocol import Tokens

__all__ = ["Piece", "Stream", "deliver"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Sampled ids of one request; the last piece has a finish reason or an error."""

    ids: list[int]
    logprobs: list[float]
    version: int | None
    cached: int
    finish_reason: str | None = None
    error: Exception | None = None


class Stream:
    """Read by the event loop that made it. Pieces that arrive between two reads are joined."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._pieces: list[Piece] = []
        self._there = asyncio.Event()

    async def next(self) -> Tokens:
        """Wait for new ids and return all since the last call. Raises the error of the request, if it failed."""
        if not self._pieces:
            self._there.clear()
            await self._there.wait()
        pieces, self._pieces = self._pieces, []
        last = pieces[-1]
        ids = tuple(i for p in pieces for i in p.ids)
        if last.error is not None:
            if not ids:
                raise last.error
            self._pieces = [Piece([], [], last.version, last.cached, error=last.error)]
        return Tokens(
            ids,
            tuple(x for p in pieces for x in p.logprobs),
            last.version,
            last.finish_reason,
            last.cached if last.finish_reason else 0,
        )

    def put(self, piece: Piece) -> None:
        self._pieces.append(piece)
        self._there.set()


def deliver(pieces: Iterable[tuple[Stream, Piece]]) -> None:
    """Put each piece into its stream; called in the event loop of the streams."""
    for stream, piece in pieces:
        stream.put(piece)
