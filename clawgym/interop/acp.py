"""Any program that speaks ACP, the Agent Client Protocol, as an agent.

    clawgym eval terminal-basic:heldout --agent acp --agent-option command="qwen-code --acp" --model NAME --base-url URL

Needs the package ``agent-client-protocol``.

Invariants: the program runs in the sandbox, and its standard input and output are a connection to this process. The
transcript comes from the gateway's records. What the program sends is hostile: a message that is too large or malformed
is skipped. All that the program asks permission for is allowed, since the sandbox is its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import shlex
from collections.abc import Mapping
from typing import Any

from clawgym.agents.blackbox.protocol import ClawStopped, ModelLink
from clawgym.agents.programs.command import HOME, CommandClaw
from clawgym.agents.programs.releases import RELEASES
from clawgym.errors import AgentError, InfraError, MissingDependency
from clawgym.registry import agents
from clawgym.sandbox.protocol import ExecResult, Sandbox, SandboxSpec

__all__ = ["AcpProgram", "RunningAcp"]

_PORT = 9010
_START_SECONDS = 180.0
_FOREVER = 7 * 86400.0
_LAST_SECONDS = 5.0
"""Longest wait for the end of a program that failed."""
_LARGEST_MESSAGE = 8 * 2**20
"""Bytes of one message of the program."""
_LARGEST_ANSWER = 2**20
"""Characters of an answer to the user."""
_CONNECTED = f'exec 3<>/dev/tcp/127.0.0.1/{_PORT} && exec "$@" <&3 >&3 3>&-'
"""Bash starts the program with the connection as its standard input and output."""


def _acp(module: str = "acp") -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependency(
            f"the agent acp needs the Agent Client Protocol ({error}): pip install agent-client-protocol"
        ) from error


@agents.register("acp")
class AcpProgram:
    """A program that speaks the Agent Client Protocol.

    Args:
        command: its command line. The first word is one of ``clawgym agents list``, which is then mounted and
            configured, or a program of the sandbox. That one finds its model in ``OPENAI_BASE_URL``,
            ``OPENAI_API_KEY`` and ``OPENAI_MODEL``.

    Raises:
        AgentError: the command cannot be read, or its program is not installed.
    """

    name = "acp"

    def __init__(self, command: str) -> None:
        _acp()
        try:
            self._argv = shlex.split(command)
        except ValueError as error:
            raise AgentError(f"the command {command!r} cannot be read ({error}): correct its quotes") from error
        if not self._argv:
            raise AgentError("the command is empty: give command='PROGRAM --acp'")
        self._known: CommandClaw | None = None
        if self._argv[0] in RELEASES:
            self._known = agents.make(self._argv[0])
            if not isinstance(self._known, CommandClaw):
                raise AgentError(f"{self._argv[0]} is no program that speaks ACP: give the command of another")
            self._argv[:1] = self._known.program()
        self.version: str = self._known.version if self._known is not None else "1"

    def spec(self, spec: SandboxSpec) -> SandboxSpec:
        """See :class:`~clawgym.agents.blackbox.Claw`."""
        return spec if self._known is None else self._known.spec(spec)

    async def start(self, sandbox: Sandbox, link: ModelLink) -> RunningAcp:
        """See :class:`~clawgym.agents.blackbox.Claw`.

        Raises:
            AgentError: the sandbox has no loopback.
            InfraError: the program does not start, or does not speak ACP.
        """
        if link.socket_path is not None:
            raise AgentError(
                "a program that speaks ACP connects to its model by TCP, and sandboxes of this backend have no "
                "loopback: use --sandbox namespace or docker"
            )
        if self._known is not None:
            await self._known.start(sandbox, link)  # only writes its configuration
            variables = dict(self._known.environment(link))
        else:
            variables = _variables(link)
        running = RunningAcp(sandbox)
        try:
            async with asyncio.timeout(_START_SECONDS):
                await running.connect(self._argv, {"HOME": HOME, **variables})
        except TimeoutError:
            await running.aclose()
            raise InfraError(
                f"{self._argv[0]} did not answer by ACP within {_START_SECONDS:g} s: check the command"
            ) from None
        except BaseException:
            await running.aclose()
            raise
        return running

    def identity(self) -> dict[str, Any]:
        """See :class:`~clawgym.agents.blackbox.Claw`."""
        known = {} if self._known is None else self._known.identity()
        return {**known, "command": self._argv, "acp": _acp().PROTOCOL_VERSION}


def _variables(link: ModelLink) -> dict[str, str]:
    return {"OPENAI_BASE_URL": link.base_url, "OPENAI_API_KEY": link.api_key, "OPENAI_MODEL": link.model}


class _Person:
    """The client's side of ACP: allows everything, and keeps the text of the last answer."""

    def __init__(self) -> None:
        self.answer: list[str] = []
        self._room = _LARGEST_ANSWER

    def begin(self) -> None:
        self.answer, self._room = [], _LARGEST_ANSWER

    async def request_permission(self, session_id: str, tool_call: Any, options: list[Any], **_: Any) -> Any:
        schema = _acp("acp.schema")
        for kind in ("allow_always", "allow_once"):
            for option in options:
                if option.kind == kind:
                    outcome = schema.AllowedOutcome(outcome="selected", option_id=option.option_id)
                    return schema.RequestPermissionResponse(outcome=outcome)
        return schema.RequestPermissionResponse(outcome=schema.DeniedOutcome(outcome="cancelled"))

    async def session_update(self, session_id: str, update: Any, **_: Any) -> None:
        kind = getattr(update, "session_update", None)
        if kind == "tool_call":  # what was said before it was no answer
            self.begin()
        elif kind == "agent_message_chunk" and self._room > 0:
            text = getattr(update.content, "text", None)
            if isinstance(text, str):
                self.answer.append(text[: self._room])
                self._room -= len(text)


class RunningAcp:
    """One session with a program (:class:`~clawgym.agents.blackbox.Running`)."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._person = _Person()
        self._process: asyncio.Task[ExecResult] | None = None
        self._connection: Any = None
        self._writer: asyncio.StreamWriter | None = None
        self._session = ""

    @property
    def ended(self) -> bool:
        """See :class:`~clawgym.agents.blackbox.Running`."""
        return self._process is not None and self._process.done()

    async def connect(self, argv: list[str], env: Mapping[str, str]) -> None:
        """Start the program and open a session. Raises :class:`InfraError` if it ends, or refuses."""
        acp, loop = _acp(), asyncio.get_running_loop()
        with await self._sandbox.listen(_PORT) as listening:
            self._process = asyncio.ensure_future(
                self._sandbox.exec(
                    ["bash", "-c", _CONNECTED, "acp", *argv],
                    cwd=self._sandbox.spec.workdir,
                    env=env,
                    timeout=_FOREVER,
                    max_output=64 * 1024,
                )
            )
            accepting = asyncio.ensure_future(loop.sock_accept(listening))
            await asyncio.wait([accepting, self._process], return_when=asyncio.FIRST_COMPLETED)
            if not accepting.done():
                accepting.cancel()
                await asyncio.gather(accepting, return_exceptions=True)
                raise InfraError(f"{argv[0]} did not start ({await self._why()}): check the command")
            sock, _ = accepting.result()
        reader, self._writer = await asyncio.open_connection(sock=sock, limit=_LARGEST_MESSAGE)
        self._connection = acp.client.connection.ClientSideConnection(self._person, self._writer, reader)
        try:
            await self._connection.initialize(protocol_version=acp.PROTOCOL_VERSION)
            opened = await self._connection.new_session(cwd=self._sandbox.spec.workdir, mcp_servers=[])
        except (acp.RequestError, ConnectionError, ValueError) as error:
            why = f"{error}; {await self._why()}"
            raise InfraError(f"{argv[0]} opens no session of ACP ({why}): check the command") from error
        self._session = opened.session_id

    async def ask(self, message: str) -> str:
        """See :class:`~clawgym.agents.blackbox.Running`."""
        acp = _acp()
        self._person.begin()
        text = acp.text_block(message.encode("utf-8", "replace").decode())
        try:
            done = await self._connection.prompt(session_id=self._session, prompt=[text])
        except (acp.RequestError, ConnectionError, ValueError) as error:
            raise ClawStopped(f"the program failed ({error!s:.300}; {await self._why()})") from error
        if done.stop_reason == "cancelled":
            raise ClawStopped("the program cancelled its work")
        return "".join(self._person.answer).strip()

    async def files(self) -> Mapping[str, bytes]:
        """Return the program's last output, if it has ended."""
        return {"acp.log": (await self._why()).encode()} if self.ended else {}

    async def aclose(self) -> None:
        """See :class:`~clawgym.agents.blackbox.Running`."""
        if self._connection is not None:
            with contextlib.suppress(Exception):
                await self._connection.close()
        if self._writer is not None:
            self._writer.close()
        if self._process is not None:
            self._process.cancel()
            await asyncio.gather(self._process, return_exceptions=True)

    async def _why(self) -> str:
        """How the program ended. One that has closed its connection is about to end."""
        if self._process is not None:
            await asyncio.wait([self._process], timeout=_LAST_SECONDS)
        if self._process is None or not self._process.done():
            return "it is running"
        if self._process.cancelled():
            return "it was stopped"
        if (error := self._process.exception()) is not None:
            return str(error)
        done = self._process.result()
        return f"exit code {done.exit_code}: {done.text.strip()[-2000:]}"
