"""The tools of a task, served to the program of a session by the Model Context Protocol (MCP), streamable HTTP.

``POST /s/<session>/mcp`` takes one JSON-RPC message and answers it with one JSON body. Nothing is streamed, and the
server keeps no state of a client. It has ``initialize``, ``ping``, ``tools/list`` and ``tools/call``.

Invariants: every call that is run is recorded before it begins, in the order of execution, whoever in the sandbox sent
it. One call of a session runs at a time. The numbers of calls, of waiting calls and of recorded bytes are bounded.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from aiohttp import web

from clawgym.bounds import MOST_TOOL_CALLS, MOST_WAITING_CALLS, RECORDED_CALLS
from clawgym.errors import ClawGymError
from clawgym.gateway.sessions import Session
from clawgym.records import Observation, ToolCall
from clawgym.tools import SUBMIT, CallRefused, Tools

__all__ = ["ExecutedCall", "OfferedTools", "answer_message"]

_VERSIONS = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
_INVALID_REQUEST, _NO_METHOD, _INVALID_PARAMS, _INTERNAL = -32600, -32601, -32602, -32603


@dataclass(eq=False)
class ExecutedCall:
    """A call that a program sent."""

    call: ToolCall
    turns: int
    """Model calls that were stored when it came: a later one cannot have asked for it."""
    observation: Observation | None = None
    """None if the call was interrupted."""


class OfferedTools:
    """``tools`` for the program of one session, without ``submit``.

    Args:
        tools: the tools of the task; the caller closes them.
    """

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._bytes = 0
        self.executed: list[ExecutedCall] = []
        """All calls that were run, in order."""
        self.withheld: Collection[str] = ()
        """Names of tools that are not offered now."""
        self.accepting = True
        """Whether calls are run; otherwise they are refused."""
        self.failure: ClawGymError | None = None
        """Why the tools cannot be used any more: a sandbox ended, or the host failed."""

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        """The functions that are offered now."""
        functions = [schema["function"] for schema in self._tools.schemas]
        return [one for one in functions if one["name"] != SUBMIT and one["name"] not in self.withheld]

    async def call(self, name: str, arguments: Mapping[str, Any], turns: int) -> Observation:
        """Run a call and record it. ``turns``: the number of stored model calls.

        Raises:
            SandboxDied, InfraError: as :meth:`~clawgym.tools.protocol.Tools.call_all`; so do all later calls.
        """
        if self._waiting >= MOST_WAITING_CALLS:
            return CallRefused(f"[error: {self._waiting} calls are waiting: call again when one has been answered]")
        self._waiting += 1
        try:
            async with self._turn:
                return await self._run(name, arguments, turns)
        finally:
            self._waiting -= 1

    async def _run(self, name: str, arguments: Mapping[str, Any], turns: int) -> Observation:
        if self.failure is not None:
            raise self.failure
        if not self.accepting:
            return CallRefused("[error: no call is accepted before the next message of the user]")
        if all(one["name"] != name for one in self.schemas):
            return CallRefused(f"[error: there is no tool {name[:200]!r}]")
        if len(self.executed) >= MOST_TOOL_CALLS or self._bytes > RECORDED_CALLS:
            return CallRefused("[error: there were too many calls in this episode, or too large ones: finish now]")
        call = ToolCall(f"task_{len(self.executed) + 1}", name, arguments)
        made = ExecutedCall(call, turns)
        self.executed.append(made)
        self._bytes += len(orjson.dumps(arguments))
        try:
            (made.observation,) = await self._tools.call_all([call])
        except ClawGymError as error:
            self.failure = error
            raise
        self._bytes += len(made.observation.content)
        return made.observation


async def answer_message(body: Mapping[str, Any], tools: OfferedTools, session: Session) -> web.Response:
    """Answer one JSON-RPC message: a request with its result or error, a notification or response with nothing."""
    method, params = body.get("method"), body.get("params", {})
    if "id" not in body or (method is None and ("result" in body or "error" in body)):
        return web.Response(status=202)
    key = body["id"]
    if body.get("jsonrpc") != "2.0" or not isinstance(method, str) or not isinstance(key, str | int):
        return _error(None, _INVALID_REQUEST, "the body is not a JSON-RPC 2.0 request: correct it", status=400)
    if not isinstance(params, Mapping):
        return _error(key, _INVALID_PARAMS, "'params' is not an object: correct the request")
    match method:
        case "initialize":
            asked = params.get("protocolVersion")
            about = {"name": "clawgym", "version": "1"}
            version = asked if asked in _VERSIONS else _VERSIONS[-1]
            return _result(key, {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about})
        case "ping":
            return _result(key, {})
        case "tools/list":
            return _result(key, {"tools": [_described(one) for one in tools.schemas]})
        case "tools/call":
            name, arguments = params.get("name"), params.get("arguments")
            if not isinstance(name, str) or not isinstance(arguments, Mapping | None):
                return _error(key, _INVALID_PARAMS, "'name' must be a string and 'arguments' an object: correct them")
            try:
                seen = await tools.call(name, arguments or {}, session.turns)
            except ClawGymError:
                return _error(key, _INTERNAL, "the tools have ended")
            return _result(key, {"content": _content(seen), "isError": isinstance(seen, CallRefused)})
    return _error(key, _NO_METHOD, f"there is no method {method[:200]!r}: this server has tools only")


def _described(function: Mapping[str, Any]) -> dict[str, Any]:
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    return {"name": function["name"], "description": function.get("description") or "", "inputSchema": schema}


def _content(seen: Observation) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": seen.content}] if seen.content or not seen.image else []
    if parts and _is_other_json(seen.content):
        parts.insert(0, {"type": "text", "text": ""})
    if seen.image is not None:
        data = base64.b64encode(seen.image.data).decode()
        parts.append({"type": "image", "data": data, "mimeType": seen.image.media_type})
    return parts


def _is_other_json(text: str) -> bool:
    """Whether ``text`` is JSON and no object. Gemini CLI takes a first text that is JSON for structured content, and
    then refuses the result if it is no object."""
    try:
        return not isinstance(orjson.loads(text), dict)
    except ValueError:
        return False


def _result(key: str | int, result: Mapping[str, Any]) -> web.Response:
    body = orjson.dumps({"jsonrpc": "2.0", "id": key, "result": result}, default=str)
    return web.Response(body=body, content_type="application/json")


def _error(key: str | int | None, code: int, message: str, status: int = 200) -> web.Response:
    body = orjson.dumps({"jsonrpc": "2.0", "id": key, "error": {"code": code, "message": message}})
    return web.Response(body=body, status=status, content_type="application/json")
