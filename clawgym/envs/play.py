"""The attempt behind an environment that acts step by step: how it begins, what an action does to it, how it ends.

Invariant: at most one attempt at a time. What breaks in it ends the episode, never the environment.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from clawgym.envs.kit import Reward
from clawgym.errors import ClawGymError, InfraError, SandboxDied, TaskError
from clawgym.records import Episode, Observation, Outcome, Step, Task, ToolCall, VerifierResult
from clawgym.rollout import Attempt
from clawgym.rollout.attempt import utc_now
from clawgym.sandbox import Backend

__all__ = ["Play", "ending"]


class Play:
    """One environment's attempts, one after another."""

    def __init__(self, backend: Backend, reward: Reward) -> None:
        self.backend = backend
        self._reward: Reward = reward
        self.last: Episode | None = None
        """The finished episode."""
        self.attempt: Attempt | None = None
        """The running one."""
        self.count = 0
        """Actions so far."""
        self._most = 0
        self._deadline = 0.0
        self._floor: float | None = None
        self._dropping: asyncio.Future[Episode] | None = None
        """The end of the attempt before the running one."""

    async def begin(
        self, task: Task, seed: int, floor: float | None, prepare: Callable[[Attempt], Awaitable[None]] | None = None
    ) -> dict[str, Any]:
        """A fresh box for ``task``, once more where the host failed. Returns the info of ``reset``."""
        await self._gone()
        old, self.attempt = self.attempt, None
        try:
            return await self._begin(task, seed, floor, prepare)
        finally:
            if old is not None:  # nobody waits for its end
                self._dropping = asyncio.ensure_future(old.abandon())

    async def _begin(
        self, task: Task, seed: int, floor: float | None, prepare: Callable[[Attempt], Awaitable[None]] | None
    ) -> dict[str, Any]:
        self.count, self._most, self._floor = 0, task.limits.max_steps, floor
        info: dict[str, Any] = {"task_id": task.id, "task_hash": task.content_hash, "instruction": task.instruction}
        for retry in (True, False):
            attempt = self.attempt = Attempt(task, self.backend, "env", seed=seed, sample=0)
            try:
                await attempt.open()
                if prepare is not None:
                    await prepare(attempt)
                break
            except (InfraError, SandboxDied, TaskError) as error:
                if retry and not isinstance(error, TaskError):
                    await self.drop()
                    continue
                info["error"] = str(error)
                attempt.fail_infra(f"{'task' if isinstance(error, TaskError) else 'setup'}: {error}")
                break
            except BaseException:
                await self._interrupted(attempt)
                raise
        self._deadline = time.monotonic() + task.limits.agent_seconds
        return info

    def running(self) -> Attempt:
        """The attempt. Raises :class:`ClawGymError` where none runs."""
        if self.attempt is None:
            raise ClawGymError("the episode is over or was never started: call reset() first")
        return self.attempt

    async def act(self, work: Callable[[float], Awaitable[None]]) -> bool:
        """Carry out one action, which gets the seconds that are left; whether the episode is over by it."""
        attempt = self.running()
        left = self._deadline - time.monotonic()
        try:
            if left > 0:
                await work(left)
            if time.monotonic() >= self._deadline:
                attempt.stop, attempt.cause = "budget", "time"
        except SandboxDied as error:
            attempt.stop, attempt.cause = "error", error.cause
        except InfraError as error:
            attempt.fail_infra(f"host: {error}")
        except BaseException:
            await self._interrupted(attempt)
            raise
        return attempt.stop != "submitted" or attempt.failed_infra

    def record(
        self,
        said: str,
        calls: Sequence[ToolCall] = (),
        seen: Sequence[Observation] = (),
        reasoning: str | None = None,
    ) -> None:
        """Write an action and what came of it into the transcript."""
        self.running().steps.append(Step("agent", said, utc_now(), tuple(calls), tuple(seen), reasoning))

    def spent(self) -> bool:
        """Whether that was the last action that the task allows; then its budget ends the episode."""
        if self.count < self._most:
            return False
        attempt = self.running()
        attempt.stop, attempt.cause = "budget", "steps"
        return True

    async def end(self) -> tuple[float, bool, bool, dict[str, Any]]:
        """Grade what is there: reward, ``terminated``, ``truncated`` and info of the last step."""
        attempt, self.attempt = self.running(), None
        if attempt.failed_infra:
            self.last = await attempt.abandon()
        else:
            self.last = await attempt.finish(floor=self._floor, keep_workspace=False)
        return ending(self.last, cut=attempt.stop == "budget", reward=self._reward)

    def counts(self) -> dict[str, np.ndarray]:
        """``step`` and ``remaining_steps`` of an observation."""
        return {
            "step": np.array(self.count, dtype=np.int64),
            "remaining_steps": np.array(max(0, self._most - self.count), dtype=np.int64),
        }

    async def _interrupted(self, attempt: Attempt) -> None:
        """Ctrl-C in the middle of something: what state it is in nobody knows, so the episode is over."""
        if self.attempt is attempt:
            self.attempt = None
        await attempt.abandon()

    def forget(self) -> None:
        """Let go of everything, where the loop that could close it is gone."""
        self.attempt = None
        del self.backend

    async def drop(self) -> None:
        """Drop the running attempt, if any."""
        try:
            if self.attempt is not None:
                attempt, self.attempt = self.attempt, None
                await attempt.abandon()
        finally:
            await self._gone()

    async def _gone(self) -> None:
        dropping, self._dropping = self._dropping, None
        if dropping is not None:
            await dropping


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
