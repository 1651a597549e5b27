"""JSON-RPC lines over a socket into a sandbox, as the streams of the MCP SDK's client.

Invariant: data from a sandbox is hostile. The length of a line and the amount of unrequested data are bounded; beyond a
bound the connection ends. Invalid lines are skipped. No loop blocks the event loop.
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
"""Most bytes of one message."""
_UNASKED = 16 * 2**20
"""Most bytes received between two calls; each message counts for :data:`_MESSAGE` bytes more."""
_MESSAGE = 16 * 2**10


class Incoming:
    """Messages from a server (the SDK's ``ReadStream``)."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._left = _UNASKED
        self.ended = asyncio.Event()
        self.why = "it ended"

    def asked(self) -> None:
        """Reset the limit on received data: a call was made."""
        self._left = _UNASKED

    async def receive(self) -> SessionMessage:
        """Wait for the next message. Raises :class:`anyio.EndOfStream` at the end."""
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
    """Messages to a server (the SDK's ``WriteStream``)."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    async def send(self, item: SessionMessage, /) -> None:
        """Send a message. Raises :class:`anyio.BrokenResourceError` if the server has closed its stdin."""
        text = item.message.model_dump_json(by_alias=True, exclude_unset=True)
        try:
            self._writer.write(text.encode() + b"\n")
            await self._writer.drain()
        except OSError:
            raise anyio.BrokenResourceError from None

    def end(self) -> None:
        """Close the server's stdin."""
        if self._writer.can_write_eof() and not self._writer.is_closing():
            with contextlib.suppress(OSError):  # already closed
                self._writer.write_eof()

    async def aclose(self) -> None:
        """Do nothing: the owner closes the socket."""

    async def __aenter__(self) -> Outgoing:
        return self

    async def __aexit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        await self.aclose()


def _message(line: bytes) -> SessionMessage | None:
    """Parse one line; None if it is not a message."""
    try:
        value = read_json(line)
        if b"\\u" in line:
            value = whole(value)
        return SessionMessage(jsonrpc_message_adapter.validate_python(value, by_name=False))
    except (ValueError, RecursionError):
        return None


def whole(value: Any) -> Any:
    """``value`` with lone surrogates replaced: JSON can contain them, UTF-8 cannot."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {whole(key): whole(item) for key, item in value.items()}
    return [whole(item) for item in value] if isinstance(value, list) else value
