"""``ClawGym/terminal-v0``: a task, a real box, a shell; the action is a command, ``submit`` has the work graded."""

from __future__ import annotations

from typing import Any

import gymnasium as gym

from clawgym.envs._runtime import runtime
from clawgym.envs._tasks import TaskChoice
from clawgym.envs._worker import SUBMIT, Reward, Worker
from clawgym.envs.spaces import terminal_action_space, terminal_observation_space
from clawgym.records import Episode, TaskSet

__all__ = ["SUBMIT", "TerminalEnv"]


class TerminalEnv(gym.Env[dict[str, Any], str]):
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

    metadata: dict[str, Any] = {"render_modes": ["ansi"]}  # noqa: RUF012  # Gymnasium's own declaration

    def __init__(
        self,
        tasks: str | TaskSet = "terminal-basic",
        *,
        backend: str = "auto",
        reward: Reward = "official",
        max_output: int = 65536 + 64,
        render_mode: str | None = None,
    ) -> None:
        self.render_mode = render_mode
        self.choice = TaskChoice(tasks)
        self.action_space = terminal_action_space()
        self.observation_space = terminal_observation_space(max_output)
        self._backend_name: str | None = None
        self._runtime = runtime()
        made = self._runtime.acquire(backend)
        self._backend_name = backend
        self._worker = Worker(made, max_output, reward)
        self.metadata = {**self.metadata, "isolation": self._runtime.run(made.probe()).as_dict()}
        self._screen = ""

    @property
    def episode(self) -> Episode | None:
        """The record of the last finished episode."""
        return self._worker.last

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        task = self.choice.pick(self.np_random, options, 0)
        episode_seed = int(self.np_random.integers(2**31))
        floor = self.choice.floor(task)
        observation, info = self._runtime.run(self._worker.reset(task, episode_seed, floor))
        self._screen = observation["output"]
        return observation, info

    def step(self, action: str) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        result = self._runtime.run(self._worker.step(str(action)))
        self._screen = f"$ {action}\n{result[0]['output']}"
        return result

    def render(self) -> str | None:  # type: ignore[override]
        return self._screen if self.render_mode == "ansi" else None

    def close(self) -> None:
        if self._backend_name is not None:
            name, self._backend_name = self._backend_name, None
            if self._runtime.usable:  # else the boxes are the other process's, or end with what held them
                self._runtime.run(self._worker.close())
                self._runtime.release(name)
            else:
                self._worker.forget()
