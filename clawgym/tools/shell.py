"""A persistent shell and file tools in one sandbox (:class:`ShellTools`), for tasks without tools of their own."""

from __future__ import annotations

import json
import posixpath
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from clawgym.errors import SandboxDied, SandboxError
from clawgym.records import Limits, Observation, TaskFile, ToolCall
from clawgym.sandbox.protocol import ExecResult, Sandbox, Shell
from clawgym.sandbox.shell_state import ShellState, restored_shell, saved_shell
from clawgym.tools._arguments import BadCall, checked
from clawgym.tools.protocol import SUBMIT_TOOL, CallRefused, clipped, function, ignore

__all__ = ["SHELL_TOOLS", "ShellTools", "bash_call", "describe"]


def bash_call(command: str, number: int = 1) -> ToolCall:
    """The ``bash`` call that runs ``command``."""
    return ToolCall(f"call_{number}", "bash", {"command": command})


def _text(description: str, **more: Any) -> dict[str, Any]:
    return {"type": "string", "description": description, **more}


_PATH = _text("Absolute, or relative to the workspace.", minLength=1)

SHELL_TOOLS: tuple[Mapping[str, Any], ...] = (
    function(
        "bash",
        "Run a command in a persistent bash shell. Working directory, variables and background jobs stay.",
        {"command": _text("Any bash text, one line or many.")},
        ("command",),
    ),
    function(
        "read_file",
        "Read a text file, or some of its lines.",
        {
            "path": _PATH,
            "first_line": {"type": "integer", "minimum": 1, "description": "From this line on; the first is 1."},
            "last_line": {"type": "integer", "minimum": 1, "description": "Up to this line, and with it."},
        },
        ("path",),
    ),
    function(
        "write_file",
        "Write a text file, replacing what was there. Folders are made as needed.",
        {"path": _PATH, "content": _text("The whole content.")},
        ("path", "content"),
    ),
    function(
        "edit_file",
        "Replace a passage of a text file. It must stand in the file exactly once, unless replace_all is true.",
        {
            "path": _PATH,
            "old": _text("The passage, exactly as it stands in the file.", minLength=1),
            "new": _text("What to put in its place."),
            "replace_all": {"type": "boolean", "description": "Replace it wherever it stands."},
        },
        ("path", "old", "new"),
    ),
    SUBMIT_TOOL,
)
_SCHEMAS = {tool["function"]["name"]: json.dumps(tool["function"]["parameters"]) for tool in SHELL_TOOLS}
_FREE = ("content", "old", "new")
"""Arguments that may contain a NUL character."""


class ShellTools:
    """Shell and file tools in ``sandbox``; see :class:`~clawgym.tools.protocol.Tools`.

    The shell starts with the first command and stays open until the sandbox is closed, so that background jobs live as
    long as the episode.
    """

    def __init__(self, sandbox: Sandbox, workspace: str, limits: Limits) -> None:
        self.schemas: Sequence[Mapping[str, Any]] = SHELL_TOOLS
        self._sandbox = sandbox
        self._workspace = workspace
        self._output_bytes = limits.output_bytes
        self._shell: Shell | None = None

    async def call_all(
        self,
        calls: Sequence[ToolCall],
        *,
        timeout: float | None = None,
        on_observation: Callable[[Observation], None] = ignore,
    ) -> list[Observation]:
        """See :class:`~clawgym.tools.protocol.Tools`: one after another."""
        observations: list[Observation] = []
        for call in calls:
            try:
                observation = Observation(await self._run(call, timeout), call.id)
            except BadCall as error:
                observation = CallRefused(f"[error: {error}]", call.id)
            observations.append(observation)
            on_observation(observation)
        return observations

    async def aclose(self) -> None:
        """Do nothing: the shell ends with the sandbox."""

    async def save(self) -> ShellState | None:
        """The state of the shell, None before its first command. Raises as :func:`saved_shell` does."""
        return None if self._shell is None else await saved_shell(self._shell)

    async def load(self, state: ShellState | None) -> None:
        """Start the shell with a state of :meth:`save`. Raises as :func:`restored_shell` does."""
        self._shell = None if state is None else await restored_shell(self._sandbox, state)

    async def _run(self, call: ToolCall, timeout: float | None) -> str:
        given = _readable(call.name, checked(call, _SCHEMAS))
        try:
            match call.name:
                case "bash":
                    return await self._bash(given["command"], timeout)
                case "read_file":
                    return await self._read(given["path"], given.get("first_line"), given.get("last_line"))
                case "write_file":
                    return await self._write(given["path"], given["content"])
                case "edit_file":
                    return await self._edit(given["path"], given["old"], given["new"], given.get("replace_all", False))
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

    async def _read(self, path: str, first: int | None, last: int | None) -> str:
        data = await self._sandbox.get(self._absolute(path))
        if first is None and last is None:
            return clipped(data, self._output_bytes, ": ask for some of the lines")
        lines = data.splitlines(keepends=True)
        first, last = first or 1, min(last or len(lines), len(lines))
        if first > last:
            return f"[error: there are no lines {first} to {last}: the file has {len(lines)}]"
        text = clipped(b"".join(lines[first - 1 : last]), self._output_bytes, ": ask for fewer lines")
        return f"{text}{_newline(text)}[lines {first} to {last} of {len(lines)}]"

    async def _write(self, path: str, content: str) -> str:
        data = content.encode()
        await self._put(path, data, executable=False)
        return f"[wrote {len(data)} bytes]"

    async def _edit(self, path: str, old: str, new: str, everywhere: bool) -> str:
        place = self._absolute(path)
        data = await self._sandbox.get(place)
        found = data.count(old.encode())
        if found == 0:
            return f"[error: the passage does not stand in {path}: read the file, and copy it exactly]"
        if found > 1 and not everywhere:
            return (
                f"[error: the passage stands in {path} {found} times: take in more of the text around it, "
                "or set replace_all]"
            )
        executable = (await self._sandbox.exec(["test", "-x", place])).exit_code == 0
        await self._put(path, data.replace(old.encode(), new.encode()), executable)
        return f"[replaced {found} time{'s' * (found > 1)}]"

    async def _put(self, path: str, data: bytes, executable: bool) -> None:
        folder, name = posixpath.split(self._absolute(path))
        if not name:
            raise BadCall(f"{path!r} is a folder: give the path of a file")
        await self._sandbox.put([TaskFile(name, data, executable)], folder)

    def _absolute(self, path: str) -> str:
        joined = posixpath.join(self._workspace, path)
        return joined if path.endswith("/") else posixpath.normpath(joined)


def _readable(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """``arguments`` with lone surrogates replaced. Raises :class:`BadCall` for a NUL in a command or path."""
    for key, value in arguments.items():
        if isinstance(value, str):
            if "\0" in value and key not in _FREE:
                raise BadCall(f"the argument {key!r} of {name} holds a NUL character: call it again without")
            arguments[key] = value.encode("utf-8", "replace").decode()
    return arguments


def describe(result: ExecResult) -> str:
    """The observation of a command: output, exit code, working folder, and notes such as a timeout."""
    cwd = result.cwd if result.cwd.isprintable() else ascii(result.cwd)
    notes = [f"exit code {result.exit_code}", f"cwd {cwd}"]
    if result.timed_out:
        notes.append("timed out and was killed")
    if result.omitted_bytes:
        notes.append(f"{result.omitted_bytes} bytes of output left out of the middle")
    if result.shell_restarted:
        notes.append("the shell ended and is started afresh")
    text = result.text
    return f"{text}{_newline(text)}[{'; '.join(notes)}]"


def _newline(text: str) -> str:
    return "" if not text or text.endswith("\n") else "\n"
