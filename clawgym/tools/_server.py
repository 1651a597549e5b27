"""One running MCP tool server, and the session with it.

Invariant: the session runs in an asyncio task of its own, because it is opened, used and closed by different tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from typing import Any

import mcp_types as types
from mcp.client.session import ClientSession
from mcp.shared.exceptions import MCPError

from clawgym.errors import InfraError, SandboxError, SandboxUnavailable, TaskError
from clawgym.records import ToolServer
from clawgym.sandbox.program import Program
from clawgym.sandbox.protocol import Sandbox
from clawgym.tools._transport import MAX_LINE, Incoming, Outgoing, whole
from clawgym.tools.protocol import clipped

__all__ = ["MAX_TOOLS", "McpServer"]

MAX_TOOLS = 128
"""Most tools of one server."""
_GRACE = 2.0
"""Seconds for a server to exit after the end of its stdin."""


class McpServer:
    """The tool server ``spec``, running in ``sandbox``; see :meth:`start`. The caller closes it."""

    def __init__(self, spec: ToolServer, sandbox: Sandbox) -> None:
        self.spec = spec
        self.sandbox = sandbox
        self.tools: list[types.Tool] = []
        self._turn = asyncio.Lock()
        self._leave = asyncio.Event()
        self._program: Program | None = None
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, spec: ToolServer, sandbox: Sandbox, patience: float) -> McpServer:
        """Start the server and list its tools.

        Raises:
            InfraError: it did not answer within ``patience`` seconds, or does not speak MCP.
            TaskError: it has more than :data:`MAX_TOOLS` tools.
        """
        server = cls(spec, sandbox)
        try:
            async with asyncio.timeout(patience):
                await server._launch()
        except (SandboxUnavailable, TaskError):
            await server.aclose(grace=0)
            raise
        except SandboxError as error:
            await server.aclose(grace=0)
            raise InfraError(f"tool server {spec.name!r} cannot be started ({error}): look at its argv") from error
        except TimeoutError:
            await server.aclose(grace=0)
            raise InfraError(
                f"tool server {spec.name!r} did not answer within {patience:g} s{server._said}: "
                "give it longer (limits.setup_seconds), or lower --concurrency"
            ) from None
        except (MCPError, ValueError, RuntimeError) as error:
            why = server._incoming.why if server._incoming.ended.is_set() else error
            await server.aclose(grace=0.2, words=1.0)
            raise InfraError(
                f"tool server {spec.name!r} does not speak MCP on its stdin and stdout ({why}){server._said}: "
                "look at its argv"
            ) from error
        except BaseException:
            await server.aclose(grace=0)
            raise
        return server

    async def _launch(self) -> None:
        self._program = program = await Program.start(self.sandbox, self.spec.argv, env=self.spec.env, limit=MAX_LINE)
        self._incoming, self._outgoing = Incoming(program.reader), Outgoing(program.writer)
        opened: asyncio.Future[ClientSession] = asyncio.get_running_loop().create_future()
        self._task = asyncio.ensure_future(self._hold(opened))
        self._session = await opened
        await self._list()

    async def _hold(self, opened: asyncio.Future[ClientSession]) -> None:
        about = types.Implementation(name="clawgym", version="1")
        async with ClientSession(self._incoming, self._outgoing, client_info=about) as session:
            try:
                await session.initialize()
            except Exception as error:
                if not opened.done():
                    opened.set_exception(error)
                return
            if not opened.done():
                opened.set_result(session)
            await self._leave.wait()

    async def _list(self) -> None:
        cursor: str | None = None
        while True:
            params = types.PaginatedRequestParams(cursor=cursor) if cursor else None
            page = await self._session.send_request(types.ListToolsRequest(params=params), types.ListToolsResult)
            self.tools += page.tools
            if len(self.tools) > MAX_TOOLS:
                raise TaskError(f"tool server {self.spec.name!r} has over {MAX_TOOLS} tools: offer fewer")
            cursor = page.next_cursor
            if not cursor:
                return

    async def call(self, name: str, arguments: Mapping[str, Any], *, timeout: float, limit: int) -> str:
        """Call the tool ``name``. Calls of one server run one after another.

        Returns:
            Text for the model, at most ``limit`` bytes: the tool's answer, or an error message.

        Raises:
            SandboxDied: the sandbox ended.
        """
        async with self._turn:
            self._incoming.asked()
            request = types.CallToolRequest(
                params=types.CallToolRequestParams(name=name, arguments=whole(dict(arguments)))
            )
            try:
                async with asyncio.timeout(timeout + _GRACE):
                    result = await self._session.send_request(request, types.CallToolResult, timeout)
            except TimeoutError:
                return f"[error: {name} took over {timeout:g} seconds]"
            except MCPError as error:
                if error.error.code == types.REQUEST_TIMEOUT and not self._incoming.ended.is_set():
                    return f"[error: {name} took over {timeout:g} seconds]"
                if self._incoming.ended.is_set():
                    await self.sandbox.exec(["true"])  # raises SandboxDied if the sandbox has ended
                    return f"[error: the tools of {self.spec.name!r} are gone ({self._incoming.why}){self._said}]"
                return f"[error: {clipped(error.error.message.encode(), limit)}]"
            except (ValueError, RuntimeError):
                return f"[error: {name} answered with something that is no result]"
            text = clipped(_text(result).encode(), limit)
            return f"[error: {text}]" if result.is_error else text

    @property
    def _said(self) -> str:
        return self._program.stderr_note if self._program is not None else ""

    async def aclose(self, grace: float = _GRACE, words: float = 0.2) -> None:
        """End the server: close its stdin, wait ``grace`` seconds for its exit and ``words`` seconds for its stderr.

        A server that still runs ends with its sandbox. Idempotent.
        """
        task, self._task = self._task, None
        try:
            if task is not None:
                self._outgoing.end()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(grace):
                        await self._incoming.ended.wait()
        finally:
            self._leave.set()
            if task is not None:
                task.cancel()
            if self._program is not None:  # its stderr may say why it ended
                await self._program.aclose(words if grace else 0.0)
            if task is not None:
                await asyncio.wait([task])


def _text(result: types.CallToolResult) -> str:
    """The text of a result; other content is replaced by a note."""
    parts: list[str] = []
    for block in result.content:
        match block:
            case types.TextContent():
                parts.append(block.text)
            case types.EmbeddedResource(resource=types.TextResourceContents() as resource):
                parts.append(resource.text)
            case types.EmbeddedResource(resource=resource):
                parts.append(f"[resource {resource.uri}: not shown]")
            case types.ImageContent() | types.AudioContent():
                size = len(block.data) * 3 // 4
                parts.append(f"[{block.type}, {block.mime_type}, {size} bytes: not shown]")
            case types.ResourceLink():
                parts.append(f"[resource {block.uri}]")
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)
