"""TRL: environments of this library for its ``GRPOTrainer``.

    GRPOTrainer(model, rewards, train_dataset=Dataset.from_list(prompts(TASKS)), environment_factory=shells(TASKS), ...)

TRL samples the tokens, calls :meth:`TrlShell.bash` as the model's tool, and trains. Sandboxes, limits and grading are
those of ``gym.make``. Nothing of TRL is imported here.

Invariant: every episode that TRL began is graded once, when its reward is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import gymnasium as gym

from clawgym.records import TaskSet

__all__ = ["TrlShell", "prompts", "rewards", "shells"]

_THREADS = 32
"""Episodes that are graded at a time; the sandboxes run on one event loop."""


class TrlShell:
    """``ClawGym/terminal-v0``, whose public methods TRL offers to the model.

    Args:
        tasks: a task set or its name.
        options: options of ``gym.make``, such as ``backend`` and ``reward``.
    """

    def __init__(self, tasks: str | TaskSet, **options: Any) -> None:
        self._env = gym.make("ClawGym/terminal-v0", tasks=tasks, **options)
        self._over = True
        self._reward: float | None = None

    def reset(self, task_id: str, **columns: Any) -> None:
        """Start an episode. The arguments are the columns of the dataset; ``seed`` is used, if there is one."""
        self._env.reset(seed=columns.get("seed"), options={"task_ids": [task_id]})
        self._over, self._reward = False, None

    def bash(self, command: str) -> str:
        """Run a command in a persistent bash shell. Working directory, variables and background jobs stay.

        Args:
            command: Any bash text, one line or many.
        """
        if self._over:
            return "[the episode is over]"
        return self._step(command)["output"]

    def _step(self, action: str) -> dict[str, Any]:
        observation, reward, terminated, truncated, info = self._env.step(action)
        self._over = terminated or truncated
        if self._over:
            self._reward = None if info.get("outcome") == "infra" else float(reward)
        return observation

    def _grade(self) -> float | None:
        if not self._over:
            self._step("submit")
        return self._reward


def shells(tasks: str | TaskSet, **options: Any) -> Callable[[], TrlShell]:
    """Return an ``environment_factory``, which makes a :class:`TrlShell` with these arguments."""
    return partial(TrlShell, tasks, **options)


def prompts(tasks: TaskSet) -> list[dict[str, Any]]:
    """Return the rows of a dataset, one for each task that can run here: ``prompt``, a chat, and ``task_id``."""
    return [
        {"prompt": [{"role": "user", "content": task.instruction}], "task_id": task.id}
        for task in tasks.tasks
        if not task.unsupported
    ]


def rewards(environments: Sequence[TrlShell], **columns: Any) -> list[float | None]:
    """The reward function: grades the episodes of a batch, many at a time.

    None after an infrastructure error: TRL leaves such an episode out of the reward.
    """
    with ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(TrlShell._grade, environments))
