"""Gymnasium environments. Importing :mod:`clawgym` registers our ids; the classes load when one is made.

- :class:`SandboxEnv` is what an author writes, :func:`register` gives it a name.
- :class:`TaskEnv` and :class:`TaskVectorEnv` are what ``gym.make`` returns: one environment, or a batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import gymnasium as gym

from clawgym.records import TaskSet
from clawgym.registry import did_you_mean

if TYPE_CHECKING:
    from gymnasium.vector import AutoresetMode

    from clawgym.envs._single import TaskEnv
    from clawgym.envs._vector import TaskVectorEnv
    from clawgym.envs._worker import Kit
    from clawgym.envs.env import Observation, Reward, SandboxEnv

__all__ = [
    "OURS",
    "Observation",
    "Reward",
    "SandboxEnv",
    "TaskEnv",
    "TaskVectorEnv",
    "make",
    "make_vector",
    "register",
    "register_ours",
]

_LATE = {
    "Observation": "clawgym.envs.env",
    "Reward": "clawgym.envs.env",
    "SandboxEnv": "clawgym.envs.env",
    "TaskEnv": "clawgym.envs._single",
    "TaskVectorEnv": "clawgym.envs._vector",
}
"""Imported when it is used."""

OURS = {
    "ClawGym/terminal-v0": ("clawgym.envs.terminal:TerminalEnv", "terminal-basic:train"),
    "ClawGym/openclaw-v0": ("clawgym.envs.openclaw:OpenClawKit", "terminal-basic:train"),
    "ClawGym/swe-v0": ("clawgym.envs.swe:SweEnv", "swe-basic:train"),
    "ClawGym/gui-v0": ("clawgym.envs.gui:GuiEnv", "gui-basic:train"),
    "ClawGym/toolcall-v0": ("clawgym.envs.toolcall:ToolCallEnv", "toolcall-basic:train"),
}
"""Id -> its class, whose arguments are options of ``gym.make``, and the tasks that it plays by default: a training
split."""

Made = Callable[..., "SandboxEnv"]


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(import_module(_LATE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register(id: str, env: str | Made, tasks: str | TaskSet) -> None:
    """Have Gymnasium know environments of ``env`` as ``id``: :func:`make` says with which arguments.

    Args:
        id: ``Name/thing-v0``.
        env: a :class:`SandboxEnv` class, or ``package.module:Class``, which is imported when an environment is made.
        tasks: a task set or the name of one: the default of ``gym.make(id, tasks=...)``.
    """
    # The checking and ordering wrappers of gym.make are for single environments and would hide the batch.
    gym.register(
        id,
        entry_point="clawgym.envs:make",
        vector_entry_point="clawgym.envs:make_vector",
        order_enforce=False,
        disable_env_checker=True,
        kwargs={"env": env, "tasks": tasks},
    )


def register_ours() -> None:
    """Register our ids (idempotent)."""
    for id, (env, tasks) in OURS.items():
        if id not in gym.registry:
            register(id, env, tasks)


def make(
    num_envs: int | None = None,
    *,
    env: str | Made,
    tasks: str | TaskSet,
    backend: str = "auto",
    reward: Reward = "official",
    render_mode: str | None = None,
    **options: Any,
) -> TaskEnv | TaskVectorEnv:
    """What ``gym.make(id, ...)`` calls: one environment, or with ``num_envs`` (also 1) a batch.

    Args:
        num_envs: None for one :class:`TaskEnv`, else the size of the batch.
        env: see :func:`register`.
        tasks: a task set or the name of one (``clawgym tasks list``).
        backend: where sandboxes run: ``auto``, ``namespace``, ``chroot``, ``docker`` or ``ray``.
        reward: what the last step of an episode pays: ``official``, ``strict``, ``corrected`` or ``checks``.
        render_mode: None, or what the environment has: ``ansi`` or ``rgb_array``; ``human`` for one environment with
            pictures.
        options: ``autoreset_mode`` of a batch (:class:`TaskVectorEnv`), and the environment's own.

    Raises ValueError for an option, or a value of one, that is not known.
    """
    if num_envs is not None:
        return make_vector(
            num_envs, env=env, tasks=tasks, backend=backend, reward=reward, render_mode=render_mode, **options
        )
    from clawgym.envs._single import TaskEnv

    kit = _kit(env, options, reward, _SINGLE)
    return TaskEnv(kit, tasks, backend=backend, reward=reward, render_mode=render_mode)


def make_vector(
    num_envs: int = 1,
    *,
    env: str | Made,
    tasks: str | TaskSet,
    backend: str = "auto",
    reward: Reward = "official",
    autoreset_mode: AutoresetMode | str = "NextStep",
    render_mode: str | None = None,
    **options: Any,
) -> TaskVectorEnv:
    """What ``gym.make_vec(id, ...)`` calls: a batch. See :func:`make`."""
    from clawgym.envs._vector import TaskVectorEnv

    return TaskVectorEnv(
        _kit(env, options, reward, (*_SINGLE, "num_envs", "autoreset_mode")),
        num_envs,
        tasks,
        backend=backend,
        reward=reward,
        autoreset_mode=autoreset_mode,
        render_mode=render_mode,
    )


_SINGLE = ("tasks", "backend", "reward", "render_mode")


def _kit(env: str | Made, options: dict[str, Any], reward: Reward, known: Sequence[str]) -> Kit:
    """What makes environments of ``env`` with ``options``. Raises ValueError for an option that neither its class nor
    ``known`` names."""
    from clawgym.envs._checks import check_reward
    from clawgym.envs._worker import EnvKit
    from clawgym.envs.env import SandboxEnv

    check_reward(reward)
    found: Any = env
    if isinstance(env, str):
        module, _, name = env.partition(":")
        found = getattr(import_module(module), name)
    taken = inspect.signature(found).parameters.values()
    if clash := {one.name for one in taken} & {"env", "num_envs", "autoreset_mode", *_SINGLE}:
        raise ValueError(f"{found!r} has arguments that the library keeps for itself: rename {sorted(clash)}")
    if not any(one.kind is one.VAR_KEYWORD for one in taken):
        names = [*known, *(one.name for one in taken)]
        for option in options:
            if option == "autoreset_mode":
                raise ValueError("autoreset_mode is an option of a batch: give num_envs too (num_envs=1 is a batch)")
            if option not in names:
                raise ValueError(f"unknown option {option!r}: use {', '.join(names)}.{did_you_mean(option, names)}")
    made = found(**options)
    if isinstance(made, SandboxEnv):
        return EnvKit(made, partial(found, **options))
    if hasattr(made, "worker"):  # openclaw: its episodes are driven by the program, not by actions
        return made
    raise TypeError(f"{found!r} makes no SandboxEnv: let the class of the environment extend clawgym.envs.SandboxEnv")
