"""JSON-RPC lines over a socket into a sandbox, as the streams that the MCP SDK's client wants.

Invariant: what comes from a sandbox is hostile. A line, and all that comes without being asked for, is bounded, and
past a bound the connection is over; a line that is no message is left out; nothing here waits without giving way to
others.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import anyio
from mcp.shared.message import SessionMessage
from mcp_types import jsonrpc_message_adapter

from clawgym.bounds import read_json

__all__ = ["MAX_LINE", "Incoming", "Outgoing", "whole"]

MAX_LINE = 4 * 2**20
"""Bytes of one message."""
_UNASKED = 16 * 2**20
"""Bytes between two calls; each message counts for :data:`_MESSAGE` more than it has."""
_MESSAGE = 16 * 2**10


class Incoming:
    """What a server says (the SDK's ``ReadStream``)."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._left = _UNASKED
        self.ended = asyncio.Event()
        self.why = "it ended"

    def asked(self) -> None:
        """A call is made: its answer may come."""
        self._left = _UNASKED

    async def receive(self) -> SessionMessage:
        """The next message. Raises :class:`anyio.EndOfStream`."""
        while True:
            try:
                line = await self._reader.readline()
            except ValueError:
                raise self._over(f"it sent a message of over {MAX_LINE >> 20} MiB") from None
            except OSError:
                line = b""
            if not line:
                raise self._over("it ended")
            self._left -= len(line) + _MESSAGE
            if self._left < 0:
                raise self._over("it sent too much that nobody asked for")
            if (message := _message(line)) is not None:
                return message
            await asyncio.sleep(0)

    def _over(self, why: str) -> anyio.EndOfStream:
        if not self.ended.is_set():
            self.why = why
            self.ended.set()
        return anyio.EndOfStream()

    async def aclose(self) -> None:
        self._over("it was closed")

    def __aiter__(self) -> Incoming:
        return self

    async def __anext__(self) -> SessionMessage:
        await asyncio.sleep(0)
        try:
            return await self.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None

    async def __aenter__(self) -> Incoming:
        return self

    async def __aexit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        await self.aclose()


class Outgoing:
    """What a server is told (the SDK's ``WriteStream``)."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    async def send(self, item: SessionMessage, /) -> None:
        """Raises :class:`anyio.BrokenResourceError` once nobody reads any more."""
        text = item.message.model_dump_json(by_alias=True, exclude_unset=True)
        try:
            self._writer.write(text.encode() + b"\n")
            await self._writer.drain()
        except OSError:
            raise anyio.BrokenResourceError from None

    def end(self) -> None:
        """The server reads to its end."""
        if self._writer.can_write_eof() and not self._writer.is_closing():
            with contextlib.suppress(OSError):  # it has gone before
                self._writer.write_eof()

    async def aclose(self) -> None:
        """The socket is closed by its owner."""

    async def __aenter__(self) -> Outgoing:
        return self

    async def __aexit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        await self.aclose()


def _message(line: bytes) -> SessionMessage | None:
    """The message in one line; ``None`` where it is none."""
    try:
        value = read_json(line)
        if b"\\u" in line:
            value = whole(value)
        return SessionMessage(jsonrpc_message_adapter.validate_python(value, by_name=False))
    except (ValueError, RecursionError):
        return None


def whole(value: Any) -> Any:
    """``value`` without lone surrogates, which a server can write and no text can hold."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {whole(key): whole(item) for key, item in value.items()}
    return [whole(item) for item in value] if isinstance(value, list) else value
