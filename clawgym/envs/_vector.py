"""N environments in one process, driven by one event loop: with ``step`` together, or with ``send`` and ``recv`` one by
one, so that a slow environment does not block the others.

The class is both a ``gym.Env``, which ``gym.make`` requires, and a ``VectorEnv``, which ``gymnasium.wrappers.vector``
requires.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from clawgym.envs._checks import autoreset_mode_of, check_options, one_action_each
from clawgym.envs._results import Results
from clawgym.envs._runner import RunnerFactory, StepResult
from clawgym.envs._runtime import runtime
from clawgym.envs._single import checked_mode
from clawgym.envs._snapshots import EnvSnapshot, Method, SnapshotStore, checked_method
from clawgym.envs._tasks import TaskChoice
from clawgym.errors import ClawGymError
from clawgym.records import Episode, Task, TaskSet
from clawgym.rollout import RewardName

__all__ = ["TaskVectorEnv"]


class TaskVectorEnv(gym.Env[Any, Any], VectorEnv[Any, Any, np.ndarray]):
    """A batch of N environments, as ``gym.make(id, num_envs=N)`` and ``gym.make_vec`` return it.

    Args:
        factory: makes the episode runners of the environments.
        num_envs: the size of the batch; 1 is a batch of one.
        tasks: a task set or its name.
        backend: the name of the sandbox backend.
        reward: the score that is the reward of an episode's last step.
        autoreset_mode: ``NEXT_STEP`` (default): the step after an episode's end ignores its action and returns the
            first observation of the next episode. ``SAME_STEP``: the last step returns that observation at once, and
            the final observation is in ``info['final_obs']``. ``DISABLED``: call
            ``reset(options={"reset_mask": mask})``.
        render_mode: None, or the render mode of the environment.

    Batches: text is a tuple of N str, arrays get a first axis of length N; rewards are float64 of shape (N,),
    ``terminated`` and ``truncated`` bool of shape (N,). ``info`` values are arrays of shape (N,) with a mask
    ``_<key>``.
    """

    metadata: dict[str, Any] = {  # noqa: RUF012
        "render_modes": ["ansi", "rgb_array"],
        "autoreset_mode": AutoresetMode.NEXT_STEP,
    }

    def __init__(
        self,
        factory: RunnerFactory,
        num_envs: int,
        tasks: str | TaskSet,
        *,
        backend: str,
        reward: RewardName,
        autoreset_mode: AutoresetMode | str,
        render_mode: str | None,
    ) -> None:
        if num_envs < 1:
            raise ValueError(f"num_envs={num_envs}: give 1 or more")
        self.num_envs = num_envs
        self.render_mode = checked_mode(factory, render_mode)
        self.closed = False
        self.autoreset_mode = autoreset_mode_of(autoreset_mode)
        self.choice = TaskChoice(tasks)
        self.single_action_space = factory.action_space
        self.single_observation_space = factory.observation_space
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self._factory = factory
        self._runtime = runtime()
        made = self._runtime.acquire(backend)
        try:
            self._runtime.run(factory.open(made, num_envs))
        except BaseException:
            self._runtime.release(backend)
            raise
        self._backend_name: str | None = backend
        self._runners = [factory.runner(reward) for _ in range(num_envs)]
        self._runtime.users.add(self)
        isolation = self._runtime.run(made.probe()).as_dict()
        self.metadata = {
            "render_modes": [factory.render_mode],
            "autoreset_mode": self.autoreset_mode,
            "isolation": isolation,
        }
        self._rngs: list[np.random.Generator] = []
        self._options: dict[str, Any] | None = None
        self._over = np.zeros(num_envs, dtype=np.bool_)
        self._results: Results[StepResult] = Results()
        self._busy: set[int] = set()
        self._seen: list[dict[str, Any] | None] = [None] * num_envs
        self._snapshots = SnapshotStore(self._runtime, num_envs, self._runners[0].drop)

    # -- Gymnasium

    @property
    def unwrapped(self) -> TaskVectorEnv:
        return self

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start an episode in every environment, or in those of ``options['reset_mask']`` (bool array of shape (N,)).

        ``options['task_ids']`` names the tasks (round-robin), also for the autoresets that follow. Raises ValueError
        for other options.
        """
        check_options(options, ("task_ids", "reset_mask"), self.num_envs)
        if self._busy:
            raise gym.error.AlreadyPendingCallError("reset while steps are under way: recv() them first", "reset")
        mask = np.ones(self.num_envs, dtype=np.bool_)
        if options and "reset_mask" in options:
            mask = np.asarray(options["reset_mask"])
            if mask.shape != (self.num_envs,) or mask.dtype != np.bool_ or not mask.any():
                raise ValueError(
                    f"options['reset_mask'] must be a bool array of shape ({self.num_envs},) with at least one True"
                )
        self._options = options
        if seed is not None or not self._rngs:
            seeds = _seeds(seed, self.num_envs)
            fresh = [np.random.default_rng(s) for s in seeds]
            self._rngs = [f if mask[i] or not self._rngs else self._rngs[i] for i, f in enumerate(fresh)]
        chosen = [int(i) for i in np.flatnonzero(mask)]
        infos = self._begin(chosen, [self._runners[i].reset(*self._plan(i)) for i in chosen])
        if any(o is None for o in self._seen):
            raise gym.error.ResetNeeded("the first reset must start every environment: leave reset_mask out")
        return self._batch(range(self.num_envs)), infos

    def _begin(
        self, ids: Sequence[int], works: Sequence[Coroutine[Any, Any, tuple[dict[str, Any], dict[str, Any]]]]
    ) -> dict[str, Any]:
        """Wait for the episodes that ``works`` begin in the environments ``ids``, and return the infos of the batch."""

        async def begin_all() -> list[tuple[dict[str, Any], dict[str, Any]]]:
            tasks = [asyncio.create_task(work) for work in works]
            try:
                return await asyncio.gather(*tasks)
            except BaseException:  # stop the others too
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                raise

        infos: dict[str, Any] = {}
        for i, (observation, info) in zip(ids, self._runtime.run(begin_all()), strict=True):
            self._seen[i] = observation
            self._over[i] = False
            _add(infos, info, i, self.num_envs)
        return infos

    # -- snapshots

    def snapshot(self, env_ids: Sequence[int] | None = None, *, method: Method | None = None) -> list[EnvSnapshot]:
        """Save the running episodes of ``env_ids`` (None: of all), which continue; one snapshot for each.

        ``method`` and what is raised: see :meth:`TaskEnv.snapshot`; 64 snapshots for each environment can be open. If
        one is refused, none is taken.
        """
        checked_method(method)
        ids = self._idle(env_ids, "snapshot")
        return self._runtime.run(self._snapshots.take([self._runners[i].snapshot(method) for i in ids]))

    def restore(
        self, snapshots: EnvSnapshot | Sequence[EnvSnapshot], env_ids: Sequence[int] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Continue from ``snapshots`` in the environments ``env_ids`` (None: in all).

        Args:
            snapshots: one for each of ``env_ids``, of any environments of this batch; or a single one, from which all
                of them branch.
            env_ids: the environments. Their running episodes end without grading.

        Returns:
            Observations of the whole batch, and infos of the restored environments, as ``reset`` does.

        Raises:
            SnapshotRefused: a state would not be the same. Then ``reset`` the environments ``env_ids``.
        """
        ids = self._idle(env_ids, "restore")
        each = [snapshots] * len(ids) if isinstance(snapshots, EnvSnapshot) else list(snapshots)
        if len(each) != len(ids):
            raise ValueError(f"{len(each)} snapshots for {len(ids)} environments: give one for each, or a single one")
        saved = [self._snapshots.saved(one) for one in each]
        infos = self._begin(ids, [self._runners[i].restore(one) for i, one in zip(ids, saved, strict=True)])
        return self._batch(range(self.num_envs)), infos

    def _idle(self, env_ids: Sequence[int] | None, call: str) -> list[int]:
        """``env_ids`` as a list. Raises unless each is an environment that is not at work."""
        ids = self._checked_ids(range(self.num_envs) if env_ids is None else env_ids)
        if not self._rngs:
            raise gym.error.ResetNeeded(f"call reset() before {call}()")
        if busy := self._busy.intersection(ids):
            raise gym.error.AlreadyPendingCallError(f"environments {sorted(busy)} still work: recv() them first", call)
        if len(set(ids)) < len(ids):
            raise ValueError(f"env_ids {ids}: name each environment once")
        return ids

    def _checked_ids(self, env_ids: Sequence[int]) -> list[int]:
        ids = [int(i) for i in env_ids]
        if unknown := [i for i in ids if not 0 <= i < self.num_envs]:
            raise ValueError(f"env_ids {unknown} are not environments: use 0 to {self.num_envs - 1}")
        return ids

    def step(  # pyright: ignore[reportIncompatibleMethodOverride]  # Env calls it action
        self, actions: Any
    ) -> tuple[dict[str, Any], np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Take one action in each environment, and wait for all.

        ``actions`` is a sequence of N actions, or a member of the batched action space. Raises ValueError for anything
        else, before any environment has acted.
        """
        ids = range(self.num_envs)
        self._send(one_action_each(actions, ids, self.single_action_space, self.action_space), ids)
        env_ids, observation, rewards, terminated, truncated, info = self.recv(self.num_envs)
        assert len(env_ids) == self.num_envs
        return observation, rewards, terminated, truncated, info

    # -- asynchronous

    def send(self, actions: Sequence[Any], env_ids: Sequence[int]) -> None:
        """Start one action in each of ``env_ids`` and return at once.

        Raises:
            ValueError: an action is not in ``single_action_space``, or there is no environment with this index.
            gymnasium.error.AlreadyPendingCallError: an environment still works on its last action.
        """
        ids = self._checked_ids(env_ids)
        self._send(one_action_each(actions, ids, self.single_action_space), ids)

    def _send(self, actions: Sequence[Any], ids: Sequence[int]) -> None:
        if not self._rngs:
            raise gym.error.ResetNeeded("call reset() before the first step")
        if twice := self._busy.intersection(ids):
            raise gym.error.AlreadyPendingCallError(
                f"environments {sorted(twice)} still work: recv() them first", "send"
            )
        if len(set(ids)) < len(ids):
            raise ValueError(f"env_ids {ids}: name each environment once")
        for i in ids:
            if self._over[i] and self.autoreset_mode is AutoresetMode.DISABLED:
                raise gym.error.ResetNeeded(f"environment {i} is over: reset(options={{'reset_mask': ...}}) first")
        self._runtime.start([self._advance(i, action) for i, action in zip(ids, actions, strict=True)])
        self._busy.update(ids)

    def recv(
        self, min_envs: int = 1, timeout: float | None = None
    ) -> tuple[np.ndarray, dict[str, Any], np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Wait until ``min_envs`` environments have finished their action, and return the results of all that have.

        Returns:
            ``(env_ids, observation, reward, terminated, truncated, info)`` in the order of the indexes; arrays have a
            first axis of length M, the number of results.

        Raises:
            TimeoutError: after ``timeout`` seconds; no result is lost.
            ValueError: fewer than ``min_envs`` environments work.
        """
        if min_envs > len(self._busy) or min_envs < 1:
            raise ValueError(f"recv({min_envs}) while {len(self._busy)} environments work: send() first")
        deadline = None if timeout is None else time.monotonic() + timeout
        results: dict[int, StepResult] = {}
        for i, result in self._results.wait(min_envs, deadline, self._runtime.ensure).items():
            if isinstance(result, BaseException):  # the other results stay for the next call
                self._results.remove([i])
                self._busy.discard(i)
                raise result
            results[i] = result
        ids = sorted(results)
        self._results.remove(ids)
        self._busy.difference_update(ids)
        infos: dict[str, Any] = {}
        for row, i in enumerate(ids):
            observation, _, terminated, truncated, info = results[i]
            self._seen[i] = observation
            # In SAME_STEP the next episode has already begun.
            self._over[i] = (terminated or truncated) and self.autoreset_mode is not AutoresetMode.SAME_STEP
            _add(infos, info, row, len(ids))
        return (
            np.array(ids, dtype=np.int64),
            self._batch(ids),
            np.array([results[i][1] for i in ids], dtype=np.float64),
            np.array([results[i][2] for i in ids], dtype=np.bool_),
            np.array([results[i][3] for i in ids], dtype=np.bool_),
            infos,
        )

    # -- records, rendering, closing

    @property
    def episodes(self) -> list[Episode | None]:
        """The record of each environment's last finished episode."""
        return [runner.last for runner in self._runners]

    def render(self) -> tuple[Any, ...] | None:  # type: ignore[override]
        if self.render_mode is None or any(o is None for o in self._seen):
            return None
        return tuple(self._factory.frame(o) for o in self._seen if o is not None)

    def close_extras(self, **kwargs: Any) -> None:
        """Called by ``close()``: end running episodes and close their sandboxes."""
        if self._backend_name is None:
            return
        name, self._backend_name = self._backend_name, None
        self._runtime.users.discard(self)
        if self._runtime.usable:
            self._runtime.run(self.shut_down())
            self._runtime.release(name)
        else:  # the sandboxes belong to the parent process or have ended
            for runner in self._runners:
                runner.discard()

    async def shut_down(self) -> None:
        """The part of :meth:`close_extras` that runs on the loop."""
        try:
            await asyncio.gather(*(runner.close() for runner in self._runners))
            await self._snapshots.aclose()
        finally:
            await self._factory.aclose()

    def close(self, **kwargs: Any) -> None:
        if not self.closed:
            self.close_extras(**kwargs)
            self.closed = True

    def __del__(self) -> None:
        # VectorEnv would close here, on the thread of the garbage collector. The process's end closes the sandboxes.
        pass

    def _plan(self, i: int) -> tuple[Task, int, float | None]:
        task = self.choice.pick(self._rngs[i], self._options, i)
        return task, int(self._rngs[i].integers(2**31)), self.choice.baseline(task)

    async def _advance(self, i: int, action: Any) -> None:
        runner = self._runners[i]
        try:
            if self._over[i]:  # NEXT_STEP
                observation, info = await runner.reset(*self._plan(i))
                result: StepResult = (observation, 0.0, False, False, info)
            else:
                result = await runner.step(action)
                if (result[2] or result[3]) and self.autoreset_mode is AutoresetMode.SAME_STEP:
                    observation, info = await runner.reset(*self._plan(i))
                    info |= {"final_obs": result[0], "final_info": result[4]}
                    result = (observation, result[1], result[2], result[3], info)
            self._results.put(i, result)
        except asyncio.CancelledError:
            self._results.put(i, ClawGymError(f"environment {i} was interrupted: reset() it"))
        except BaseException as error:
            self._results.put(i, error)

    def _batch(self, ids: Sequence[int]) -> dict[str, Any]:
        rows = [self._seen[i] for i in ids]
        batched: dict[str, Any] = {}
        for key in rows[0] or ():
            values = [row[key] for row in rows if row is not None]
            space = self._factory.observation_space[key]
            batched[key] = tuple(values) if isinstance(space, gym.spaces.Text) else np.stack(values, dtype=space.dtype)
        return batched


def _seeds(seed: int | list[int | None] | None, count: int) -> list[int | None]:
    """Return one seed per environment: ``seed + i``, or the list as given."""
    if seed is None:
        return [None] * count
    if isinstance(seed, int | np.integer):
        return [int(seed) + i for i in range(count)]
    if len(seed) != count:
        raise ValueError(f"{len(seed)} seeds for {count} environments: give one for each")
    return list(seed)


_KINDS: dict[type, type] = {bool: np.bool_, float: np.float64, int: np.int64}


def _kind(value: Any) -> type:
    """Return the dtype of an info array for ``value``."""
    if type(value) is int and not -(2**63) <= value < 2**63:
        return object
    return _KINDS.get(type(value), object)


def _add(infos: dict[str, Any], info: dict[str, Any], row: int, count: int) -> None:
    """Add one environment's info to arrays of shape (count,) and their masks."""
    for key, value in info.items():
        kind = _kind(value)
        if key not in infos:
            infos[key] = np.zeros(count, dtype=kind) if kind is not object else np.full(count, None, dtype=object)
            infos[f"_{key}"] = np.zeros(count, dtype=np.bool_)
        elif infos[key].dtype != kind:  # environments have values of different types
            infos[key] = infos[key].astype(object)
        infos[key][row] = value
        infos[f"_{key}"][row] = True
