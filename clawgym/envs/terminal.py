"""``ClawGym/terminal-v0``: a task and a shell in a sandbox. Actions are commands; ``submit`` ends the episode."""

from __future__ import annotations

from typing import Any

import numpy as np

from clawgym.envs.env import SandboxEnv
from clawgym.envs.spaces import terminal_action_space, terminal_observation_space
from clawgym.errors import SandboxDied, SandboxError
from clawgym.records import Observation, ToolCall
from clawgym.registry import envs
from clawgym.sandbox import Sandbox
from clawgym.sandbox.shell_state import ShellState, restored_shell, saved_shell

__all__ = ["SUBMIT", "TerminalEnv"]

SUBMIT = "submit"
"""The action that ends the episode; the workspace is then graded."""


@envs.register("ClawGym/terminal-v0")
class TerminalEnv(SandboxEnv):
    """An environment with a persistent bash in a sandbox.

    Args:
        max_output: longest output of an observation, in characters.

    Actions (str): a bash command, or ``"submit"``.

    Observation: see :func:`~clawgym.envs.spaces.terminal_observation_space`. After ``reset``, ``output`` is the
    instruction.

    End: ``terminated`` after ``submit``, or if the sandbox breaks; ``truncated`` when the budget of steps or seconds is
    used up, or after an infrastructure error. The last ``info`` has ``outcome``, ``cause``, ``checks``, ``official``,
    ``strict`` and ``tampered``.
    """

    default_tasks = "terminal-basic:train"

    def __init__(self, *, max_output: int = 65536 + 64) -> None:
        self.action_space = terminal_action_space()
        self.observation_space = terminal_observation_space(max_output)
        self._max_output = max_output

    async def open(self, sandbox: Sandbox) -> dict[str, Any]:
        self._shell = await sandbox.shell()
        return self._see(self.task.instruction, 0, self.task.workspace)

    async def act(self, sandbox: Sandbox, action: str) -> dict[str, Any]:
        if action.strip() == SUBMIT:
            self.submit()
            return self._see("", 0, self.task.workspace)
        call = ToolCall(f"step-{self.steps}", "bash", {"command": action})
        try:
            done = await self._shell.run(action, timeout=self.seconds)
            seen = self._see(done.text, done.exit_code, done.cwd)
        except SandboxDied:
            self.record("", (call,), (Observation("", call.id),))
            raise
        except SandboxError as error:  # refused, for example for a NUL character: the sandbox still works
            seen = self._see(f"[error: {error}]", 1, self.task.workspace)
        self.record("", (call,), (Observation(seen["output"], call.id),))
        return seen

    @property
    def forks(self) -> bool:
        return True

    async def save(self, sandbox: Sandbox) -> ShellState:
        return await saved_shell(self._shell)

    async def load(self, sandbox: Sandbox, state: ShellState) -> None:
        self._shell = await restored_shell(sandbox, state)

    def render(self, observation: Any) -> str:
        return observation["output"]

    def _see(self, output: str, code: int, cwd: str) -> dict[str, Any]:
        return {"output": output[: self._max_output], "exit_code": np.int64(code), "cwd": cwd[:4096]}
