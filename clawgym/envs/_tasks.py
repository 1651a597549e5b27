"""Choose the task of an episode, by seed or by id."""

from __future__ import annotations

from typing import Any

import numpy as np

from clawgym.errors import TaskError
from clawgym.records import Task, TaskSet
from clawgym.registry import did_you_mean

__all__ = ["TaskChoice"]


class TaskChoice:
    """The tasks from which an environment draws. Tasks that cannot run here are not drawn."""

    def __init__(self, tasks: str | TaskSet) -> None:
        self.task_set = _load(tasks) if isinstance(tasks, str) else tasks
        self._supported = [task for task in self.task_set.tasks if not task.unsupported]
        if not self._supported:
            raise TaskError(f"task set {self.task_set.name!r} has no task that can run here: see `clawgym tasks list`")

    def pick(self, rng: np.random.Generator, options: dict[str, Any] | None, index: int) -> Task:
        """Return ``options['task_ids'][index]`` (round-robin), or a task drawn with ``rng`` for environment ``index``.

        Raises :class:`TaskError` for an id that is not in the set.
        """
        ids = (options or {}).get("task_ids")
        if ids is None:
            return self._supported[int(rng.integers(len(self._supported)))]
        name = str(ids[index % len(ids)])
        task = self.task_set.by_id.get(name)
        if task is None:
            hint = did_you_mean(name, self.task_set.by_id)
            raise TaskError(f"no task {name!r} in {self.task_set.name!r}.{hint} See `clawgym tasks show`")
        return task

    def baseline(self, task: Task) -> float | None:
        """Return the no-model baseline of the task, if it is known."""
        from clawgym.verifiers.baselines import known_baseline

        return known_baseline(task)


def _load(name: str) -> TaskSet:
    from clawgym.tasks.sets import load

    return load(name)
