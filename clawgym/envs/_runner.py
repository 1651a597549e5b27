"""Run the episodes of environments: the protocols under the Gymnasium classes, and those for a
:class:`~clawgym.envs.env.SandboxEnv`.

Invariants: a runner has at most one attempt at a time. An error in it ends its episode, never the environment.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import gymnasium as gym
import numpy as np

from clawgym.envs.env import Observation, SandboxEnv
from clawgym.envs.spaces import blank, counter
from clawgym.errors import (
    ClawGymError,
    EngineError,
    InfraError,
    MissingDependency,
    SandboxDied,
    SandboxUnavailable,
    TaskError,
    UnsupportedTask,
    traceback_of,
)
from clawgym.records import Episode, Step, Task
from clawgym.records import Observation as Seen
from clawgym.records.atif import json_safe
from clawgym.rollout import Attempt, Ended, EpisodeRequest, RewardName, Stop
from clawgym.rollout.attempt import utc_now
from clawgym.sandbox import Backend
from clawgym.verifiers.diff import DIFF_FILE

__all__ = ["EpisodeRunner", "RunnerFactory", "SandboxEpisodeRunner", "SandboxRunnerFactory", "StepResult", "ending"]

StepResult = tuple[dict[str, Any], float, bool, bool, dict[str, Any]]
ENV_ERROR = "env-error"
"""Cause of an episode that ended with an exception of the environment's own code."""
_GRACE = 10.0
"""Seconds after the end of the time budget until an action is cancelled that ignores ``self.seconds``."""
_COUNTERS = ("step", "remaining_steps")
_FATAL = (MissingDependency, SandboxUnavailable, UnsupportedTask)
"""Errors that the caller has to repair: raised, not recorded in the episode."""

log = logging.getLogger(__name__)


class EpisodeRunner(Protocol):
    """Runs the episodes of one environment, one after another."""

    @property
    def last(self) -> Episode | None:
        """The last finished episode."""
        ...

    async def reset(self, task: Task, seed: int, baseline: float | None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin an episode and return the first observation and its info.

        A failure of the host, or a missing or changed file of the task, is reported in ``info['error']``; the first
        step then ends the episode as ``infra``.
        """
        ...

    async def step(self, action: Any) -> StepResult:
        """Take one action of the action space.

        Raises :class:`~clawgym.errors.ClawGymError` if no episode is running.
        """
        ...

    def discard(self) -> None:
        """Drop all references, if the loop that could close the runner is gone."""
        ...

    async def close(self) -> None:
        """End the running episode without grading, if there is one."""
        ...


class RunnerFactory(Protocol):
    """Makes the runners of a batch, and has the spaces of its environments."""

    action_space: gym.Space[Any]
    observation_space: gym.spaces.Dict
    render_mode: str

    async def open(self, backend: Backend, num_envs: int) -> None:
        """Prepare what all ``num_envs`` runners share. Called once, before the first :meth:`runner`."""
        ...

    def runner(self, reward: RewardName) -> EpisodeRunner: ...

    def frame(self, observation: dict[str, Any]) -> Any:
        """Render ``observation`` as text or an image, depending on :attr:`render_mode`."""
        ...

    async def aclose(self) -> None:
        """Close what the runners share. Called after they are closed."""
        ...


class SandboxRunnerFactory:
    """A :class:`RunnerFactory` for :class:`~clawgym.envs.env.SandboxEnv` objects.

    The first runner uses the environment ``first``; ``make`` makes those of the others.
    """

    def __init__(self, first: SandboxEnv, make: Callable[[], SandboxEnv]) -> None:
        self._first = first
        self._make = make
        self._unused = True
        self.action_space, spaces = _checked_spaces(self._first)
        self.observation_space = gym.spaces.Dict({**spaces, **{name: counter() for name in _COUNTERS}})
        self.render_mode = self._first.render_mode
        self._fields = tuple(spaces.items())

    async def open(self, backend: Backend, num_envs: int) -> None:
        self._shared = backend
        self._backend = self._first.sandboxes(backend, num_envs)

    def runner(self, reward: RewardName) -> SandboxEpisodeRunner:
        if self._unused:
            env, self._unused = self._first, False
        else:
            env = self._make()
            # Spaces of images are large: all environments share one.
            env.action_space, env.observation_space = self._first.action_space, self._first.observation_space
        return SandboxEpisodeRunner(env, self._fields, self._backend, reward)

    def frame(self, observation: dict[str, Any]) -> Any:
        return self._first.render({name: value for name, value in observation.items() if name not in _COUNTERS})

    async def aclose(self) -> None:
        if self._backend is not self._shared:
            await self._backend.aclose()


def _checked_spaces(env: SandboxEnv) -> tuple[gym.Space[Any], dict[str, gym.Space[Any]]]:
    name = type(env).__name__
    action, observation = getattr(env, "action_space", None), getattr(env, "observation_space", None)
    if not isinstance(action, gym.Space):
        raise ValueError(f"{name}.action_space must be a gymnasium.Space; it is {action!r}")
    if not isinstance(observation, gym.spaces.Dict):
        raise ValueError(f"{name}.observation_space must be a gymnasium.spaces.Dict; it is {observation!r}")
    for key, space in observation.items():
        if key in _COUNTERS:
            raise ValueError(f"{name}.observation_space has {key!r}, which the library adds: remove it")
        if not isinstance(space, gym.spaces.Text) and (space.shape is None or space.dtype is None):
            raise ValueError(
                f"{name}.observation_space[{key!r}] is {space}: use Text, Box, Discrete, MultiBinary or MultiDiscrete"
            )
    return action, dict(observation.items())


class SandboxEpisodeRunner:
    """The episodes of one :class:`~clawgym.envs.env.SandboxEnv`, one after another."""

    def __init__(
        self, env: SandboxEnv, fields: tuple[tuple[str, gym.Space[Any]], ...], backend: Backend, reward: RewardName
    ) -> None:
        self.env = env
        self.backend = backend
        self.last: Episode | None = None
        self.attempt: Attempt | None = None
        """The running attempt."""
        self._fields = fields
        self._converters = tuple((name, _converter(name, space)) for name, space in fields)
        self._acting: asyncio.Task[Any] | None = None
        """The task that carries out the current action."""
        self._cancelled: asyncio.Task[Any] | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._reward: RewardName = reward
        self._count = self._max_steps = 0
        self._deadline = self._command_seconds = 0.0
        self._seen: dict[str, Any] = {}
        """The last observation, without the counters; a step without a new observation repeats it."""
        self._closing: asyncio.Future[Ended] | None = None
        """The end of the previous attempt, in the background."""

    # -- reset

    async def reset(self, task: Task, seed: int, baseline: float | None) -> tuple[dict[str, Any], dict[str, Any]]:
        """See :class:`EpisodeRunner`. Raises what :meth:`~clawgym.envs.env.SandboxEnv.check` raises."""
        self.env.check(task)
        await self._wait_for_close()
        self._cancel_alarm()
        old, self.attempt = self.attempt, None
        try:
            info = await self._begin(task, seed, baseline)
        finally:
            if old is not None:  # in the background
                self._closing = asyncio.ensure_future(old.abandon())
        return self._observe(), info

    async def _begin(self, task: Task, seed: int, baseline: float | None) -> dict[str, Any]:
        """Open a sandbox for ``task``; try twice if the host fails. Returns the info of ``reset``."""
        self._count, self._max_steps = 0, task.limits.max_steps
        self._seen = {name: blank(space) for name, space in self._fields}
        info: dict[str, Any] = {"task_id": task.id, "task_hash": task.content_hash, "instruction": task.instruction}
        for retry in (True, False):
            request = EpisodeRequest(task=task, seed=seed, reward=self._reward, baseline=baseline, keep_workspace=False)
            attempt = self.attempt = Attempt(request, self.backend, "env")
            try:
                await attempt.open()
                await self._open(attempt, info)
                break
            except (InfraError, SandboxDied, TaskError) as error:
                if retry and not isinstance(error, TaskError):
                    await self.close()
                    continue
                info["error"] = str(error)
                attempt.fail_by(error, host="setup")
                break
            except BaseException:
                await self._interrupted(attempt)
                raise
        limits = task.limits
        self._deadline, self._command_seconds = time.monotonic() + limits.agent_seconds, limits.command_seconds
        # One timer per episode: a timer per action would take as long as the rest of a step.
        self._alarm = asyncio.get_running_loop().call_later(limits.agent_seconds + _GRACE, self._time_out)
        return info

    async def _open(self, attempt: Attempt, info: dict[str, Any]) -> None:
        env, task = self.env, attempt.task
        env.task, env.seed, env.steps, env.seconds = task, attempt.request.seed, 0, task.limits.setup_seconds
        env.info, env._attempt, env._submitted = {}, attempt, False
        try:
            async with asyncio.timeout(task.limits.setup_seconds):
                first = await env.open(attempt.sandbox)
            if first is not None:
                self._seen = self._checked(first)
            info |= env.info
        except (InfraError, SandboxDied, TaskError, *_FATAL):
            raise
        except Exception as error:
            info["error"] = self._failed(attempt, "open", error).error

    # -- step

    def running(self) -> Attempt:
        """Return the running attempt. Raises :class:`ClawGymError` if there is none."""
        if self.attempt is None:
            raise ClawGymError("the episode is over or was never started: call reset() first")
        return self.attempt

    async def step(self, action: Any) -> StepResult:
        """See :class:`EpisodeRunner`."""
        attempt, env = self.running(), self.env
        if attempt.stop is not None:  # it did not open
            return await self._end({})
        self._count += 1
        if isinstance(action, np.str_):
            action = str(action)
        env.steps, env.info, env._recorded = self._count, {}, False
        seen: str | None = None
        left = self._deadline - time.monotonic()
        try:
            if left > 0:
                env.seconds = min(left, self._command_seconds)
                self._acting = asyncio.current_task()
                try:
                    observation = await env.act(attempt.sandbox, action)
                finally:
                    self._acting = None
                self._seen = self._checked(observation)
                if not env._recorded:
                    shown = env.render(observation)
                    seen = shown if isinstance(shown, str) else None
            if time.monotonic() >= self._deadline:
                attempt.stop = Stop("budget", "time")
        except SandboxDied as error:
            attempt.stop = Stop("error", error.cause)
        except (EngineError, InfraError, TaskError) as error:
            attempt.fail_by(error)
        except _FATAL:
            await self._interrupted(attempt)
            raise
        except Exception as error:
            if self._cancelled is None:
                self._failed(attempt, "act", error)
        except BaseException:
            if self._cancelled is None or self._cancelled.uncancel():
                await self._interrupted(attempt)
                raise
            self._cancelled = None
            attempt.stop = Stop("budget", "time")
        if self._cancelled is not None:  # act() caught the cancellation
            self._cancelled.uncancel()
            self._cancelled = None
            attempt.stop = Stop("budget", "time")
        if not env._recorded:
            results = () if seen is None else (Seen(seen),)
            attempt.steps.append(Step("agent", _text(action), utc_now(), observations=results))
        if attempt.stop is None and env._submitted:
            attempt.stop = Stop("submitted")
        if attempt.stop is None and self._count >= self._max_steps:
            attempt.stop = Stop("budget", "steps")
        if attempt.stop is not None:
            return await self._end(env.info)
        return self._observe(), 0.0, False, False, env.info

    def _time_out(self) -> None:
        """Cancel the action that still runs after the time budget and the grace period."""
        if self._acting is not None:
            self._cancelled = self._acting
            self._acting.cancel()

    def _checked(self, observation: Observation) -> dict[str, Any]:
        """Convert ``observation`` to the types of its space. Raises ValueError if it is not in the space."""
        seen = {name: convert(observation[name]) for name, convert in self._converters}
        if len(seen) != len(observation):
            extra = sorted(observation.keys() - seen.keys())
            raise ValueError(f"the observation has {extra}, which observation_space does not have")
        return seen

    def _observe(self) -> dict[str, Any]:
        return {
            **self._seen,
            "step": np.array(self._count, dtype=np.int64),
            "remaining_steps": np.array(max(0, self._max_steps - self._count), dtype=np.int64),
        }

    # -- end of an episode

    async def _end(self, info: dict[str, Any]) -> StepResult:
        """End the episode and grade the workspace, unless an infrastructure error ended it."""
        self._cancel_alarm()
        attempt, self.attempt = self.running(), None
        stop = attempt.stop
        ended = await (attempt.abandon() if stop is not None and stop.kind == "infra" else attempt.finish())
        self.last = ended.episode
        if ended.episode.cause == ENV_ERROR:
            info = {**info, "error": ended.episode.error}
        return self._observe(), *ending(ended, info)

    def _failed(self, attempt: Attempt, where: str, error: Exception) -> Stop:
        """Fail the episode with ``error``, an exception of the environment's own code."""
        stop = attempt.stop = Stop("error", ENV_ERROR, traceback_of(error))
        name = type(self.env).__name__
        log.warning("%s.%s raised on task %s: the episode fails\n%s", name, where, attempt.task.id, stop.error)
        return stop

    async def _interrupted(self, attempt: Attempt) -> None:
        """End the episode after Ctrl-C: the state of the sandbox is unknown."""
        self._cancel_alarm()
        if self.attempt is attempt:
            self.attempt = None
        await attempt.abandon()

    def discard(self) -> None:
        """See :class:`EpisodeRunner`."""
        self.attempt = None
        self.env.__dict__.pop("_attempt", None)
        del self.backend

    async def close(self) -> None:
        """See :class:`EpisodeRunner`."""
        self._cancel_alarm()
        try:
            if self.attempt is not None:
                attempt, self.attempt = self.attempt, None
                await attempt.abandon()
        finally:
            await self._wait_for_close()

    def _cancel_alarm(self) -> None:
        self._cancelled = None
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    async def _wait_for_close(self) -> None:
        closing, self._closing = self._closing, None
        if closing is not None:
            await closing


def _converter(name: str, space: gym.Space[Any]) -> Callable[[Any], Any]:
    """Return the function that converts ``observation[name]`` to a member of ``space``, or raises ValueError."""

    def text(value: Any) -> str:
        if isinstance(value, str) and len(value) <= longest:
            return value
        what = f"text of {len(value)} characters" if isinstance(value, str) else repr(value)[:60]
        raise ValueError(f"observation[{name!r}] must be in {space}; it is {what}")

    def array(value: Any) -> np.ndarray:
        made = np.asarray(value, dtype=space.dtype)
        if made.shape != space.shape:
            raise ValueError(f"observation[{name!r}] must have the shape {space.shape}; it has {made.shape}")
        return made

    if isinstance(space, gym.spaces.Text):
        longest = space.max_length
        return text
    return space.dtype.type if isinstance(space, gym.spaces.Discrete) else array


def _text(action: Any) -> str:
    return action if isinstance(action, str) else json.dumps(json_safe(action), ensure_ascii=False)


def ending(ended: Ended, info: Mapping[str, Any]) -> tuple[float, bool, bool, dict[str, Any]]:
    """Return reward, ``terminated``, ``truncated`` and info of an episode's last step, whose own info is ``info``."""
    episode = ended.episode
    about: dict[str, Any] = {
        **info,
        "task_id": episode.task_id,
        "outcome": str(episode.outcome),
        "cause": episode.cause or "",
    }
    result = episode.result
    if result is not None:
        about |= {"checks": dict(result.checks), "official": result.official, "strict": result.strict}
        about |= {"tampered": result.tampered}
        if result.judged_by:
            about["judged_by"] = result.judged_by
        if result.corrected is not None:
            about["corrected"] = result.corrected
    if (diff := episode.files.get(DIFF_FILE)) is not None:
        about["diff"] = diff.decode("utf-8", "replace")
    return ended.reward or 0.0, not ended.truncated, ended.truncated, about
