"""The sandbox specs of an attempt."""

from __future__ import annotations

from clawgym.desktop import FILES_DIR, desktop_files, settings_files
from clawgym.desktop.browser import browser_files
from clawgym.records import Task, ToolServer
from clawgym.sandbox.protocol import SandboxSpec

__all__ = ["TOOLS_DIR", "desktop_spec", "program_spec", "sandbox_spec"]

TOOLS_DIR = "/tools"
"""Folder with the files of each server, in the server's sandbox."""


def sandbox_spec(task: Task, server: ToolServer | None = None) -> SandboxSpec:
    """The spec of the episode's sandbox, which also runs the first tool server, or of the sandbox of ``server``."""
    here = server or next(iter(task.tools), None)
    readonly = {f"{TOOLS_DIR}/{here.name}": here.files} if here and here.files else {}
    if task.desktop is not None:
        site = task.desktop.site
        readonly = {f"{TOOLS_DIR}/site": site.files} if site is not None else {FILES_DIR: desktop_files()}
        if task.desktop.opening or task.desktop.closing:
            readonly |= settings_files()
    mounts = {target: layer.folder for target, layer in task.layers.items()}
    return SandboxSpec(task.sandbox_image, task.limits, task.env, task.workspace, readonly, mounts=mounts)


def program_spec(task: Task) -> SandboxSpec:
    """The spec of the sandbox of an agent program that calls the task's tools from outside: nothing of the task's."""
    return SandboxSpec(limits=task.limits, workdir=task.workspace)


def desktop_spec(task: Task) -> SandboxSpec:
    """The spec of the desktop's sandbox, for a task whose site runs in the episode's sandbox."""
    assert task.desktop is not None
    readonly = {FILES_DIR: desktop_files(), **(browser_files() if task.desktop.page else {})}
    return SandboxSpec(task.sandbox_image, task.limits, task.env, task.workspace, readonly)
