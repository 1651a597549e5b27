"""Gymnasium environments. Importing :mod:`clawgym` registers our ids; the classes load when one is made."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import gymnasium as gym

from clawgym.records import TaskSet

if TYPE_CHECKING:
    from gymnasium.vector import AutoresetMode

    from clawgym.envs._single import TaskEnv
    from clawgym.envs._vector import TaskVectorEnv
    from clawgym.envs.kit import EnvKit

__all__ = ["OURS", "TaskEnv", "TaskVectorEnv", "make", "make_vector", "register", "register_ours"]

OURS = {
    "ClawGym/terminal-v0": ("clawgym.envs.terminal:TerminalKit", "terminal-basic:train"),
    "ClawGym/openclaw-v0": ("clawgym.envs.openclaw:OpenClawKit", "terminal-basic:train"),
    "ClawGym/swe-v0": ("clawgym.envs.swe:SweKit", "swe-basic:train"),
    "ClawGym/gui-v0": ("clawgym.envs.gui:GuiKit", "gui-basic:train"),
    "ClawGym/toolcall-v0": ("clawgym.envs.toolcall:ToolCallKit", "toolcall-basic:train"),
}
"""Id -> its kit, which has the options of its own, and the tasks that it plays by default: a training split."""


def register(id: str, kit: str | Callable[..., EnvKit], tasks: str | TaskSet) -> None:
    """Have Gymnasium know environments of ``kit`` as ``id``: :func:`make` says with which arguments.

    Args:
        id: ``Name/thing-v0``.
        kit: a class, or ``package.module:Class``, which is imported when an environment is made.
        tasks: a task set or the name of one.
    """
    # The checking and ordering wrappers of gym.make are for single environments and would hide the batch.
    gym.register(
        id,
        entry_point="clawgym.envs:make",
        vector_entry_point="clawgym.envs:make_vector",
        order_enforce=False,
        disable_env_checker=True,
        kwargs={"kit": kit, "tasks": tasks},
    )


def register_ours() -> None:
    """Register our ids (idempotent)."""
    for id, (kit, tasks) in OURS.items():
        if id not in gym.registry:
            register(id, kit, tasks)


def make(
    num_envs: int | None = None,
    *,
    kit: str | Callable[..., EnvKit],
    tasks: str | TaskSet,
    backend: str = "auto",
    render_mode: str | None = None,
    **options: Any,
) -> TaskEnv | TaskVectorEnv:
    """What ``gym.make(id, ...)`` calls: one environment, or with ``num_envs`` (also 1) a batch.

    Args:
        num_envs: None for one :class:`~clawgym.envs._single.TaskEnv`, else the size of the batch.
        kit: see :func:`register`.
        tasks: a task set or the name of one (``clawgym tasks list``).
        backend: where boxes run: ``auto``, ``namespace``, ``chroot``, ``docker`` or ``ray``.
        render_mode: None, or what the kit has: ``ansi`` or ``rgb_array``; ``human`` for one environment with pictures.
        options: ``autoreset_mode`` of a batch (:class:`~clawgym.envs._vector.TaskVectorEnv`), and the kit's own.
    """
    if num_envs is not None:
        return make_vector(num_envs, kit=kit, tasks=tasks, backend=backend, render_mode=render_mode, **options)
    from clawgym.envs._single import TaskEnv

    return TaskEnv(_made(kit, options, _SINGLE), tasks, backend=backend, render_mode=render_mode)


def make_vector(
    num_envs: int = 1,
    *,
    kit: str | Callable[..., EnvKit],
    tasks: str | TaskSet,
    backend: str = "auto",
    autoreset_mode: AutoresetMode | str = "NextStep",
    render_mode: str | None = None,
    **options: Any,
) -> TaskVectorEnv:
    """What ``gym.make_vec(id, ...)`` calls: a batch. See :func:`make`."""
    from clawgym.envs._vector import TaskVectorEnv

    return TaskVectorEnv(
        _made(kit, options, (*_SINGLE, "num_envs", "autoreset_mode")),
        num_envs,
        tasks,
        backend=backend,
        autoreset_mode=autoreset_mode,
        render_mode=render_mode,
    )


_SINGLE = ("tasks", "backend", "render_mode")


def _made(kit: str | Callable[..., EnvKit], options: dict[str, Any], known: Sequence[str]) -> EnvKit:
    """A kit with ``options``. Raises ValueError for an option that neither it has nor ``known`` names."""
    from clawgym.envs._checks import check_reward, suggestion

    found = kit
    if isinstance(found, str):
        module, _, name = found.partition(":")
        found = getattr(import_module(module), name)
    taken = inspect.signature(found).parameters.values()
    if not any(one.kind is one.VAR_KEYWORD for one in taken):
        names = [*known, *(one.name for one in taken)]
        for option in options:
            if option == "autoreset_mode":
                raise ValueError("autoreset_mode is an option of a batch: give num_envs too (num_envs=1 is a batch)")
            if option not in names:
                raise ValueError(f"unknown option {option!r}: use {', '.join(names)}.{suggestion(option, names)}")
    if "reward" in options:
        check_reward(options["reward"])
    return found(**options)


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(import_module(_LATE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_LATE = {"TaskEnv": "clawgym.envs._single", "TaskVectorEnv": "clawgym.envs._vector"}
