"""N terminal environments in one process: :class:`~clawgym.envs._vector.TaskVectorEnv` over boxes with a shell."""

from __future__ import annotations

from gymnasium.vector import AutoresetMode

from clawgym.envs._kit import Reward
from clawgym.envs._vector import TaskVectorEnv
from clawgym.envs.terminal import TerminalKit
from clawgym.records import TaskSet

__all__ = ["TerminalVectorEnv"]


class TerminalVectorEnv(TaskVectorEnv):
    """See :class:`~clawgym.envs.terminal.TerminalEnv` for the arguments, actions and observations of one environment,
    and :class:`~clawgym.envs._vector.TaskVectorEnv` for ``num_envs``, ``autoreset_mode``, and what batches are.

    ``output`` and ``cwd`` are tuples of N str; ``exit_code``, ``step`` and ``remaining_steps`` int64 arrays of shape
    (N,).
    """

    def __init__(
        self,
        num_envs: int,
        tasks: str | TaskSet = "terminal-basic",
        *,
        backend: str = "auto",
        reward: Reward = "official",
        max_output: int = 65536 + 64,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        render_mode: str | None = None,
    ) -> None:
        kit = TerminalKit(max_output, reward)
        super().__init__(kit, num_envs, tasks, backend=backend, autoreset_mode=autoreset_mode, render_mode=render_mode)
