"""N environments in one process, driven by one loop: lockstep ``step``, or ``send`` and ``recv``.

Both a ``gym.Env`` (which ``gym.make`` insists on) and a ``VectorEnv`` (so that ``gymnasium.wrappers.vector`` takes it).
One slow environment stalls nobody: with ``send`` / ``recv`` whoever is ready is served.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from clawgym.envs._answers import Answers
from clawgym.envs._checks import autoreset_mode_of, check_options, one_action_each
from clawgym.envs._runtime import runtime
from clawgym.envs._single import checked_mode
from clawgym.envs._tasks import TaskChoice
from clawgym.envs._worker import Kit, StepResult
from clawgym.errors import ClawGymError
from clawgym.records import Episode, Task, TaskSet
from clawgym.rollout import RewardName

__all__ = ["TaskVectorEnv"]


class TaskVectorEnv(gym.Env[Any, Any], VectorEnv[Any, Any, np.ndarray]):
    """N environments: what ``gym.make(id, num_envs=N)`` and ``gym.make_vec`` return.

    Args:
        kit: what makes them.
        reward: what the last step of an episode pays.
        num_envs: how many; 1 is a batch of one.
        autoreset_mode: ``NEXT_STEP`` (default): the step after an episode's end ignores its action and returns the
            first observation of the next one; ``SAME_STEP``: the last step returns it at once, the final observation
            is in ``info['final_obs']``; ``DISABLED``: call ``reset(options={"reset_mask": mask})``.

    Batched: text is a tuple of N str, numbers are int64 arrays of shape (N,); rewards float64 (N,), ``terminated`` and
    ``truncated`` bool (N,). ``info`` values are arrays of shape (N,) with a mask ``_<key>``.
    """

    metadata: dict[str, Any] = {  # noqa: RUF012
        "render_modes": ["ansi", "rgb_array"],
        "autoreset_mode": AutoresetMode.NEXT_STEP,
    }

    def __init__(
        self,
        kit: Kit,
        num_envs: int,
        tasks: str | TaskSet,
        *,
        backend: str,
        reward: RewardName,
        autoreset_mode: AutoresetMode | str,
        render_mode: str | None,
    ) -> None:
        if num_envs < 1:
            raise ValueError(f"num_envs={num_envs}: ask for one environment or more")
        self.num_envs = num_envs
        self.render_mode = checked_mode(kit, render_mode)
        self.closed = False
        self.autoreset_mode = autoreset_mode_of(autoreset_mode)
        self.choice = TaskChoice(tasks)
        self.single_action_space = kit.action_space
        self.single_observation_space = kit.observation_space
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self._kit = kit
        self._runtime = runtime()
        made = self._runtime.acquire(backend)
        try:
            self._runtime.run(kit.open(made, num_envs))
        except BaseException:
            self._runtime.release(backend)
            raise
        self._backend_name: str | None = backend
        self._workers = [kit.worker(reward) for _ in range(num_envs)]
        self._runtime.users.add(self)
        isolation = self._runtime.run(made.probe()).as_dict()
        self.metadata = {
            "render_modes": [kit.render_mode],
            "autoreset_mode": self.autoreset_mode,
            "isolation": isolation,
        }
        self._rngs: list[np.random.Generator] = []
        self._options: dict[str, Any] | None = None
        self._over = np.zeros(num_envs, dtype=np.bool_)
        self._answers: Answers[StepResult] = Answers()
        self._busy: set[int] = set()
        self._seen: list[dict[str, Any] | None] = [None] * num_envs

    # -- Gymnasium

    @property
    def unwrapped(self) -> TaskVectorEnv:
        return self

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start every environment, or those in ``options['reset_mask']`` (bool array of shape (N,)).

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
                    f"options['reset_mask'] must be a bool array of shape ({self.num_envs},), one True at least"
                )
        self._options = options
        if seed is not None or not self._rngs:
            seeds = _seeds(seed, self.num_envs)
            fresh = [np.random.default_rng(s) for s in seeds]
            self._rngs = [f if mask[i] or not self._rngs else self._rngs[i] for i, f in enumerate(fresh)]
        chosen = np.flatnonzero(mask)
        plans = [self._next(int(i)) for i in chosen]

        async def all_of_them() -> list[tuple[dict[str, Any], dict[str, Any]]]:
            work = [asyncio.create_task(self._workers[i].reset(*p)) for i, p in zip(chosen, plans, strict=True)]
            try:
                return await asyncio.gather(*work)
            except BaseException:  # nobody goes on by itself
                for task in work:
                    task.cancel()
                await asyncio.gather(*work, return_exceptions=True)
                raise

        infos: dict[str, Any] = {}
        for i, (observation, info) in zip(chosen, self._runtime.run(all_of_them()), strict=True):
            self._seen[i] = observation
            self._over[i] = False
            _add(infos, info, int(i), self.num_envs)
        if any(o is None for o in self._seen):
            raise gym.error.ResetNeeded("the first reset must start every environment: leave reset_mask out")
        return self._batch(range(self.num_envs)), infos

    def step(  # pyright: ignore[reportIncompatibleMethodOverride]  # Env calls it action
        self, actions: Any
    ) -> tuple[dict[str, Any], np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """One action for each environment (a sequence, or what the batched action space samples); waits for all.

        Raises ValueError for anything else, before any environment has acted.
        """
        ids = range(self.num_envs)
        self._send(one_action_each(actions, ids, self.single_action_space, self.action_space), ids)
        env_ids, observation, rewards, terminated, truncated, info = self.recv(self.num_envs)
        assert len(env_ids) == self.num_envs
        return observation, rewards, terminated, truncated, info

    # -- asynchronous

    def send(self, actions: Sequence[Any], env_ids: Sequence[int]) -> None:
        """Start one action in each of ``env_ids``; returns at once.

        Raises ValueError for an action that is not in the space of one environment, or an index that no environment
        has, and :class:`gymnasium.error.AlreadyPendingCallError` for an environment that still works.
        """
        ids = [int(i) for i in env_ids]
        if unknown := [i for i in ids if not 0 <= i < self.num_envs]:
            raise ValueError(f"env_ids {unknown} are not environments: use 0 to {self.num_envs - 1}")
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
        self._runtime.start([self._one(i, action) for i, action in zip(ids, actions, strict=True)])
        self._busy.update(ids)

    def recv(
        self, min_envs: int = 1, timeout: float | None = None
    ) -> tuple[np.ndarray, dict[str, Any], np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Wait until ``min_envs`` environments have answered and return all that have, in the order of their index.

        Returns ``(env_ids, observation, reward, terminated, truncated, info)``; every array has shape (M,), M the
        number of answers. Raises TimeoutError after ``timeout`` seconds (nothing is lost), ValueError if fewer work.
        """
        if min_envs > len(self._busy) or min_envs < 1:
            raise ValueError(f"recv({min_envs}) while {len(self._busy)} environments work: send() first")
        deadline = None if timeout is None else time.monotonic() + timeout
        answers: dict[int, StepResult] = {}
        for i, answer in self._answers.wait(min_envs, deadline, self._runtime.ensure).items():
            if isinstance(answer, BaseException):  # the others are there for the next call
                self._answers.drop([i])
                self._busy.discard(i)
                raise answer
            answers[i] = answer
        ids = sorted(answers)
        self._answers.drop(ids)
        self._busy.difference_update(ids)
        infos: dict[str, Any] = {}
        for row, i in enumerate(ids):
            observation, _, terminated, truncated, info = answers[i]
            self._seen[i] = observation
            # In SAME_STEP the next episode has begun already.
            self._over[i] = (terminated or truncated) and self.autoreset_mode is not AutoresetMode.SAME_STEP
            _add(infos, info, row, len(ids))
        return (
            np.array(ids, dtype=np.int64),
            self._batch(ids),
            np.array([answers[i][1] for i in ids], dtype=np.float64),
            np.array([answers[i][2] for i in ids], dtype=np.bool_),
            np.array([answers[i][3] for i in ids], dtype=np.bool_),
            infos,
        )

    # -- the rest

    @property
    def episodes(self) -> list[Episode | None]:
        """The record of each environment's last finished episode."""
        return [worker.last for worker in self._workers]

    def render(self) -> tuple[Any, ...] | None:  # type: ignore[override]
        if self.render_mode is None or any(o is None for o in self._seen):
            return None
        return tuple(self._kit.screen(o) for o in self._seen if o is not None)

    def close_extras(self, **kwargs: Any) -> None:
        """Called by ``close()``: drop running attempts and the sandboxes they hold."""
        if self._backend_name is None:
            return
        name, self._backend_name = self._backend_name, None
        self._runtime.users.discard(self)
        if self._runtime.usable:
            self._runtime.run(self.drop())
            self._runtime.release(name)
        else:  # the sandboxes are the other process's, or end with what held them
            for worker in self._workers:
                worker.forget()

    async def drop(self) -> None:
        """What :meth:`close_extras` does on the loop."""
        try:
            await asyncio.gather(*(worker.close() for worker in self._workers))
        finally:
            await self._kit.aclose()

    def close(self, **kwargs: Any) -> None:
        if not self.closed:
            self.close_extras(**kwargs)
            self.closed = True

    def __del__(self) -> None:
        # VectorEnv would close here, on whatever thread collects: sandboxes end with the process instead.
        pass

    def _next(self, i: int) -> tuple[Task, int, float | None]:
        task = self.choice.pick(self._rngs[i], self._options, i)
        return task, int(self._rngs[i].integers(2**31)), self.choice.floor(task)

    async def _one(self, i: int, action: Any) -> None:
        worker = self._workers[i]
        try:
            if self._over[i]:  # NEXT_STEP
                observation, info = await worker.reset(*self._next(i))
                answer: StepResult = (observation, 0.0, False, False, info)
            else:
                answer = await worker.step(action)
                if (answer[2] or answer[3]) and self.autoreset_mode is AutoresetMode.SAME_STEP:
                    observation, info = await worker.reset(*self._next(i))
                    info |= {"final_obs": answer[0], "final_info": answer[4]}
                    answer = (observation, answer[1], answer[2], answer[3], info)
            self._answers.put(i, answer)
        except asyncio.CancelledError:
            self._answers.put(i, ClawGymError(f"environment {i} was interrupted: reset() it"))
        except BaseException as error:
            self._answers.put(i, error)

    def _batch(self, ids: Sequence[int]) -> dict[str, Any]:
        rows = [self._seen[i] for i in ids]
        batched: dict[str, Any] = {}
        for key in rows[0] or ():
            values = [row[key] for row in rows if row is not None]
            space = self._kit.observation_space[key]
            batched[key] = tuple(values) if isinstance(space, gym.spaces.Text) else np.stack(values, dtype=space.dtype)
        return batched


def _seeds(seed: int | list[int | None] | None, count: int) -> list[int | None]:
    """One seed an environment: ``seed + i``, or the list as given."""
    if seed is None:
        return [None] * count
    if isinstance(seed, int | np.integer):
        return [int(seed) + i for i in range(count)]
    if len(seed) != count:
        raise ValueError(f"{len(seed)} seeds for {count} environments: give one for each")
    return list(seed)


_KINDS: dict[type, type] = {bool: np.bool_, float: np.float64, int: np.int64}


def _kind(value: Any) -> type:
    """The dtype of an info array that holds ``value``."""
    if type(value) is int and not -(2**63) <= value < 2**63:
        return object
    return _KINDS.get(type(value), object)


def _add(infos: dict[str, Any], info: dict[str, Any], row: int, count: int) -> None:
    """Put one environment's info into arrays of shape (count,) with their masks."""
    for key, value in info.items():
        kind = _kind(value)
        if key not in infos:
            infos[key] = np.zeros(count, dtype=kind) if kind is not object else np.full(count, None, dtype=object)
            infos[f"_{key}"] = np.zeros(count, dtype=np.bool_)
        elif infos[key].dtype != kind:  # environments disagree
            infos[key] = infos[key].astype(object)
        infos[key][row] = value
        infos[f"_{key}"][row] = True
