"""What an environment is made of: a kit makes workers, a worker plays one episode at a time.

:class:`~clawgym.envs._single.TaskEnv` and :class:`~clawgym.envs._vector.TaskVectorEnv` are Gymnasium's contract over
any kit; :func:`clawgym.envs.register` gives one a name. docs/new-environment.md writes a whole one.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import gymnasium as gym

from clawgym.records import Episode, Task
from clawgym.sandbox import Backend

__all__ = ["EnvKit", "EnvWorker", "Reward", "StepResult"]

Reward = Literal["official", "strict", "corrected", "checks"]
"""What the last step pays: a score of the grading (``corrected``: ``strict`` where no floor is known), or the sum over
its named checks. Other steps pay 0."""
StepResult = tuple[dict[str, Any], float, bool, bool, dict[str, Any]]


class EnvWorker(Protocol):
    """At most one episode at a time; what breaks in it ends the episode, never the environment."""

    @property
    def last(self) -> Episode | None:
        """The finished episode."""
        ...

    async def reset(self, task: Task, seed: int, floor: float | None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin an episode. A host failure, or a file of the task that is gone or changed, is reported in
        ``info['error']``; the first step then ends the episode as ``infra``."""
        ...

    async def step(self, action: Any) -> StepResult:
        """One step with an action of the kit's space. Raises :class:`~clawgym.errors.ClawGymError` where no episode
        runs."""
        ...

    def forget(self) -> None:
        """Let go of everything, where the loop that could close it is gone."""
        ...

    async def close(self) -> None:
        """Drop the running episode, if any."""
        ...


class EnvKit(Protocol):
    """One kind of environment. Observations are dicts; text in them is a space of :class:`gymnasium.spaces.Text`."""

    action_space: gym.Space[Any]
    observation_space: gym.spaces.Dict
    render_mode: str
    """What :meth:`screen` makes: ``ansi`` or ``rgb_array``."""

    async def open(self, backend: Backend, num_envs: int) -> None:
        """Make ready what all ``num_envs`` workers share; once, before the first :meth:`worker`."""
        ...

    def worker(self) -> EnvWorker:
        """One more environment."""
        ...

    def screen(self, observation: dict[str, Any]) -> Any:
        """``observation`` for a person: text, or an image (uint8 of shape (height, width, 3))."""
        ...

    async def aclose(self) -> None:
        """Free what was shared, after the workers."""
        ...
