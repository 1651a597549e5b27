"""``ClawGym/terminal-v0``: a task, a real box, a shell; the action is a command, ``submit`` has the work graded."""

from __future__ import annotations

from typing import Any

import gymnasium as gym

from clawgym.envs._kit import Reward
from clawgym.envs._single import TaskEnv
from clawgym.envs._worker import SUBMIT, Worker
from clawgym.envs.spaces import terminal_action_space, terminal_observation_space
from clawgym.records import TaskSet
from clawgym.sandbox import Backend

__all__ = ["SUBMIT", "TerminalEnv", "TerminalKit"]


class TerminalKit:
    """Boxes with a shell (:class:`~clawgym.envs._kit.EnvKit`)."""

    def __init__(self, max_output: int, reward: Reward) -> None:
        self.action_space: gym.spaces.Text = terminal_action_space()
        self.observation_space = terminal_observation_space(max_output)
        self._max_output = max_output
        self._reward: Reward = reward

    async def open(self, backend: Backend) -> None:
        self._backend = backend

    def worker(self) -> Worker:
        return Worker(self._backend, self._max_output, self._reward)

    def screen(self, observation: dict[str, Any]) -> str:
        return observation["output"]

    async def aclose(self) -> None:
        pass


class TerminalEnv(TaskEnv):
    """One terminal environment.

    Args:
        tasks: a task set or the name of one (``clawgym tasks list``).
        backend: ``auto``, ``namespace``, ``chroot`` or ``docker``.
        reward: what the last step pays: ``official``, ``strict``, ``corrected`` (``strict`` where no floor is
            known), or ``checks``, the sum over the named checks. Other steps pay 0.
        render_mode: ``ansi`` or None.

    Action: a bash command, or ``"submit"``. Observation: see
    :func:`~clawgym.envs.spaces.terminal_observation_space`; after ``reset`` its ``output`` is the instruction.
    ``terminated`` on submit (or a broken box), ``truncated`` when the budget of steps or seconds is used up, or the
    host failed. The last ``info`` holds ``outcome``, ``cause``, ``checks``, ``official``, ``strict``, ``tampered``.

    ``reset(seed=...)`` chooses the task reproducibly; ``reset(options={"task_ids": ["..."]})`` names it.
    """

    def __init__(
        self,
        tasks: str | TaskSet = "terminal-basic",
        *,
        backend: str = "auto",
        reward: Reward = "official",
        max_output: int = 65536 + 64,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(TerminalKit(max_output, reward), tasks, backend=backend, render_mode=render_mode)
