"""Gymnasium environments. Importing :mod:`clawgym` registers the ids; the classes load when one is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gymnasium as gym

if TYPE_CHECKING:
    from clawgym.envs.terminal import TerminalEnv
    from clawgym.envs.vector import TerminalVectorEnv

__all__ = ["make_terminal", "make_terminal_vector", "register"]


def make_terminal(num_envs: int | None = None, **kwargs: Any) -> TerminalEnv | TerminalVectorEnv:
    """One environment, or with ``num_envs`` (also 1) a batch."""
    if num_envs is None:
        from clawgym.envs.terminal import TerminalEnv

        return TerminalEnv(**kwargs)
    return make_terminal_vector(num_envs, **kwargs)


def make_terminal_vector(num_envs: int = 1, **kwargs: Any) -> TerminalVectorEnv:
    """A batch of environments."""
    from clawgym.envs.vector import TerminalVectorEnv

    return TerminalVectorEnv(num_envs, **kwargs)


def register() -> None:
    """Register the ids with Gymnasium (idempotent).

    The checking and ordering wrappers of ``gym.make`` are for single environments and would hide the batch.
    """
    if "ClawGym/terminal-v0" in gym.registry:
        return
    gym.register(
        "ClawGym/terminal-v0",
        entry_point="clawgym.envs:make_terminal",
        vector_entry_point="clawgym.envs:make_terminal_vector",
        order_enforce=False,
        disable_env_checker=True,
    )
