"""A single Gymnasium environment over a :class:`~clawgym.envs._runner.RunnerFactory`."""

from __future__ import annotations

from typing import Any

import gymnasium as gym

from clawgym.envs._checks import check_action, check_options
from clawgym.envs._human import HumanRenderer
from clawgym.envs._runner import RunnerFactory
from clawgym.envs._runtime import runtime
from clawgym.envs._snapshots import EnvSnapshot, Method, SnapshotStore, checked_method
from clawgym.envs._tasks import TaskChoice
from clawgym.records import Episode, TaskSet
from clawgym.rollout import RewardName

__all__ = ["TaskEnv", "checked_mode"]


def checked_mode(factory: RunnerFactory, mode: str | None) -> str | None:
    """Return ``mode``. Raises ValueError if ``factory`` does not have this render mode."""
    if mode not in (None, factory.render_mode):
        raise ValueError(
            f"render_mode={mode!r}: use {factory.render_mode!r}, or leave it out (`clawgym view` shows it)"
        )
    return mode


def single_modes(factory: RunnerFactory) -> list[str]:
    """Return the render modes of a single environment: also ``human`` if it renders images."""
    return ["human", factory.render_mode] if factory.render_mode == "rgb_array" else [factory.render_mode]


class TaskEnv(gym.Env[dict[str, Any], Any]):
    """A single environment: each episode is an attempt at one task. :func:`clawgym.envs.make` makes it.

    ``reset(seed=...)`` draws the task reproducibly; ``reset(options={"task_ids": ["..."]})`` names it. Other options,
    and actions outside the action space, raise ValueError. ``render_mode="human"`` shows each frame on a local web
    page, whose URL is printed at the first reset.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi", "human", "rgb_array"]}  # noqa: RUF012  # Gymnasium's own declaration

    def __init__(
        self, factory: RunnerFactory, tasks: str | TaskSet, *, backend: str, reward: RewardName, render_mode: str | None
    ) -> None:
        modes = single_modes(factory)
        self.render_mode = render_mode if render_mode in modes else checked_mode(factory, render_mode)
        self._human = HumanRenderer() if self.render_mode == "human" else None
        self.choice = TaskChoice(tasks)
        self.action_space = factory.action_space
        self.observation_space = factory.observation_space
        self._factory = factory
        self._backend_name: str | None = None
        self._runtime = runtime()
        made = self._runtime.acquire(backend)
        try:
            self._runtime.run(factory.open(made, 1))
        except BaseException:
            self._runtime.release(backend)
            raise
        self._backend_name = backend
        self._runner = factory.runner(reward)
        self._runtime.users.add(self)
        self.metadata = {"render_modes": modes, "isolation": self._runtime.run(made.probe()).as_dict()}
        self._screen: Any = None
        self._snapshots = SnapshotStore(self._runtime, 1, self._runner.drop)

    @property
    def episode(self) -> Episode | None:
        """The record of the last finished episode."""
        return self._runner.last

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        check_options(options, ("task_ids",), 1)
        super().reset(seed=seed)
        task = self.choice.pick(self.np_random, options, 0)
        episode_seed = int(self.np_random.integers(2**31))
        baseline = self.choice.baseline(task)
        observation, info = self._runtime.run(self._runner.reset(task, episode_seed, baseline))
        self._began(observation, task.id, 0)
        return observation, info

    def _began(self, observation: dict[str, Any], task_id: str, steps: int) -> None:
        self._show(observation, None)
        if self._human is not None:
            self._task, self._steps = task_id, steps
            self._human.show(self._task, steps, None, self._screen)

    def snapshot(self, *, method: Method | None = None) -> EnvSnapshot:
        """Save the running episode, which continues: :meth:`restore` goes back to it as often as needed.

        Args:
            method: ``fork`` saves the files of the sandbox and the state of its shell. ``replay`` saves the actions,
                which are repeated in a new sandbox. None: ``fork`` if the environment can, else ``replay``.

        Raises :class:`~clawgym.errors.SnapshotRefused` if no episode is running, if its state cannot be saved, for
        example because programs run that a fork would not have, and if 64 snapshots are open.
        """
        checked_method(method)
        return self._runtime.run(self._snapshots.take([self._runner.snapshot(method)]))[0]

    def restore(self, snapshot: EnvSnapshot) -> tuple[dict[str, Any], dict[str, Any]]:
        """End the running episode without grading, and continue from ``snapshot``.

        Returns the last observation before the snapshot, and the info of its ``reset``; ``info['restored']`` says how
        it was restored. The tasks of later resets do not change.

        Raises :class:`~clawgym.errors.SnapshotRefused` if the state would not be the same; then no episode is running.
        """
        saved = self._snapshots.saved(snapshot)
        observation, info = self._runtime.run(self._runner.restore(saved))
        self._began(observation, snapshot.task_id, snapshot.step)
        return observation, info

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        check_action(self.action_space, action)
        result = self._runtime.run(self._runner.step(action))
        self._show(result[0], action)
        if self._human is not None:
            self._steps += 1
            self._human.show(self._task, self._steps, action, self._screen)
        return result

    def _show(self, observation: dict[str, Any], action: Any) -> None:
        if self.render_mode is not None:
            screen = self._factory.frame(observation)
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
        if self._runtime.usable:  # otherwise the sandboxes belong to the parent process or have ended
            self._runtime.run(self.shut_down())
            self._runtime.release(name)
        else:
            self._runner.discard()

    async def shut_down(self) -> None:
        """The part of :meth:`close` that runs on the loop."""
        try:
            await self._runner.close()
            await self._snapshots.aclose()
        finally:
            await self._factory.aclose()
