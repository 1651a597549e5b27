"""A streamed response as a list of blocks (reasoning, text, calls), for dialects that number them."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from clawgym.bounds import read_json
from clawgym.engines.protocol import Delta
from clawgym.errors import EngineError

__all__ = ["Block", "Blocks", "BlockChange", "arguments_object"]


@dataclass
class Block:
    """One block. It ends when the next one begins."""

    kind: Literal["reasoning", "text", "call"]
    index: int
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The reasoning, the text, or the arguments of the call, so far."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class BlockChange:
    """A change of a block; ``piece`` is the text that is added."""

    what: Literal["begin", "add", "end"]
    block: Block
    piece: str = ""


class Blocks:
    """Builds blocks from deltas."""

    def __init__(self, *, reasoning: bool = True) -> None:
        """``reasoning``: whether reasoning is included."""
        self.all: list[Block] = []
        self._reasoning = reasoning
        self._open: Block | None = None
        self._calls: dict[int, Block] = {}

    async def take_all(self, deltas: AsyncIterator[Delta]) -> Delta:
        """Take a whole reply. Returns its last delta."""
        last = Delta()
        async for last in deltas:
            for _ in self.take(last):
                pass
        return last

    def take(self, delta: Delta) -> Iterator[BlockChange]:
        """Add ``delta`` and yield the changes."""
        if delta.reasoning and self._reasoning:
            yield from self._add("reasoning", delta.reasoning)
        if delta.text:
            yield from self._add("text", delta.text)
        for piece in delta.calls:
            if piece.index not in self._calls:
                call = Block("call", len(self.all), piece.id or f"call{uuid.uuid4().hex}", piece.name or "")
                self._calls[piece.index] = call
                yield from self._begin(call)
            elif self._open is not self._calls[piece.index]:
                raise EngineError("the engine mixed the deltas of two tool calls: see its log")
            if piece.arguments:
                yield self._more(self._calls[piece.index], piece.arguments)

    def end(self) -> Iterator[BlockChange]:
        """End the response and yield the changes."""
        if self._open is not None:
            yield BlockChange("end", self._open)
            self._open = None

    def _add(self, kind: Literal["reasoning", "text"], piece: str) -> Iterator[BlockChange]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin(Block(kind, len(self.all)))
        assert self._open is not None
        yield self._more(self._open, piece)

    def _begin(self, block: Block) -> Iterator[BlockChange]:
        yield from self.end()
        self._open = block
        self.all.append(block)
        yield BlockChange("begin", block)

    def _more(self, block: Block, piece: str) -> BlockChange:
        block.pieces.append(piece)
        return BlockChange("add", block, piece)


def arguments_object(arguments: str) -> dict[str, Any]:
    """Return the arguments as an object. Text that is not a JSON object becomes ``{"arguments": text}``."""
    try:
        value = read_json((arguments or "{}").encode())
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}
