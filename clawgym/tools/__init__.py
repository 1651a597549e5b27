"""Tools: what an agent acts with in one episode. A shell and files, or the servers that a task brings."""

from __future__ import annotations

from dataclasses import replace

from clawgym.errors import SandboxDied, SandboxError
from clawgym.records import Task, ToolCall
from clawgym.sandbox.protocol import Backend, Sandbox
from clawgym.tools._sandboxes import sandbox_spec
from clawgym.tools.protocol import SUBMIT, Refused, Tools, closing
from clawgym.tools.shell import ShellTools

__all__ = ["SUBMIT", "Refused", "ShellTools", "Tools", "aimed", "sandbox_spec", "closing", "open_tools"]


async def open_tools(task: Task, sandbox: Sandbox, backend: Backend) -> Tools:
    """The tools of an attempt at ``task`` in ``sandbox``, which was made of :func:`sandbox_spec` and has the task's
    inputs.

    Raises :class:`~clawgym.errors.TaskError` for servers whose tools cannot be offered,
    :class:`~clawgym.errors.InfraError` for one that does not start, :class:`~clawgym.errors.MissingDependency` without
    the extra ``tools``.
    """
    if task.desktop is not None:
        from clawgym.tools.computer import ComputerTools

        return await ComputerTools.open(task, sandbox, backend)
    if not task.tools:
        return ShellTools(sandbox, task.workspace, task.limits)
    from clawgym.tools.served import ServedTools

    return await ServedTools.open(task, sandbox, backend)


async def aimed(tools: Tools, call: ToolCall) -> ToolCall:
    """``call`` with the coordinates in pixels where it names an element of the page instead (a CSS selector).

    For agents without eyes. What is not there stays as it is: a call that says so, and is refused.
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
