"""Gymnasium environments. Importing :mod:`clawgym` registers the ids; the classes load when one is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gymnasium as gym

if TYPE_CHECKING:
    from clawgym.envs.openclaw import OpenClawEnv, OpenClawVectorEnv
    from clawgym.envs.swe import SweEnv, SweVectorEnv
    from clawgym.envs.terminal import TerminalEnv
    from clawgym.envs.toolcall import ToolCallEnv, ToolCallVectorEnv
    from clawgym.envs.vector import TerminalVectorEnv

__all__ = [
    "make_openclaw",
    "make_openclaw_vector",
    "make_swe",
    "make_swe_vector",
    "make_terminal",
    "make_terminal_vector",
    "make_toolcall",
    "make_toolcall_vector",
    "register",
]


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


def make_openclaw(num_envs: int | None = None, **kwargs: Any) -> OpenClawEnv | OpenClawVectorEnv:
    """One environment, or with ``num_envs`` (also 1) a batch."""
    if num_envs is None:
        from clawgym.envs.openclaw import OpenClawEnv

        return OpenClawEnv(**kwargs)
    return make_openclaw_vector(num_envs, **kwargs)


def make_openclaw_vector(num_envs: int = 1, **kwargs: Any) -> OpenClawVectorEnv:
    """A batch of environments."""
    from clawgym.envs.openclaw import OpenClawVectorEnv

    return OpenClawVectorEnv(num_envs, **kwargs)


def make_swe(num_envs: int | None = None, **kwargs: Any) -> SweEnv | SweVectorEnv:
    """One environment, or with ``num_envs`` (also 1) a batch."""
    if num_envs is None:
        from clawgym.envs.swe import SweEnv

        return SweEnv(**kwargs)
    return make_swe_vector(num_envs, **kwargs)


def make_swe_vector(num_envs: int = 1, **kwargs: Any) -> SweVectorEnv:
    """A batch of environments."""
    from clawgym.envs.swe import SweVectorEnv

    return SweVectorEnv(num_envs, **kwargs)


def make_toolcall(num_envs: int | None = None, **kwargs: Any) -> ToolCallEnv | ToolCallVectorEnv:
    """One environment, or with ``num_envs`` (also 1) a batch."""
    if num_envs is None:
        from clawgym.envs.toolcall import ToolCallEnv

        return ToolCallEnv(**kwargs)
    return make_toolcall_vector(num_envs, **kwargs)


def make_toolcall_vector(num_envs: int = 1, **kwargs: Any) -> ToolCallVectorEnv:
    """A batch of environments."""
    from clawgym.envs.toolcall import ToolCallVectorEnv

    return ToolCallVectorEnv(num_envs, **kwargs)


def register() -> None:
    """Register the ids with Gymnasium (idempotent).

    The checking and ordering wrappers of ``gym.make`` are for single environments and would hide the batch.
    """
    for name in ("terminal", "openclaw", "swe", "toolcall"):
        if f"ClawGym/{name}-v0" not in gym.registry:
            gym.register(
                f"ClawGym/{name}-v0",
                entry_point=f"clawgym.envs:make_{name}",
                vector_entry_point=f"clawgym.envs:make_{name}_vector",
                order_enforce=False,
                disable_env_checker=True,
            )
