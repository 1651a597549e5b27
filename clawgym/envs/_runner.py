"""Run the episodes of environments: the protocols under the Gymnasium classes, and those for a
:class:`~clawgym.envs.env.SandboxEnv`.

Invariants: a runner has at most one attempt at a time. An error in it ends its episode, never the environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import gymnasium as gym
import numpy as np

from clawgym.envs._snapshots import Method, SavedEpisode
from clawgym.envs.env import Observation, SandboxEnv
from clawgym.envs.spaces import blank, counter
from clawgym.errors import (
    ClawGymError,
    EngineError,
    InfraError,
    MissingDependency,
    SandboxDied,
    SandboxError,
    SandboxUnavailable,
    SnapshotRefused,
    TaskError,
    UnsupportedTask,
    traceback_of,
)
from clawgym.records import Episode, Step, Task
from clawgym.records import Observation as Seen
from clawgym.records.atif import json_safe
from clawgym.rollout import Attempt, Ended, EpisodeRequest, RewardName, Stop
from clawgym.rollout.attempt import utc_now
from clawgym.sandbox import Backend, Sandbox
from clawgym.verifiers.diff import DIFF_FILE
from clawgym.visible import visible

__all__ = ["EpisodeRunner", "RunnerFactory", "SandboxEpisodeRunner", "SandboxRunnerFactory", "StepResult", "ending"]

StepResult = tuple[dict[str, Any], float, bool, bool, dict[str, Any]]
ENV_ERROR = "env-error"
"""Cause of an episode that ended with an exception of the environment's own code."""
RESTORED: Mapping[Method, str] = {
    "fork": "fork: the files and the shell; no programs, jobs or open files, and another sequence of $RANDOM",
    "replay": "replay: the actions were repeated, with the same observations",
}
"""What ``info["restored"]`` says."""
_GRACE = 10.0
"""Seconds after the end of the time budget until an action is cancelled that ignores ``self.seconds``."""
_COUNTERS = ("step", "remaining_steps")
_FATAL = (MissingDependency, SandboxUnavailable, SnapshotRefused, UnsupportedTask)
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

    async def snapshot(self, method: Method | None) -> SavedEpisode:
        """Save the running episode, which continues. Raises :class:`~clawgym.errors.SnapshotRefused` if that cannot be
        done."""
        ...

    async def restore(self, saved: SavedEpisode) -> tuple[dict[str, Any], dict[str, Any]]:
        """End the running episode without grading, and continue from ``saved``. Returns the last observation and info.

        Failures of the host are reported as by :meth:`reset`. Raises :class:`~clawgym.errors.SnapshotRefused` if the
        state would not be the same; then no episode runs.
        """
        ...

    async def drop(self, saved: SavedEpisode) -> None:
        """Free the files of ``saved``."""
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
        self._info: dict[str, Any] = {}
        """The info of ``reset``."""
        self._actions: list[Any] = []
        self._digests: list[int] = []
        """A hash of the observation after each action."""

    # -- reset

    async def reset(self, task: Task, seed: int, baseline: float | None) -> tuple[dict[str, Any], dict[str, Any]]:
        """See :class:`EpisodeRunner`. Raises what :meth:`~clawgym.envs.env.SandboxEnv.check` raises."""
        self.env.check(task)
        info = await self._replaced(task, seed, baseline, None)
        return self._observe(), info

    async def _replaced(
        self, task: Task, seed: int, baseline: float | None, saved: SavedEpisode | None
    ) -> dict[str, Any]:
        """End the running episode without grading, and begin one. Returns the info of ``reset``."""
        await self._wait_for_close()
        self._cancel_alarm()
        old, self.attempt = self.attempt, None
        try:
            return await self._begin(task, seed, baseline, saved)
        finally:
            if old is not None:  # in the background
                self._closing = asyncio.ensure_future(old.abandon())

    async def _begin(self, task: Task, seed: int, baseline: float | None, saved: SavedEpisode | None) -> dict[str, Any]:
        """Open a sandbox for ``task``, a fork if ``saved`` is one; try twice if the host fails. Returns the info of
        ``reset``."""
        self._count, self._max_steps = 0, task.limits.max_steps
        self._actions, self._digests = [], []
        self._seen = {name: blank(space) for name, space in self._fields}
        info: dict[str, Any] = {"task_id": task.id, "task_hash": task.content_hash, "instruction": task.instruction}
        for retry in (True, False):
            request = EpisodeRequest(task=task, seed=seed, reward=self._reward, baseline=baseline, keep_workspace=False)
            attempt = self.attempt = Attempt(request, self.backend, "env")
            try:
                await attempt.open(saved and saved.attempt)
                await self._open(attempt, info, saved)
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
        self._command_seconds = task.limits.command_seconds
        self._give_time(task.limits.agent_seconds)
        self._info = info
        return info

    def _give_time(self, seconds: float) -> None:
        """Set the time budget that is left."""
        self._cancel_alarm()
        self._deadline = time.monotonic() + seconds
        # One timer per episode: a timer per action would take as long as the rest of a step.
        self._alarm = asyncio.get_running_loop().call_later(max(seconds, 0.0) + _GRACE, self._time_out)

    async def _open(self, attempt: Attempt, info: dict[str, Any], saved: SavedEpisode | None) -> None:
        env, task = self.env, attempt.task
        env.task, env.seed, env.steps, env.seconds = task, attempt.request.seed, 0, task.limits.setup_seconds
        env.info, env._attempt, env._submitted = {}, attempt, False
        try:
            async with asyncio.timeout(task.limits.setup_seconds):
                if saved is not None and saved.method == "fork":
                    return await self._load(attempt.sandbox, saved)
                first = await env.open(attempt.sandbox)
            if first is not None:
                self._seen = self._checked(first)
            info |= env.info
        except (InfraError, SandboxDied, TaskError, *_FATAL):
            raise
        except Exception as error:
            info["error"] = self._failed(attempt, "open", error).error

    # -- snapshots

    async def snapshot(self, method: Method | None) -> SavedEpisode:
        """See :class:`EpisodeRunner`."""
        attempt, env = self.attempt, self.env
        if attempt is None or attempt.stop is not None:
            raise SnapshotRefused("no episode is running: take the snapshot between reset() and the last step")
        forks = method == "fork" or (method is None and env.forks)
        if forks and not env.forks:
            raise SnapshotRefused("a fork has files alone, and this environment has programs: use method='replay'")
        state: Any = None
        try:
            async with asyncio.timeout(attempt.task.limits.setup_seconds):
                if forks and (names := await attempt.sandbox.programs()):
                    shown = visible(", ".join(sorted(set(names))))[:200]
                    raise SnapshotRefused(
                        f"a fork does not have the programs that run in the sandbox ({shown}): end them first, or use "
                        "method='replay'"
                    )
                if forks:
                    state = await env.save(attempt.sandbox)
                saved = await attempt.save(files=forks)
        except TimeoutError:
            raise SnapshotRefused("the snapshot took too long: raise limits.setup_seconds of the task") from None
        except SandboxDied as error:
            raise SnapshotRefused("the sandbox is gone: the next step ends the episode") from error
        except SandboxError as error:
            raise SnapshotRefused(f"the sandbox cannot be saved ({error})") from error
        return SavedEpisode(
            method="fork" if forks else "replay",
            attempt=saved,
            seed=attempt.request.seed,
            baseline=attempt.request.baseline,
            info=dict(self._info),
            seen=dict(self._seen),
            actions=tuple(self._actions),
            digests=tuple(self._digests),
            seconds_left=self._deadline - time.monotonic(),
            state=state,
        )

    async def restore(self, saved: SavedEpisode) -> tuple[dict[str, Any], dict[str, Any]]:
        """See :class:`EpisodeRunner`."""
        info = await self._replaced(saved.attempt.task, saved.seed, saved.baseline, saved)
        attempt = self.running()
        if attempt.stop is not None:
            return self._observe(), info
        if saved.method == "replay":
            await self._replay(attempt, saved)
        self._count, self._seen = len(saved.actions), dict(saved.seen)
        self._actions, self._digests = list(saved.actions), list(saved.digests)
        self._info = dict(saved.info)
        self.env.steps = self._count
        self._give_time(saved.seconds_left)
        return self._observe(), {**saved.info, "restored": RESTORED[saved.method]}

    async def _load(self, sandbox: Sandbox, saved: SavedEpisode) -> None:
        try:
            await self.env.load(sandbox, saved.state)
        except SandboxDied:
            raise
        except SandboxError as error:
            raise SnapshotRefused(f"the snapshot cannot be restored ({error}): use method='replay'") from error

    async def _replay(self, attempt: Attempt, saved: SavedEpisode) -> None:
        """Repeat the actions of ``saved``. Each has to give the same observation as before."""
        for number, (action, digest) in enumerate(zip(saved.actions, saved.digests, strict=True), 1):
            await self.step(action)
            if self.attempt is not attempt or self._digests[-1] != digest:
                await self.close()
                raise SnapshotRefused(
                    f"task {attempt.task.id}: action {number} had another result when it was repeated: an episode that "
                    "depends on time or chance cannot be replayed, so use method='fork' or reset()"
                )
        attempt.steps[:] = saved.attempt.steps

    async def drop(self, saved: SavedEpisode) -> None:
        """See :class:`EpisodeRunner`."""
        if saved.attempt.snapshot is not None:
            with contextlib.suppress(InfraError):  # closing the backend removes it
                await self.backend.drop(saved.attempt.snapshot)

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
        self._actions.append(action)
        self._digests.append(_digest(self._seen))
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


def _digest(seen: Mapping[str, Any]) -> int:
    """A hash of an observation, good in this process."""
    return hash(tuple(value if isinstance(value, str) else value.tobytes() for value in seen.values()))


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
