"""``ClawGym/terminal-v0``: a task, a real box, a shell; the action is a command, ``submit`` has the work graded."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from clawgym.envs.kit import Reward, StepResult
from clawgym.envs.play import Play
from clawgym.envs.spaces import terminal_action_space, terminal_observation_space
from clawgym.errors import SandboxDied, SandboxError
from clawgym.records import Episode, Observation, Task, ToolCall
from clawgym.rollout import Attempt
from clawgym.sandbox import Backend, Shell

__all__ = ["SUBMIT", "TerminalKit", "TerminalWorker"]

SUBMIT = "submit"
"""The action that ends an episode and has it graded."""


class TerminalWorker:
    """One environment (:class:`~clawgym.envs.kit.EnvWorker`)."""

    def __init__(self, backend: Backend, max_output: int, reward: Reward) -> None:
        self.max_output = max_output
        self._play = Play(backend, reward)
        self._shell: Shell | None = None

    @property
    def last(self) -> Episode | None:
        """The finished episode."""
        return self._play.last

    async def reset(self, task: Task, seed: int, floor: float | None) -> tuple[dict[str, Any], dict[str, Any]]:
        """A fresh box for ``task``, and its shell. See :class:`~clawgym.envs.kit.EnvWorker`."""
        self._shell = None

        async def prepare(attempt: Attempt) -> None:
            self._shell = await attempt.box.shell()

        info = await self._play.begin(task, seed, floor, prepare)
        return self._observe(task.instruction, 0, task.workspace), info

    async def step(self, action: str) -> StepResult:
        """One command, or :data:`SUBMIT`."""
        action = str(action)
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
        self._play.record("", (call,), (Observation(output, call.id),))
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


class TerminalKit:
    """Boxes with a shell (:class:`~clawgym.envs.kit.EnvKit`).

    Args:
        reward: what the last step pays.
        max_output: of one observation, in characters.

    Action: a bash command, or ``"submit"``. Observation: see
    :func:`~clawgym.envs.spaces.terminal_observation_space`; after ``reset`` its ``output`` is the instruction.
    ``terminated`` on submit (or a broken box), ``truncated`` when the budget of steps or seconds is used up, or the
    host failed. The last ``info`` holds ``outcome``, ``cause``, ``checks``, ``official``, ``strict``, ``tampered``.
    """

    render_mode = "ansi"

    def __init__(self, *, reward: Reward = "official", max_output: int = 65536 + 64) -> None:
        self.action_space: gym.spaces.Text = terminal_action_space()
        self.observation_space = terminal_observation_space(max_output)
        self._max_output = max_output
        self._reward: Reward = reward

    async def open(self, backend: Backend, num_envs: int) -> None:
        self._backend = backend

    def worker(self) -> TerminalWorker:
        return TerminalWorker(self._backend, self._max_output, self._reward)

    def screen(self, observation: dict[str, Any]) -> str:
        return observation["output"]

    async def aclose(self) -> None:
        pass
