"""One terminal episode behind ``reset`` and ``step``, as coroutines; the environments are thin faces of it."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from clawgym.envs._kit import Reward, StepResult, ending
from clawgym.errors import ClawGymError, InfraError, SandboxDied, SandboxError, TaskError
from clawgym.records import Episode, Observation, Step, Task, ToolCall
from clawgym.rollout import Attempt
from clawgym.rollout._attempt import utc_now
from clawgym.sandbox import Backend, Shell

__all__ = ["SUBMIT", "Worker"]

SUBMIT = "submit"
"""The action that ends an episode and has it graded."""


class Worker:
    """At most one attempt at a time. A box that breaks ends the episode, never the environment."""

    def __init__(self, backend: Backend, max_output: int, reward: Reward) -> None:
        self.backend = backend
        self.max_output = max_output
        self.reward: Reward = reward
        self.last: Episode | None = None
        """The finished episode."""
        self._attempt: Attempt | None = None
        self._shell: Shell | None = None
        self._count = 0
        self._deadline = 0.0
        self._floor: float | None = None

    async def reset(self, task: Task, seed: int, floor: float | None) -> tuple[dict[str, Any], dict[str, Any]]:
        """A fresh box for ``task``. See :class:`~clawgym.envs._kit.EnvWorker`."""
        await self.close()
        self._count, self._floor = 0, floor
        info: dict[str, Any] = {"task_id": task.id, "task_hash": task.content_hash, "instruction": task.instruction}
        for retry in (True, False):
            attempt = self._attempt = Attempt(task, self.backend, "env", seed=seed, sample=0)
            try:
                await attempt.open()
                self._shell = await attempt.box.shell()
                break
            except (InfraError, SandboxDied, TaskError) as error:
                if retry and not isinstance(error, TaskError):
                    await self.close()
                    continue
                info["error"] = str(error)
                attempt.fail_infra(f"{'task' if isinstance(error, TaskError) else 'setup'}: {error}")
                break
            except BaseException:
                await self._interrupted(attempt)
                raise
        self._deadline = time.monotonic() + task.limits.agent_seconds
        return self._observe(task.instruction, 0, task.workspace), info

    async def step(self, action: str) -> StepResult:
        """One command, or :data:`SUBMIT`."""
        attempt = self._attempt
        if attempt is None:
            raise ClawGymError("the episode is over or was never started: call reset() first")
        if attempt.failed_infra or self._shell is None:
            return await self._end(attempt, "", 1, "")
        self._count += 1
        if action.strip() == SUBMIT:
            return await self._end(attempt, "", 0, "")
        left = self._deadline - time.monotonic()
        call = ToolCall(f"step-{self._count}", "bash", {"command": action})
        output, code, cwd = "", 1, attempt.task.workspace
        try:
            if left <= 0:
                attempt.stop, attempt.cause = "budget", "time"
            else:
                done = await self._shell.run(action, timeout=min(left, attempt.task.limits.command_seconds))
                output, code, cwd = done.text[: self.max_output], done.exit_code, done.cwd
                if time.monotonic() >= self._deadline:
                    attempt.stop, attempt.cause = "budget", "time"
        except SandboxDied as error:
            attempt.stop, attempt.cause = "error", error.cause
        except SandboxError as error:  # refused (a NUL character, for one): the box still works
            output = f"[error: {error}]"
        except InfraError as error:
            attempt.fail_infra(f"host: {error}")
        except BaseException:
            await self._interrupted(attempt)
            raise
        attempt.steps.append(Step("agent", "", utc_now(), (call,), (Observation(output, call.id),)))
        if attempt.stop == "submitted" and self._count >= attempt.task.limits.max_steps:
            attempt.stop, attempt.cause = "budget", "steps"
        if attempt.stop != "submitted" or attempt.failed_infra:
            return await self._end(attempt, output, code, cwd)
        return self._observe(output, code, cwd), 0.0, False, False, {}

    async def _end(self, attempt: Attempt, output: str, code: int, cwd: str) -> StepResult:
        self._attempt = self._shell = None
        if attempt.failed_infra:
            self.last = await attempt.abandon()
        else:
            self.last = await attempt.finish(floor=self._floor, keep_workspace=False)
        paid, terminated, truncated, info = ending(self.last, cut=attempt.stop == "budget", reward=self.reward)
        observation = self._observe(output, code, cwd or attempt.task.workspace, attempt.task.limits.max_steps)
        return observation, paid, terminated, truncated, info

    def _observe(self, output: str, code: int, cwd: str, max_steps: int | None = None) -> dict[str, Any]:
        if max_steps is None:
            max_steps = self._attempt.task.limits.max_steps if self._attempt else self._count
        return {
            "output": output[: self.max_output],
            "exit_code": np.int64(code),
            "cwd": cwd[:4096],
            "step": np.array(self._count, dtype=np.int64),
            "remaining_steps": np.array(max(0, max_steps - self._count), dtype=np.int64),
        }

    async def _interrupted(self, attempt: Attempt) -> None:
        """Ctrl-C in the middle of something: what state it is in nobody knows, so the episode is over."""
        if self._attempt is attempt:
            self._attempt = self._shell = None
        await attempt.abandon()

    def forget(self) -> None:
        """Let go of everything, where the loop that could close it is gone."""
        self._attempt = self._shell = None
        del self.backend

    async def close(self) -> None:
        """Drop the running attempt, if any."""
        if self._attempt is not None:
            attempt, self._attempt, self._shell = self._attempt, None, None
            await attempt.abandon()
