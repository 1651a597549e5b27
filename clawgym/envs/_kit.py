"""What an environment is made of: a kit makes workers, a worker plays one episode at a time.

:class:`~clawgym.envs._single.TaskEnv` and :class:`~clawgym.envs._vector.TaskVectorEnv` are Gymnasium's contract over
any kit. How an episode is paid and reported is here, so that it is the same in all of them.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import gymnasium as gym

from clawgym.records import Episode, Outcome, Task, VerifierResult
from clawgym.sandbox import Backend

__all__ = ["EnvKit", "EnvWorker", "Reward", "StepResult", "ending"]

Reward = Literal["official", "strict", "corrected", "checks"]
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

    async def step(self, action: str) -> StepResult:
        """One step. Raises :class:`~clawgym.errors.ClawGymError` where no episode runs."""
        ...

    def forget(self) -> None:
        """Let go of everything, where the loop that could close it is gone."""
        ...

    async def close(self) -> None:
        """Drop the running episode, if any."""
        ...


class EnvKit(Protocol):
    """One kind of environment. Observations are dicts; text in them is a space of :class:`gymnasium.spaces.Text`."""

    action_space: gym.spaces.Text
    observation_space: gym.spaces.Dict

    async def open(self, backend: Backend) -> None:
        """Make ready what all workers share; once, before the first :meth:`worker`."""
        ...

    def worker(self) -> EnvWorker:
        """One more environment."""
        ...

    def screen(self, observation: dict[str, Any]) -> str:
        """``observation`` for a person."""
        ...

    async def aclose(self) -> None:
        """Free what was shared, after the workers."""
        ...


def ending(episode: Episode, *, cut: bool, reward: Reward) -> tuple[float, bool, bool, dict[str, Any]]:
    """Reward, ``terminated``, ``truncated`` and info of the last step. ``cut`` says that a budget ended the work."""
    truncated = episode.outcome in (Outcome.TRUNCATED, Outcome.INFRA)
    truncated = truncated or (episode.outcome is Outcome.SOLVED and cut)
    info: dict[str, Any] = {
        "task_id": episode.task_id,
        "outcome": str(episode.outcome),
        "cause": episode.cause or "",
    }
    result = episode.result
    if result is not None:
        info |= {"checks": dict(result.checks), "official": result.official, "strict": result.strict}
        info |= {"tampered": result.tampered}
        if result.corrected is not None:
            info["corrected"] = result.corrected
    return _pay(result, reward), not truncated, truncated, info


def _pay(result: VerifierResult | None, reward: Reward) -> float:
    if result is None:
        return 0.0
    if reward == "checks":
        return float(sum(result.checks.values()))
    value = getattr(result, reward)
    return float(result.strict if value is None else value)
