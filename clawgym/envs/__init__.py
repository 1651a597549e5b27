"""Gymnasium environments. Importing :mod:`clawgym` registers the known ids; classes are imported when one is made.

- :class:`SandboxEnv` is the base class for new environments; ``clawgym.registry.envs.register`` gives them a name.
- :class:`TaskEnv` and :class:`TaskVectorEnv` are what ``gym.make`` returns: one environment, or a batch.
- :class:`EnvSnapshot` is what their ``snapshot()`` returns, and ``restore(...)`` takes.
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

    from clawgym.envs._runner import RunnerFactory
    from clawgym.envs._single import TaskEnv
    from clawgym.envs._snapshots import EnvSnapshot
    from clawgym.envs._vector import TaskVectorEnv
    from clawgym.envs.env import Observation, SandboxEnv
    from clawgym.rollout import RewardName

__all__ = [
    "EnvSnapshot",
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
    "EnvSnapshot": "clawgym.envs._snapshots",
    "Observation": "clawgym.envs.env",
    "RewardName": "clawgym.rollout",
    "SandboxEnv": "clawgym.envs.env",
    "TaskEnv": "clawgym.envs._single",
    "TaskVectorEnv": "clawgym.envs._vector",
}
"""Name -> module, for names that are imported on first use."""

EnvClass = Callable[..., "SandboxEnv"]


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(import_module(_LATE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _register_in_gym(id: str, env: str | EnvClass) -> None:
    """Register ``env`` with Gymnasium as ``id``."""
    known = gym.registry.get(id)
    if known is not None and known.kwargs.get("env") == id:
        return  # registered by name before its module was imported
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
    """Register the environments of this library and of installed packages with Gymnasium. Idempotent."""
    envs.on_register = _register_in_gym
    for id in envs.names():
        _register_in_gym(id, id)


def make(
    num_envs: int | None = None,
    *,
    env: str | EnvClass,
    tasks: str | TaskSet | None = None,
    backend: str = "auto",
    reward: RewardName = "official",
    render_mode: str | None = None,
    **options: Any,
) -> TaskEnv | TaskVectorEnv:
    """Make one environment, or with ``num_envs`` (also 1) a batch. ``gym.make(id, ...)`` calls this function.

    Args:
        num_envs: None for one :class:`TaskEnv`, else the size of the batch.
        env: one of ``clawgym list envs``, ``package.module:Class``, or the class; ``gym.make`` passes it.
        tasks: a task set or its name (``clawgym tasks list``); by default the ``default_tasks`` of the class.
        backend: the sandbox backend: ``auto``, ``namespace``, ``chroot``, ``docker`` or ``ray``.
        reward: the score that is the reward of the last step: ``official``, ``strict``, ``corrected`` or ``checks``.
        render_mode: None, or a mode of the environment: ``ansi`` or ``rgb_array``; a single environment with pictures
            also has ``human``.
        options: ``autoreset_mode`` of a batch (:class:`TaskVectorEnv`), and the environment's own options.

    Raises:
        ValueError: an option or its value is unknown.
    """
    if num_envs is not None:
        return make_vector(
            num_envs, env=env, tasks=tasks, backend=backend, reward=reward, render_mode=render_mode, **options
        )
    from clawgym.envs._single import TaskEnv

    factory, tasks = _factory(env, tasks, options, reward, _SINGLE)
    return TaskEnv(factory, tasks, backend=backend, reward=reward, render_mode=render_mode)


def make_vector(
    num_envs: int = 1,
    *,
    env: str | EnvClass,
    tasks: str | TaskSet | None = None,
    backend: str = "auto",
    reward: RewardName = "official",
    autoreset_mode: AutoresetMode | str = "NextStep",
    render_mode: str | None = None,
    **options: Any,
) -> TaskVectorEnv:
    """Make a batch. ``gym.make_vec(id, ...)`` calls this function; :func:`make` describes the arguments."""
    from clawgym.envs._vector import TaskVectorEnv

    factory, tasks = _factory(env, tasks, options, reward, (*_SINGLE, "num_envs", "autoreset_mode"))
    return TaskVectorEnv(
        factory,
        num_envs,
        tasks,
        backend=backend,
        reward=reward,
        autoreset_mode=autoreset_mode,
        render_mode=render_mode,
    )


_SINGLE = ("tasks", "backend", "reward", "render_mode")


def _factory(
    env: str | EnvClass, tasks: str | TaskSet | None, options: dict[str, Any], reward: RewardName, known: Sequence[str]
) -> tuple[RunnerFactory, str | TaskSet]:
    """Return the runner factory of ``env`` with ``options``, and the tasks.

    Raises ValueError for an option that is neither an argument of the class nor in ``known``, and if no tasks are given
    and the class has no default ones.
    """
    from clawgym.envs._checks import check_reward
    from clawgym.envs._runner import SandboxRunnerFactory
    from clawgym.envs.env import SandboxEnv

    check_reward(reward)
    name = env if isinstance(env, str) else env.__name__
    found: Any = envs.get(env) if isinstance(env, str) else env
    taken = inspect.signature(found).parameters.values()
    if clash := {one.name for one in taken} & {"env", "num_envs", "autoreset_mode", *_SINGLE}:
        raise ValueError(f"{found!r} has arguments with reserved names: rename {sorted(clash)}")
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
        return SandboxRunnerFactory(made, partial(found, **options)), tasks
    if hasattr(made, "runner"):  # openclaw: the program drives the episodes, not the actions
        return made, tasks
    raise TypeError(f"{found!r} does not make a SandboxEnv: let the class extend clawgym.envs.SandboxEnv")
