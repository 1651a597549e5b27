"""The server that carries out the tool calls of agents in one shared OpenClaw, each in the sandbox of its own task.

Invariant: a request names an agent, an agent has one sandbox, and only that sandbox is touched. Requests are untrusted,
since models decide what OpenClaw sends: paths and commands are passed to the sandbox unchanged and resolved there.

One connection carries one request: a line of JSON, followed by ``size`` bytes. The response is a line of JSON, followed
by bytes. For commands, the output is streamed (``run``), and the exit code is requested afterwards (``code``).
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from clawgym.agents.openclaw._files import FILES, LARGEST, Answer
from clawgym.errors import ClawGymError, InfraError, SandboxDied, SandboxError
from clawgym.sandbox.protocol import ExecResult, Sandbox

__all__ = ["AgentTools", "OpenClawToolServer"]

_log = logging.getLogger("clawgym.agents")
_LINE = 1 << 20
_PORT = 9000
"""Port in the task's sandbox on which this server receives the output of its commands."""
_UNTHROTTLED = 4 * 2**20
"""Bytes of one command's output that are relayed at full speed; the rest is slowed down: agents share a process."""
_LAST_OUTPUT_SECONDS, _FIRST_OUTPUT_SECONDS = 1.0, 5.0
"""Seconds to wait for the last output of a finished command whose background processes keep the pipe open, and for the
first output of a finished command, before it counts as one without output."""

# $1 port, $2 ticket, $3 command. The command writes to a pipe as usual, and `cat` sends its output to the port.
_WRAPPER = """exec > >(exec 3<>"/dev/tcp/127.0.0.1/$1" && printf '%s\\n' "$2" >&3 && exec cat >&3) 2>&1
exec "${SHELL:-sh}" -c "$3"
"""


@dataclass(eq=False)
class _Command:
    argv: list[str]
    env: Mapping[str, str]
    output: asyncio.Future[asyncio.StreamReader]
    code: asyncio.Future[int]


@dataclass(eq=False)
class AgentTools:
    """The tools of one agent, which work in ``sandbox``. ``failed`` gets an exception when they stop working."""

    sandbox: Sandbox
    failed: asyncio.Future[None]
    started: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once OpenClaw has started to process the agent's user message."""
    commands: dict[str, _Command] = field(default_factory=dict)
    """Commands that have been announced, by ticket."""
    listening: asyncio.Server | None = None
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    active: set[asyncio.Task[None]] = field(default_factory=set)
    leftovers: set[asyncio.Task[None]] = field(default_factory=set)
    """Tasks that read the output of background processes of ended commands."""

    async def stop(self) -> None:
        """End the tool calls under way; background processes in the sandbox keep running. Idempotent."""
        if self.listening is not None:
            self.listening.close()
        await _end(self.active)
        self.failed.cancel()

    async def aclose(self) -> None:
        """Stop and close all connections. The caller closes the sandbox. Idempotent."""
        await self.stop()
        await _end(self.leftovers)


async def _end(tasks: set[asyncio.Task[None]]) -> None:
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


class OpenClawToolServer:
    """Serves one OpenClaw process. Its requests must carry ``key``."""

    def __init__(self) -> None:
        self.key = secrets.token_urlsafe(24)
        self._agents: dict[str, AgentTools] = {}
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    async def start(self, sock: socket.socket) -> None:
        """Listen on ``sock``, a socket in OpenClaw's sandbox."""
        self._server = await asyncio.start_server(self._connected, sock=sock, limit=_LINE)

    def add(self, agent: str, sandbox: Sandbox) -> AgentTools:
        """Let the tools of ``agent`` work in ``sandbox``."""
        agent_tools = self._agents[agent] = AgentTools(sandbox, asyncio.get_running_loop().create_future())
        return agent_tools

    async def remove(self, agent: str) -> None:
        """Stop the tools of ``agent``. Idempotent."""
        if (agent_tools := self._agents.pop(agent, None)) is not None:
            await agent_tools.stop()

    async def aclose(self) -> None:
        """Stop listening and stop the tools of all agents. Idempotent."""
        if self._server is not None:
            self._server.close()
        await _end(self._open)
        for agent in list(self._agents):
            await self.remove(agent)

    # -- requests

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            await self._answer(reader, writer)
        except (OSError, ValueError, KeyError, TypeError, RecursionError, EOFError) as error:
            _log.debug("malformed request of an OpenClaw tool: %r", error)
        except asyncio.CancelledError:
            pass  # by _end(): asyncio's server would log it
        finally:
            self._open.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = json.loads(await reader.readline())
        if head["op"] in ("run", "code"):
            await getattr(self, f"_{head['op']}")(str(head["ticket"]), reader, writer)
            return
        if not secrets.compare_digest(str(head["key"]), self.key):
            return
        if head["size"] > LARGEST:
            answer, data = {"error": f"the file is larger than {LARGEST >> 20} MiB"}, b""
        else:
            body = await reader.readexactly(head["size"])
            answer, data = await self._do(head, body)
        writer.write(json.dumps(answer).encode() + b"\n" + data)
        await writer.drain()

    async def _do(self, head: dict[str, Any], body: bytes) -> Answer:
        agent_tools = self._agents.get(str(head["agent"]))
        if agent_tools is None:
            return {"error": "the sandbox is gone"}, b""
        try:
            if head["op"] == "begin":
                agent_tools.started.set()
                return {}, b""
            if head["op"] == "exec":
                return await _exec(agent_tools, head)
            return await FILES[head["op"]](agent_tools.sandbox, head, body)
        except (SandboxDied, InfraError) as error:
            self._fail(agent_tools, error)
            return {"error": "the sandbox is gone"}, b""
        except SandboxError as error:
            return {"error": str(error)}, b""

    def _fail(self, agent_tools: AgentTools, error: ClawGymError) -> None:
        if not agent_tools.failed.done():
            agent_tools.failed.set_exception(error)
            agent_tools.failed.exception()  # mark as retrieved: nobody may be waiting for it

    # -- commands

    async def _run(self, ticket: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Run the command that :func:`_exec` registered and stream its output to ``writer``.

        Ends when the other side closes the connection.
        """
        agent_tools = next((h for h in self._agents.values() if ticket in h.commands), None)
        if agent_tools is None:
            return
        command = agent_tools.commands[ticket]
        work = asyncio.create_task(self._execute(agent_tools, command, writer))
        agent_tools.active.add(work)
        gone = asyncio.create_task(reader.read(1))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
            agent_tools.active.discard(work)
            if not command.code.done():
                command.code.set_result(137)

    async def _execute(self, agent_tools: AgentTools, command: _Command, writer: asyncio.StreamWriter) -> None:
        sandbox = agent_tools.sandbox
        seconds = sandbox.spec.limits.agent_seconds
        running = asyncio.create_task(sandbox.exec(command.argv, env=command.env, timeout=seconds, max_output=4096))
        try:
            await asyncio.wait((running, command.output), return_when=asyncio.FIRST_COMPLETED)
            if not command.output.done():  # the command may end before its output arrives
                await asyncio.wait((command.output,), timeout=_FIRST_OUTPUT_SECONDS)
            if command.output.done():
                await _relay(command.output.result(), writer, running)
            done = await running
            if not command.output.done():  # the wrapper failed: its output says why
                writer.write(done.output)
                await writer.drain()
            command.code.set_result(done.exit_code)
        except (SandboxDied, InfraError) as error:
            self._fail(agent_tools, error)
        except SandboxError as error:
            writer.write(str(error).encode())
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _code(self, ticket: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for agent_tools in self._agents.values():
            if ticket in agent_tools.commands:
                code = await agent_tools.commands[ticket].code
                del agent_tools.commands[ticket]
                writer.write(b"%d\n" % code)
                return


async def _relay(source: asyncio.StreamReader, writer: asyncio.StreamWriter, running: asyncio.Task[ExecResult]) -> None:
    """Copy output until it ends, or until shortly after the command has ended if background processes keep it open."""
    copied, clock = 0, asyncio.get_running_loop().time
    until: float | None = None
    while until is None or clock() < until:
        reading = asyncio.ensure_future(source.read(1 << 16))
        try:
            if until is None:
                await asyncio.wait((reading, running), return_when=asyncio.FIRST_COMPLETED)
                until = clock() + _LAST_OUTPUT_SECONDS if running.done() else None
            if until is not None:
                await asyncio.wait((reading,), timeout=until - clock())
            data = reading.result() if reading.done() else None
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        if data == b"":
            return
        if data:
            writer.write(data)
            await writer.drain()
            copied += len(data)
        if copied > _UNTHROTTLED:
            await asyncio.sleep(0.02)


async def _discard(source: asyncio.StreamReader) -> None:
    """Read and drop the output of background processes, which a closed pipe would kill."""
    while True:
        if not await source.read(1 << 16):
            return
        await asyncio.sleep(0.02)


async def _listen(agent_tools: AgentTools) -> None:
    """Listen on the port in the task's sandbox to which commands send their output."""

    async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            ticket = (await reader.readline()).strip().decode("ascii", "replace")
            command = agent_tools.commands.get(ticket)
            if command is None or command.output.done():
                return
            command.output.set_result(reader)
            await asyncio.shield(command.code)
            await _discard(reader)
        except (OSError, ValueError):
            pass
        finally:
            writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        agent_tools.leftovers.add(task)
        try:
            await receive(reader, writer)
        except asyncio.CancelledError:
            pass  # by _end(): asyncio's server would log it
        finally:
            agent_tools.leftovers.discard(task)

    async with agent_tools.starting:
        if agent_tools.listening is None:
            agent_tools.listening = await asyncio.start_server(connected, sock=await agent_tools.sandbox.listen(_PORT))


async def _exec(agent_tools: AgentTools, head: dict[str, Any]) -> Answer:
    await _listen(agent_tools)
    loop, ticket = asyncio.get_running_loop(), secrets.token_hex(16)
    argv = ["bash", "--noprofile", "--norc", "-c", _WRAPPER, "tool", str(_PORT), ticket, head["command"]]
    env = {str(name): str(value) for name, value in head["env"].items()}
    agent_tools.commands[ticket] = _Command(argv, env, loop.create_future(), loop.create_future())
    return {"ticket": ticket}, b""
