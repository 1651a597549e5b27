"""Fixtures: one attempt of an agent at a task, in a real sandbox."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from clawgym.agents import Agent, AgentContext, AgentReport
from clawgym.records import Limits, Step, Task, TaskFile, Turn, VerifierSpec
from clawgym.sandbox import Backend, Sandbox
from clawgym.tools import open_tools, sandbox_spec

from ..engines.fake_openai import fake_openai

__all__ = ["Attempt", "fake_openai", "kill_from_outside", "make_task", "work"]


async def kill_from_outside(sandbox: Sandbox) -> None:
    """Kill a sandbox without telling its owner, as the kernel's out-of-memory killer would."""
    await sandbox._backend.supervised.ask("kill", sandbox.id)  # type: ignore[attr-defined]


def make_task(**changes: Any) -> Task:
    """A task whose solution writes ``out.txt`` and whose wrong solutions write something else."""
    fields: dict[str, Any] = {
        "id": "t1",
        "instruction": "Write 42 into out.txt.",
        "verifier": VerifierSpec("reward_sh", ()),
        "limits": Limits(max_steps=8, command_seconds=5.0),
        "solution": (TaskFile("solve.sh", b"echo 42 > out.txt\n"),),
        "wrong_solutions": (TaskFile("w1.sh", b"echo 41 > out.txt\n"), TaskFile("w2.sh", b"touch out.txt\n")),
    }
    return Task(**{**fields, **changes})


@dataclass
class Attempt:
    """An agent's context in a new sandbox, and what was recorded."""

    context: AgentContext
    steps: list[Step]
    turns: list[Turn] = field(default_factory=list)

    @property
    def sandbox(self) -> Sandbox:
        return self.context.sandbox

    async def file(self, path: str) -> str:
        """Read a file of the workspace."""
        return (await self.sandbox.get(f"{self.context.task.workspace}/{path}")).decode()

    async def exists(self, path: str) -> bool:
        """Whether an absolute path exists in the sandbox."""
        return (await self.sandbox.exec(["test", "-e", path])).exit_code == 0

    async def run(self, agent: Agent) -> AgentReport:
        assert isinstance(agent, Agent)
        assert agent.identity()["name"] == agent.name
        return await agent.run(self.context)


@pytest.fixture
async def work(backend: Backend) -> AsyncIterator[Callable[..., Any]]:
    """``await work(task, seed=..., sample=...)`` is an :class:`Attempt` in a new sandbox."""
    sandboxes: list[Sandbox] = []

    async def start(task: Task | None = None, *, seed: int = 0, sample: int = 0) -> Attempt:
        task = task or make_task()
        sandbox = await backend.create(sandbox_spec(task))
        sandboxes.append(sandbox)
        steps: list[Step] = []
        turns: list[Turn] = []
        tools = await open_tools(task, sandbox, backend)
        context = AgentContext(task, sandbox, tools, seed, sample, steps.append, turns.append)
        return Attempt(context, steps, turns)

    yield start
    for sandbox in sandboxes:
        await sandbox.close()
