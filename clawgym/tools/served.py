"""The MCP tool servers of a task (:class:`ServedTools`), which run in sandboxes.

Invariants: each server has a sandbox of its own, so that none reaches another's data. No sandbox made here outlives
:meth:`ServedTools.aclose`, even if opening or closing fails.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, TypeVar

from clawgym.errors import MissingDependency, TaskError
from clawgym.records import Dialogue, Limits, Observation, Task, ToolCall
from clawgym.sandbox.protocol import Backend, Sandbox
from clawgym.tools._arguments import BadCall, check_schema, checked
from clawgym.tools._sandboxes import sandbox_spec
from clawgym.tools.protocol import SUBMIT, SUBMIT_TOOL, CallRefused, ignore

__all__ = ["ServedTools"]

T = TypeVar("T")
_NAME = re.compile(r"[^A-Za-z0-9_-]")
_MAX_NAME = 64
_ANYTHING = '{"type": "object"}'


class ServedTools:
    """The tools of MCP servers; see :class:`~clawgym.tools.protocol.Tools`.

    A server that ends counts as caused by the agent. Later calls report that, and the episode continues. In a dialogue
    there is no ``submit``, and arguments reach the server as the agent wrote them.
    """

    def __init__(
        self,
        servers: Sequence[Any],
        sandboxes: Sequence[Sandbox],
        limits: Limits,
        dialogue: Dialogue | None = None,
    ) -> None:
        self.schemas: tuple[dict[str, Any], ...]
        self._servers = servers
        self._sandboxes = sandboxes
        self._limits = limits
        self._dialogue = dialogue
        self._parameters: dict[str, str] = {}
        self._where: dict[str, tuple[Any, str]] = {}
        self.of_user: _OfUser | None = None
        """The tools of the user of a dialogue."""

    @classmethod
    async def open(cls, task: Task, sandbox: Sandbox, backend: Backend) -> ServedTools:
        """Start the servers of ``task``, the first one in ``sandbox``, and list their tools.

        Raises the errors of :func:`clawgym.tools.open_tools`; then nothing is left running.
        """
        module = await asyncio.to_thread(_module)
        patience = task.limits.setup_seconds / 2
        sandboxes: list[Sandbox] = []
        servers: list[Any] = []

        async def start(spec: Any, home: Sandbox | None) -> Any:
            if home is None:
                home = await backend.create(sandbox_spec(task, spec))
                sandboxes.append(home)
            server = await module.McpServer.start(spec, home, patience)
            servers.append(server)
            return server

        homes = [sandbox, *(None for _ in task.tools[1:])]
        tools = cls(servers, sandboxes, task.limits, task.dialogue)
        try:
            in_order = await _together([start(s, home) for s, home in zip(task.tools, homes, strict=True)])
            tools._offer(in_order, task.id)
        except BaseException:
            await tools.aclose()
            raise
        return tools

    def _offer(self, servers: Sequence[Any], task_id: str) -> None:
        schemas: list[dict[str, Any]] = []
        for server in servers:
            for tool in server.tools:
                where = f"task {task_id}: tool {tool.name[:200]!r} of server {server.spec.name!r}"
                name = _NAME.sub("_", tool.name)[:_MAX_NAME]
                if not name or name in self._where or name == SUBMIT:
                    other = f"of {self._where[name][0].spec.name!r}" if name in self._where else "of every task"
                    raise TaskError(f"{where}: is called like a tool {other}: rename it, or leave the server out")
                try:
                    schema = check_schema(tool.input_schema)
                except ValueError as error:
                    raise TaskError(f"{where}: its inputSchema {error}: correct the server") from error
                self._parameters[name] = schema if self._dialogue is None else _ANYTHING
                self._where[name] = server, tool.name
                about = {"name": name, "description": tool.description or "", "parameters": tool.input_schema}
                schemas.append({"type": "function", "function": about})
        if self._dialogue is not None:
            private = self._dialogue.private
            own = [schema for schema in schemas if private and schema["function"]["name"].startswith(private)]
            self.schemas = tuple(schema for schema in schemas if schema not in own)
            if own:
                self.of_user = _OfUser(self, private, own)
            return
        self._parameters[SUBMIT] = check_schema(SUBMIT_TOOL["function"]["parameters"])
        self.schemas = (*schemas, SUBMIT_TOOL)

    async def call_all(
        self,
        calls: Sequence[ToolCall],
        *,
        timeout: float | None = None,
        on_observation: Callable[[Observation], None] = ignore,
    ) -> list[Observation]:
        """See :class:`~clawgym.tools.protocol.Tools`."""
        return await self._call_all(calls, timeout, on_observation, self.of_user.private if self.of_user else "")

    async def _call_all(
        self,
        calls: Sequence[ToolCall],
        timeout: float | None,
        on_observation: Callable[[Observation], None],
        closed: str = "",
    ) -> list[Observation]:
        """``closed``: the beginning of names that this caller may not call."""
        observations: list[Observation | None] = [None] * len(calls)
        lanes: dict[int, list[tuple[int, ToolCall]]] = {}
        for index, call in enumerate(calls):
            server, _ = self._where.get(call.name, (None, ""))
            lanes.setdefault(id(server), []).append((index, call))

        async def along(lane: Sequence[tuple[int, ToolCall]]) -> None:
            for index, call in lane:
                if closed and call.name.startswith(closed):
                    observation: Observation = CallRefused(f"[error: there is no tool {call.name!r}]", call.id)
                else:
                    observation = await self._one(call, timeout)
                observations[index] = observation
                on_observation(observation)

        await _together([along(lane) for lane in lanes.values()])
        return [observation for observation in observations if observation is not None]

    async def _one(self, call: ToolCall, timeout: float | None) -> Observation:
        try:
            arguments = checked(call, self._parameters)
        except BadCall as error:
            return CallRefused(f"[error: {error}]", call.id)
        if call.name == SUBMIT:
            return Observation("submitted", call.id)
        server, name = self._where[call.name]
        seconds = self._limits.command_seconds if timeout is None else timeout
        return Observation(
            await server.call(name, arguments, timeout=seconds, limit=self._limits.output_bytes), call.id
        )

    async def aclose(self) -> None:
        """Stop the servers, then close the sandboxes made for them. Idempotent."""
        try:
            await asyncio.gather(*(server.aclose() for server in self._servers))
        finally:
            await asyncio.gather(*(sandbox.close() for sandbox in self._sandboxes))


class _OfUser:
    """The tools of a dialogue's user, called without the beginning of their names."""

    def __init__(self, tools: ServedTools, private: str, schemas: Sequence[Mapping[str, Any]]) -> None:
        self._tools, self.private = tools, private
        functions = [schema["function"] for schema in schemas]
        named = [{**function, "name": function["name"].removeprefix(private)} for function in functions]
        self.schemas = tuple({"type": "function", "function": function} for function in named)

    async def call_all(
        self,
        calls: Sequence[ToolCall],
        *,
        timeout: float | None = None,
        on_observation: Callable[[Observation], None] = ignore,
    ) -> list[Observation]:
        """See :class:`~clawgym.tools.protocol.Tools`."""
        own = [replace(call, name=self.private + call.name) for call in calls]
        return await self._tools._call_all(own, timeout, on_observation)

    async def aclose(self) -> None: ...


def _module() -> Any:
    """Import the module that needs the MCP SDK, which is slow. Raises :class:`MissingDependency`."""
    try:
        return import_module("clawgym.tools._server")
    except ImportError as error:
        raise MissingDependency("tool servers need the MCP SDK: pip install 'clawgym[tools]'") from error


async def _together(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all concurrently and return the results in order. If one fails, the others are cancelled."""
    if len(works) == 1:
        return [await works[0]]
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
