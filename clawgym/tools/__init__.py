"""Tools: what an agent acts with in one episode. A shell and files, or the servers that a task brings."""

from __future__ import annotations

from clawgym.records import Task
from clawgym.sandbox.protocol import Backend, Sandbox
from clawgym.tools._boxes import box_spec
from clawgym.tools.protocol import SUBMIT, Refused, Tools
from clawgym.tools.shell import ShellTools

__all__ = ["SUBMIT", "Refused", "ShellTools", "Tools", "box_spec", "open_tools"]


async def open_tools(task: Task, box: Sandbox, backend: Backend) -> Tools:
    """The tools of an attempt at ``task`` in ``box``, which was made of :func:`box_spec` and has the task's inputs.

    Raises :class:`~clawgym.errors.TaskError` for servers whose tools cannot be offered,
    :class:`~clawgym.errors.InfraError` for one that does not start, :class:`~clawgym.errors.MissingDependency` without
    the extra ``tools``.
    """
    if not task.tools:
        return ShellTools(box, task.workspace, task.limits)
    from clawgym.tools.served import ServedTools

    return await ServedTools.open(task, box, backend)
