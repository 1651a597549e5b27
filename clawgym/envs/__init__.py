"""Gymnasium environments. Importing :mod:`clawgym` registers the known ids; the classes load when one is made.

- :class:`SandboxEnv` is what an author writes, ``clawgym.registry.envs.register`` gives it a name.
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
from clawgym.registry import did_you_mean, envs

if TYPE_CHECKING:
    from gymnasium.vector import AutoresetMode

    from clawgym.envs._single import TaskEnv
    from clawgym.envs._vector import TaskVectorEnv
    from clawgym.envs._worker import Kit
    from clawgym.envs.env import Observation, SandboxEnv
    from clawgym.rollout import RewardName

__all__ = [
    "Observation",
    "RewardName",
    "SandboxEnv",
    "TaskEnv",
    "TaskVectorEnv",
    "make",
    "make_vector",
    "register_known",
]

_LATE = {
    "Observation": "clawgym.envs.env",
    "RewardName": "clawgym.rollout",
    "SandboxEnv": "clawgym.envs.env",
    "TaskEnv": "clawgym.envs._single",
    "TaskVectorEnv": "clawgym.envs._vector",
}
"""Imported when it is used."""

Made = Callable[..., "SandboxEnv"]


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(import_module(_LATE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _in_gym(id: str, env: str | Made) -> None:
    """Have Gymnasium know ``env`` as ``id``."""
    known = gym.registry.get(id)
    if known is not None and known.kwargs.get("env") == id:
        return  # a name that was known before its module was imported
    # The checking and ordering wrappers of gym.make are for single environments and would hide the batch.
    gym.register(
        id,
        entry_point="clawgym.envs:make",
        vector_entry_point="clawgym.envs:make_vector",
        order_enforce=False,
        disable_env_checker=True,
        kwargs={"env": env},
    )


def register_known() -> None:
    """Have Gymnasium know the environments of this library and of installed packages (idempotent)."""
    envs.on_register = _in_gym
    for id in envs.names():
        _in_gym(id, id)


def make(
    num_envs: int | None = None,
    *,
    env: str | Made,
    tasks: str | TaskSet | None = None,
    backend: str = "auto",
    reward: RewardName = "official",
    render_mode: str | None = None,
    **options: Any,
) -> TaskEnv | TaskVectorEnv:
    """What ``gym.make(id, ...)`` calls: one environment, or with ``num_envs`` (also 1) a batch.

    Args:
        num_envs: None for one :class:`TaskEnv`, else the size of the batch.
        env: one of ``clawgym list envs``, ``package.module:Class``, or the class; ``gym.make`` gives it.
        tasks: a task set or the name of one (``clawgym tasks list``); by default the ``default_tasks`` of the class.
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

    kit, tasks = _kit(env, tasks, options, reward, _SINGLE)
    return TaskEnv(kit, tasks, backend=backend, reward=reward, render_mode=render_mode)


def make_vector(
    num_envs: int = 1,
    *,
    env: str | Made,
    tasks: str | TaskSet | None = None,
    backend: str = "auto",
    reward: RewardName = "official",
    autoreset_mode: AutoresetMode | str = "NextStep",
    render_mode: str | None = None,
    **options: Any,
) -> TaskVectorEnv:
    """What ``gym.make_vec(id, ...)`` calls: a batch. See :func:`make`."""
    from clawgym.envs._vector import TaskVectorEnv

    kit, tasks = _kit(env, tasks, options, reward, (*_SINGLE, "num_envs", "autoreset_mode"))
    return TaskVectorEnv(
        kit,
        num_envs,
        tasks,
        backend=backend,
        reward=reward,
        autoreset_mode=autoreset_mode,
        render_mode=render_mode,
    )


_SINGLE = ("tasks", "backend", "reward", "render_mode")


def _kit(
    env: str | Made, tasks: str | TaskSet | None, options: dict[str, Any], reward: RewardName, known: Sequence[str]
) -> tuple[Kit, str | TaskSet]:
    """What makes environments of ``env`` with ``options``, and the tasks that they play. Raises ValueError for an
    option that neither its class nor ``known`` names, and where nothing says which tasks."""
    from clawgym.envs._checks import check_reward
    from clawgym.envs._worker import EnvKit
    from clawgym.envs.env import SandboxEnv

    check_reward(reward)
    name = env if isinstance(env, str) else env.__name__
    found: Any = envs.get(env) if isinstance(env, str) else env
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
    tasks = getattr(found, "default_tasks", None) if tasks is None else tasks
    if tasks is None:
        raise ValueError(f"{name} has no default_tasks: give tasks= (`clawgym tasks list`)")
    options = envs.validated(name, found, options)
    made = found(**options)
    if isinstance(made, SandboxEnv):
        return EnvKit(made, partial(found, **options)), tasks
    if hasattr(made, "worker"):  # openclaw: its episodes are driven by the program, not by actions
        return made, tasks
    raise TypeError(f"{found!r} makes no SandboxEnv: let the class of the environment extend clawgym.envs.SandboxEnv")
