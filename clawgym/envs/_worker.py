"""One terminal episode behind ``reset`` and ``step``, as coroutines; the environments are thin faces of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from clawgym.envs._kit import Reward, StepResult
from clawgym.envs._play import Play
from clawgym.errors import SandboxDied, SandboxError
from clawgym.records import Episode, Observation, Step, Task, ToolCall
from clawgym.rollout import Attempt
from clawgym.rollout._attempt import utc_now
from clawgym.sandbox import Backend, Shell

__all__ = ["SUBMIT", "Worker"]

SUBMIT = "submit"
"""The action that ends an episode and has it graded."""


class Worker:
    """One environment (:class:`~clawgym.envs._kit.EnvWorker`)."""

    def __init__(self, backend: Backend, max_output: int, reward: Reward) -> None:
        self.max_output = max_output
        self._play = Play(backend, reward)
        self._shell: Shell | None = None

    @property
    def last(self) -> Episode | None:
        """The finished episode."""
        return self._play.last

    async def reset(self, task: Task, seed: int, floor: float | None) -> tuple[dict[str, Any], dict[str, Any]]:
        """A fresh box for ``task``, and its shell. See :class:`~clawgym.envs._kit.EnvWorker`."""
        self._shell = None

        async def prepare(attempt: Attempt) -> None:
            self._shell = await attempt.box.shell()

        info = await self._play.begin(task, seed, floor, prepare)
        return self._observe(task.instruction, 0, task.workspace), info

    async def step(self, action: str) -> StepResult:
        """One command, or :data:`SUBMIT`."""
        attempt, shell = self._play.running(), self._shell
        if attempt.failed_infra or shell is None:
            return await self._end("", 1, attempt.task.workspace)
        self._play.count += 1
        if action.strip() == SUBMIT:
            return await self._end("", 0, attempt.task.workspace)
        call = ToolCall(f"step-{self._play.count}", "bash", {"command": action})
        output, code, cwd = "", 1, attempt.task.workspace

        async def command(left: float) -> None:
            nonlocal output, code, cwd
            try:
                done = await shell.run(action, timeout=min(left, attempt.task.limits.command_seconds))
                output, code, cwd = done.text[: self.max_output], done.exit_code, done.cwd
            except SandboxDied:
                raise
            except SandboxError as error:  # refused (a NUL character, for one): the box still works
                output = f"[error: {error}]"

        over = await self._play.act(command)
        attempt.steps.append(Step("agent", "", utc_now(), (call,), (Observation(output, call.id),)))
        if over or self._play.spent():
            return await self._end(output, code, cwd)
        return self._observe(output, code, cwd), 0.0, False, False, {}

    async def _end(self, output: str, code: int, cwd: str) -> StepResult:
        self._shell = None
        paid, terminated, truncated, info = await self._play.end()
        return self._observe(output, code, cwd), paid, terminated, truncated, info

    def _observe(self, output: str, code: int, cwd: str) -> dict[str, Any]:
        return {
            "output": output[: self.max_output],
            "exit_code": np.int64(code),
            "cwd": cwd[:4096],
            **self._play.counts(),
        }

    def forget(self) -> None:
        """Let go of everything, where the loop that could close it is gone."""
        self._shell = None
        self._play.forget()

    async def close(self) -> None:
        """Drop the running attempt, if any."""
        self._shell = None
        await self._play.drop()
