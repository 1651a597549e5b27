"""One environment over any :class:`~clawgym.envs._worker.Kit`, as Gymnasium wants it."""

from __future__ import annotations

from typing import Any

import gymnasium as gym

from clawgym.envs._checks import check_action, check_options
from clawgym.envs._human import Human
from clawgym.envs._runtime import runtime
from clawgym.envs._tasks import TaskChoice
from clawgym.envs._worker import Kit
from clawgym.records import Episode, TaskSet
from clawgym.rollout import RewardName

__all__ = ["TaskEnv", "checked_mode"]


def checked_mode(kit: Kit, mode: str | None) -> str | None:
    """Raises ValueError for a mode of rendering that ``kit`` does not have."""
    if mode not in (None, kit.render_mode):
        raise ValueError(
            f"render_mode={mode!r}: use {kit.render_mode!r}, or leave it out (`clawgym runs watch` shows it)"
        )
    return mode


def single_modes(kit: Kit) -> list[str]:
    """The modes of rendering of one environment: ``human`` too where it has pictures."""
    return ["human", kit.render_mode] if kit.render_mode == "rgb_array" else [kit.render_mode]


class TaskEnv(gym.Env[dict[str, Any], Any]):
    """Chooses tasks, and plays them one after another: :func:`clawgym.envs.make` has the arguments.

    ``reset(seed=...)`` chooses the task reproducibly; ``reset(options={"task_ids": ["..."]})`` names it. Other options,
    and actions that are not in the action space, raise ValueError.
    ``render_mode="human"`` shows each frame on a page of this machine, whose address is printed at the first reset.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi", "human", "rgb_array"]}  # noqa: RUF012  # Gymnasium's own declaration

    def __init__(
        self, kit: Kit, tasks: str | TaskSet, *, backend: str, reward: RewardName, render_mode: str | None
    ) -> None:
        modes = single_modes(kit)
        self.render_mode = render_mode if render_mode in modes else checked_mode(kit, render_mode)
        self._human = Human() if self.render_mode == "human" else None
        self.choice = TaskChoice(tasks)
        self.action_space = kit.action_space
        self.observation_space = kit.observation_space
        self._kit = kit
        self._backend_name: str | None = None
        self._runtime = runtime()
        made = self._runtime.acquire(backend)
        try:
            self._runtime.run(kit.open(made, 1))
        except BaseException:
            self._runtime.release(backend)
            raise
        self._backend_name = backend
        self._worker = kit.worker(reward)
        self._runtime.users.add(self)
        self.metadata = {"render_modes": modes, "isolation": self._runtime.run(made.probe()).as_dict()}
        self._screen: Any = None

    @property
    def episode(self) -> Episode | None:
        """The record of the last finished episode."""
        return self._worker.last

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        check_options(options, ("task_ids",), 1)
        super().reset(seed=seed)
        task = self.choice.pick(self.np_random, options, 0)
        episode_seed = int(self.np_random.integers(2**31))
        floor = self.choice.floor(task)
        observation, info = self._runtime.run(self._worker.reset(task, episode_seed, floor))
        self._show(observation, None)
        if self._human is not None:
            self._task, self._steps = task.id, 0
            self._human.show(self._task, 0, None, self._screen)
        return observation, info

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        check_action(self.action_space, action)
        result = self._runtime.run(self._worker.step(action))
        self._show(result[0], action)
        if self._human is not None:
            self._steps += 1
            self._human.show(self._task, self._steps, action, self._screen)
        return result

    def _show(self, observation: dict[str, Any], action: Any) -> None:
        if self.render_mode is not None:
            screen = self._kit.screen(observation)
            self._screen = f"$ {action}\n{screen}" if isinstance(screen, str) and action is not None else screen

    def render(self) -> Any:
        return self._screen if self.render_mode not in (None, "human") else None

    def close(self) -> None:
        if self._human is not None:
            self._human.close()
        if self._backend_name is None:
            return
        name, self._backend_name = self._backend_name, None
        self._runtime.users.discard(self)
        if self._runtime.usable:  # else the sandboxes are the other process's, or end with what held them
            self._runtime.run(self.drop())
            self._runtime.release(name)
        else:
            self._worker.forget()

    async def drop(self) -> None:
        """What :meth:`close` does on the loop."""
        try:
            await self._worker.close()
        finally:
            await self._kit.aclose()
