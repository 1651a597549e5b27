"""Lines of a tool server."""

from __future__ import annotations

import asyncio

import anyio

from clawgym.tools._server import _text
from clawgym.tools._transport import Incoming

from ..source import Source, run

READS = ("tools._transport", "tools._server")

_TOOLS = {
    "jsonrpc": "2.0",
    "id": 1,
    "result": {
        "tools": [
            {
                "name": "f",
                "description": "d",
                "inputSchema": {"type": "object", "properties": {"x": {"type": "string"}}},
            }
        ]
    },
}
_RESULT = {
    "jsonrpc": "2.0",
    "id": 2,
    "result": {
        "content": [
            {"type": "text", "text": "a"},
            {"type": "image", "data": "aGk=", "mimeType": "image/png"},
            {"type": "resource", "resource": {"uri": "file:///a", "text": "x"}},
            {"type": "resource_link", "uri": "file:///a", "name": "a"},
        ],
        "structuredContent": {"a": 1},
        "isError": False,
    },
}
_OTHERS = (
    {"jsonrpc": "2.0", "id": 3, "error": {"code": -32001, "message": "no", "data": [1]}},
    {"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": "x"}},
    {"jsonrpc": "2.0", "id": 4, "method": "sampling/createMessage", "params": {"messages": [], "maxTokens": 1}},
)  # fmt: skip


def fuzz(data: bytes) -> None:
    run(_fuzz(Source(data)))


async def _fuzz(source: Source) -> None:
    import mcp_types as types

    reader = asyncio.StreamReader(limit=1 << 16)
    lines = [source.json(source.pick((_RESULT, _TOOLS, *_OTHERS))) for _ in range(1 + source.number(0, 3))]
    reader.feed_data(b"\n".join(lines) + b"\n")
    reader.feed_eof()
    incoming = Incoming(reader)
    while True:
        try:
            message = (await asyncio.wait_for(incoming.receive(), 5)).message
        except anyio.EndOfStream:
            return
        if isinstance(message, types.JSONRPCResponse):
            for kind in (types.CallToolResult, types.ListToolsResult):
                try:
                    result = kind.model_validate(message.result, by_name=False)
                except ValueError:
                    continue
                if isinstance(result, types.CallToolResult):
                    _text(result).encode()
