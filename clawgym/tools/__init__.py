"""Tools that an agent calls in one episode: shell and files, or the MCP servers, functions or desktop of the task."""

from __future__ import annotations

from dataclasses import replace

from clawgym.errors import SandboxDied, SandboxError
from clawgym.records import Task, ToolCall
from clawgym.sandbox.protocol import Backend, Sandbox
from clawgym.tools._sandboxes import program_spec, sandbox_spec
from clawgym.tools.protocol import SUBMIT, CallRefused, Tools, closing
from clawgym.tools.shell import ShellTools

__all__ = [
    "SUBMIT",
    "CallRefused",
    "ShellTools",
    "Tools",
    "aimed",
    "closing",
    "open_tools",
    "program_spec",
    "sandbox_spec",
]


async def open_tools(task: Task, sandbox: Sandbox, backend: Backend) -> Tools:
    """Start the tools for an attempt at ``task``.

    Args:
        task: the task; its inputs are already in the sandbox.
        sandbox: the episode's sandbox, made from :func:`sandbox_spec`.
        backend: makes further sandboxes, for tool servers and desktops.

    Raises:
        TaskError: the tools of a server cannot be offered (a duplicate name, an invalid schema).
        InfraError: a server or desktop did not start.
        MissingDependency: an optional dependency (``clawgym[tools]``, ``clawgym[gui]``) is not installed.
    """
    if task.desktop is not None:
        from clawgym.tools.computer import ComputerTools

        return await ComputerTools.open(task, sandbox, backend)
    if task.dialogue is not None and not task.tools:
        from clawgym.tools.recorded import RecordedTools

        return RecordedTools(task.dialogue.functions)
    if not task.tools:
        return ShellTools(sandbox, task.workspace, task.limits)
    from clawgym.tools.served import ServedTools

    return await ServedTools.open(task, sandbox, backend)


async def aimed(tools: Tools, call: ToolCall) -> ToolCall:
    """Replace CSS selectors in the coordinates of ``call`` by the pixel in the middle of the element.

    For agents that do not see the screen. A selector without an element is left as it is, and the call is then refused.
    """
    names = [name for name in ("coordinate", "start_coordinate") if isinstance(call.arguments.get(name), str)]
    browser = getattr(tools, "browser", None) if names else None
    if browser is None:
        return call
    found: dict[str, list[int]] = {}
    for name in names:
        try:
            x, y, width, height = await browser.bounding_box(call.arguments[name])
        except SandboxDied:
            raise
        except SandboxError:
            continue
        found[name] = [x + width // 2, y + height // 2]
    return replace(call, arguments={**call.arguments, **found})
