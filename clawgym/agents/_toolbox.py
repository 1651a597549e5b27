"""The tools of one episode, over one persistent shell: what our agents act with.

Invariant: whatever a tool call says, and whatever the box answers, the result is text for the model; only the
death of the box (:class:`~clawgym.errors.SandboxDied`) and failures of the host get out.
"""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

from clawgym.agents.protocol import AgentContext, AgentReport
from clawgym.errors import SandboxDied, SandboxError
from clawgym.records import Observation, Step, TaskFile, ToolCall
from clawgym.sandbox.protocol import ExecResult, Shell

__all__ = ["TOOLS", "VERSION", "BadCall", "Toolbox", "bash_call", "now", "run_calls"]

VERSION = metadata.version("clawgym")


def now() -> str:
    """The time, as a transcript writes it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def bash_call(command: str, number: int = 1) -> ToolCall:
    """The ``bash`` call that runs ``command``."""
    return ToolCall(f"call_{number}", "bash", {"command": command})


def _tool(name: str, description: str, required: tuple[str, ...] = (), **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS: tuple[Mapping[str, Any], ...] = (
    _tool(
        "bash",
        "Run a command in a persistent bash shell. Working directory, variables and background jobs stay.",
        ("command",),
        command="Any bash text, one line or many.",
    ),
    _tool("read_file", "Read a text file.", ("path",), path="Absolute, or relative to the workspace."),
    _tool(
        "write_file",
        "Write a text file, replacing what was there. Folders are made as needed.",
        ("path", "content"),
        path="Absolute, or relative to the workspace.",
        content="The whole content.",
    ),
    _tool("submit", "Say that the task is done.", message="A short closing message."),
)
_PARAMETERS = {t["function"]["name"]: t["function"]["parameters"] for t in TOOLS}


class BadCall(Exception):
    """A tool call that cannot be carried out; the message is for the model."""


class Toolbox:
    """Carries out tool calls in ``context.sandbox``. The shell stays open until the box is closed, so that
    background jobs live as long as the episode."""

    def __init__(self, context: AgentContext) -> None:
        self._sandbox = context.sandbox
        self._workspace = context.task.workspace
        self._output_bytes = context.task.limits.output_bytes
        self._shell: Shell | None = None

    async def run(self, call: ToolCall, *, timeout: float | None = None) -> str:
        """The observation for ``call``. Raises :class:`BadCall` if it names no tool or lacks an argument."""
        arguments = _check(call)
        try:
            match call.name:
                case "bash":
                    return await self._bash(arguments["command"], timeout)
                case "read_file":
                    return await self._read(arguments["path"])
                case "write_file":
                    return await self._write(arguments["path"], arguments["content"])
                case _:
                    return "submitted"
        except SandboxDied:
            raise
        except SandboxError as error:
            return f"[error: {error}]"

    async def _bash(self, command: str, timeout: float | None) -> str:
        if self._shell is None:
            self._shell = await self._sandbox.shell()
            await self._shell.run(f"cd -- {shlex.quote(self._workspace)}")
        return describe(await self._shell.run(command, timeout=timeout))

    async def _read(self, path: str) -> str:
        data = await self._sandbox.get(self._absolute(path))
        keep = self._output_bytes // 2
        if len(data) <= 2 * keep:
            return data.decode("utf-8", "backslashreplace")
        head, tail = (part.decode("utf-8", "backslashreplace") for part in (data[:keep], data[-keep:]))
        return f"{head}\n[{len(data) - 2 * keep} bytes left out: read parts with bash]\n{tail}"

    async def _write(self, path: str, content: str) -> str:
        folder, name = posixpath.split(self._absolute(path))
        if not name:
            raise BadCall(f"{path!r} is a folder: give the path of a file")
        data = content.encode("utf-8", "replace")
        await self._sandbox.put([TaskFile(name, data)], folder)
        return f"[wrote {len(data)} bytes]"

    def _absolute(self, path: str) -> str:
        joined = posixpath.join(self._workspace, path)
        return joined if path.endswith("/") else posixpath.normpath(joined)


def _check(call: ToolCall) -> Mapping[str, str]:
    schema = _PARAMETERS.get(call.name)
    if schema is None:
        raise BadCall(f"there is no tool {call.name!r}: use {', '.join(_PARAMETERS)}")
    arguments: dict[str, str] = {}
    for name in schema["properties"]:
        value = call.arguments.get(name)
        if value is None and name not in schema["required"]:
            continue
        if not isinstance(value, str):
            raise BadCall(f"{call.name} needs the argument {name!r}, a string: call it again")
        if "\0" in value and name != "content":
            raise BadCall(f"the argument {name!r} of {call.name} holds a NUL character: call it again without")
        arguments[name] = value.encode("utf-8", "replace").decode()
    if not arguments.get("path", "x"):
        raise BadCall(f"{call.name} needs a path that is not empty: call it again")
    return arguments


def describe(result: ExecResult) -> str:
    """What the model reads after a command: its output, then exit code, folder and whatever else happened."""
    cwd = result.cwd if result.cwd.isprintable() else ascii(result.cwd)
    notes = [f"exit code {result.exit_code}", f"cwd {cwd}"]
    if result.timed_out:
        notes.append("timed out and was killed")
    if result.omitted_bytes:
        notes.append(f"{result.omitted_bytes} bytes of output left out of the middle")
    if result.shell_restarted:
        notes.append("the shell ended and is started afresh")
    text = result.text
    newline = "" if not text or text.endswith("\n") else "\n"
    return f"{text}{newline}[{'; '.join(notes)}]"


async def run_calls(context: AgentContext, calls: Iterable[ToolCall], *, timeout: float | None = None) -> AgentReport:
    """Carry out ``calls`` one after another, each recorded as a step, also when the box dies under it."""
    toolbox = Toolbox(context)
    for call in calls:
        started = now()
        observations: list[Observation] = []
        try:
            observations.append(Observation(await toolbox.run(call, timeout=timeout), call.id))
        except BadCall as error:
            observations.append(Observation(f"[error: {error}]", call.id))
        finally:
            context.record(Step("agent", "", started, tool_calls=(call,), observations=tuple(observations)))
    return AgentReport()
