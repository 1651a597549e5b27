"""What the tools of agents in one shared OpenClaw do, each in the box of its own task.

Invariant: a request names an agent, an agent has one box, and nothing but that box is touched. The other side is
OpenClaw, which speaks for models: paths and commands are handed to the box as they are, and mean what they mean there.

One connection is one request: a line of JSON, with ``size`` bytes after it; the answer is a line of JSON, and bytes.
A command's output is streamed instead (``run``), and its exit code asked for afterwards (``code``).
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

__all__ = ["Hands", "OpenClawToolServer"]

_log = logging.getLogger("clawgym.agents")
_LINE = 1 << 20
_PORT = 9000
"""In a task's box: where its commands' output comes to us."""
_FAST = 4 * 2**20
"""Bytes of one command's output that go as fast as they come; a flood is slowed down, since all share one process."""
_LAST, _LATE = 1.0, 5.0
"""Seconds that a finished command's last output may take, where what it left running holds the pipe; and its
first, before it is taken to have none."""

# $1 port, $2 ticket, $3 command. Its output is a pipe, as ever, and a program of ours carries it to us.
_IN_BOX = """exec > >(exec 3<>"/dev/tcp/127.0.0.1/$1" && printf '%s\\n' "$2" >&3 && exec cat >&3) 2>&1
exec "${SHELL:-sh}" -c "$3"
"""


@dataclass(eq=False)
class _Command:
    argv: list[str]
    env: Mapping[str, str]
    output: asyncio.Future[asyncio.StreamReader]
    code: asyncio.Future[int]


@dataclass(eq=False)
class Hands:
    """What an agent's tools reach: its box. ``failed`` is set once that cannot work any more."""

    box: Sandbox
    failed: asyncio.Future[None]
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once OpenClaw has begun with what the agent was asked."""
    commands: dict[str, _Command] = field(default_factory=dict)
    listening: asyncio.Server | None = None
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    at_work: set[asyncio.Task[None]] = field(default_factory=set)
    left: set[asyncio.Task[None]] = field(default_factory=set)
    """Of what ended commands left running."""

    async def hang_up(self) -> None:
        """End what the agent's tools still do; what they started goes on. Idempotent."""
        if self.listening is not None:
            self.listening.close()
        await _end(self.at_work)
        self.failed.cancel()

    async def aclose(self) -> None:
        """Let go of the box. Idempotent."""
        await self.hang_up()
        await _end(self.left)


async def _end(tasks: set[asyncio.Task[None]]) -> None:
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


class OpenClawToolServer:
    """Serves one OpenClaw process. ``key`` is what its requests carry."""

    def __init__(self) -> None:
        self.key = secrets.token_urlsafe(24)
        self._hands: dict[str, Hands] = {}
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    async def start(self, sock: socket.socket) -> None:
        """Listen on ``sock``, which is in OpenClaw's box."""
        self._server = await asyncio.start_server(self._connected, sock=sock, limit=_LINE)

    def add(self, agent: str, box: Sandbox) -> Hands:
        """From now on ``agent``'s tools work in ``box``."""
        hands = self._hands[agent] = Hands(box, asyncio.get_running_loop().create_future())
        return hands

    async def remove(self, agent: str) -> None:
        """``agent``'s tools work no more. Idempotent."""
        if (hands := self._hands.pop(agent, None)) is not None:
            await hands.hang_up()

    async def aclose(self) -> None:
        """Idempotent."""
        if self._server is not None:
            self._server.close()
        await _end(self._open)
        for agent in list(self._hands):
            await self.remove(agent)

    # -- requests

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            await self._answer(reader, writer)
        except (OSError, ValueError, KeyError, TypeError, RecursionError, EOFError) as error:
            _log.debug("a request of OpenClaw's tools was broken: %r", error)
        except asyncio.CancelledError:
            pass  # by _end(): asyncio's server would complain
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
        hands = self._hands.get(str(head["agent"]))
        if hands is None:
            return {"error": "the sandbox is gone"}, b""
        try:
            if head["op"] == "begin":
                hands.begun.set()
                return {}, b""
            if head["op"] == "exec":
                return await _exec(hands, head)
            return await FILES[head["op"]](hands.box, head, body)
        except (SandboxDied, InfraError) as error:
            self._fail(hands, error)
            return {"error": "the sandbox is gone"}, b""
        except SandboxError as error:
            return {"error": str(error)}, b""

    def _fail(self, hands: Hands, error: ClawGymError) -> None:
        if not hands.failed.done():
            hands.failed.set_exception(error)
            hands.failed.exception()  # retrieved, even where nobody waits

    # -- commands

    async def _run(self, ticket: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Run what :func:`_exec` took down; its output goes to ``writer`` as it comes. Ends with who waits for it."""
        hands = next((h for h in self._hands.values() if ticket in h.commands), None)
        if hands is None:
            return
        command = hands.commands[ticket]
        work = asyncio.create_task(self._carry(hands, command, writer))
        hands.at_work.add(work)
        gone = asyncio.create_task(reader.read(1))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
            hands.at_work.discard(work)
            if not command.code.done():
                command.code.set_result(137)

    async def _carry(self, hands: Hands, command: _Command, writer: asyncio.StreamWriter) -> None:
        box = hands.box
        seconds = box.spec.limits.agent_seconds
        running = asyncio.create_task(box.exec(command.argv, env=command.env, timeout=seconds, max_output=4096))
        try:
            await asyncio.wait((running, command.output), return_when=asyncio.FIRST_COMPLETED)
            if not command.output.done():  # a command can be faster than its output
                await asyncio.wait((command.output,), timeout=_LATE)
            if command.output.done():
                await _relay(command.output.result(), writer, running)
            done = await running
            if not command.output.done():  # it came to nothing, and the box says why
                writer.write(done.output)
                await writer.drain()
            command.code.set_result(done.exit_code)
        except (SandboxDied, InfraError) as error:
            self._fail(hands, error)
        except SandboxError as error:
            writer.write(str(error).encode())
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _code(self, ticket: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for hands in self._hands.values():
            if ticket in hands.commands:
                code = await hands.commands[ticket].code
                del hands.commands[ticket]
                writer.write(b"%d\n" % code)
                return


async def _relay(source: asyncio.StreamReader, writer: asyncio.StreamWriter, running: asyncio.Task[ExecResult]) -> None:
    """Until the output ends, or a moment after the command has: what it left running may go on with it."""
    passed, clock = 0, asyncio.get_running_loop().time
    until: float | None = None
    while until is None or clock() < until:
        reading = asyncio.ensure_future(source.read(1 << 16))
        try:
            if until is None:
                await asyncio.wait((reading, running), return_when=asyncio.FIRST_COMPLETED)
                until = clock() + _LAST if running.done() else None
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
            passed += len(data)
        if passed > _FAST:
            await asyncio.sleep(0.02)


async def _discard(source: asyncio.StreamReader) -> None:
    """Of what a command left running: a closed pipe would end that."""
    while True:
        if not await source.read(1 << 16):
            return
        await asyncio.sleep(0.02)


async def _listen(hands: Hands) -> None:
    """A port in the task's box, to which its commands' output comes."""

    async def came(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            ticket = (await reader.readline()).strip().decode("ascii", "replace")
            command = hands.commands.get(ticket)
            if command is None or command.output.done():
                return
            command.output.set_result(reader)
            await asyncio.shield(command.code)
            await _discard(reader)
        except (OSError, ValueError):
            pass
        finally:
            writer.close()

    async def kept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        hands.left.add(task)
        try:
            await came(reader, writer)
        except asyncio.CancelledError:
            pass  # by _end(): asyncio's server would complain
        finally:
            hands.left.discard(task)

    async with hands.starting:
        if hands.listening is None:
            hands.listening = await asyncio.start_server(kept, sock=await hands.box.listen(_PORT))


async def _exec(hands: Hands, head: dict[str, Any]) -> Answer:
    await _listen(hands)
    loop, ticket = asyncio.get_running_loop(), secrets.token_hex(16)
    argv = ["bash", "--noprofile", "--norc", "-c", _IN_BOX, "tool", str(_PORT), ticket, head["command"]]
    env = {str(name): str(value) for name, value in head["env"].items()}
    hands.commands[ticket] = _Command(argv, env, loop.create_future(), loop.create_future())
    return {"ticket": ticket}, b""
