"""A shared OpenClaw over a scripted engine, and tasks for it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clawgym.agents.blackbox import BlackBoxAgent
from clawgym.agents.openclaw.config import Prompt
from clawgym.agents.openclaw.dense import DenseOpenClaw
from clawgym.gateway.server import Gateway
from clawgym.pool import Pool
from clawgym.records import Episode, Limits, Task, TaskFile, VerifierSpec
from clawgym.sandbox import Sandbox

from ...gateway.scripted import ScriptedEngine
from ..conftest import make_task
from .scripted_openclaw import START

CHECK = b"cd /root/.openclaw/workspace; cmp in.txt out.txt && echo 1.0 || echo 0\n"
Line = str | Callable[["TaskScripts"], str]


def copy_task(name: str, seconds: float = 120.0) -> Task:
    """A task to copy ``in.txt`` to ``out.txt``; the content differs between tasks."""
    return make_task(
        id=name,
        instruction=f"This is {name}: copy in.txt to out.txt.",
        inputs=(TaskFile("in.txt", f"the input of {name}\n".encode()),),
        verifier=VerifierSpec("reward_sh", (TaskFile("reward.sh", CHECK),)),
        limits=Limits(max_steps=200, agent_seconds=seconds),
        solution=(),
        wrong_solutions=(),
    )


def results(episode: Episode) -> list[str]:
    """The results of the tools, in order."""
    return [observation.content for step in episode.steps for observation in step.observations]


@dataclass
class TaskScripts:
    """``say`` of a :class:`ScriptedEngine`: one script per task, whose lines may be functions of this object."""

    scripts: dict[str, Sequence[Line]] = field(default_factory=dict)
    agents: dict[str, str] = field(default_factory=dict)
    """Task -> id of its agent in OpenClaw."""

    prompts: dict[str, str] = field(default_factory=dict)
    """Task -> its last prompt."""

    def session(self, name: str) -> str:
        """OpenClaw's id of the last background command of a task."""
        return re.findall(r"running \(session ([a-z-]+)", self.prompts[name])[-1]

    def __call__(self, prompt: str, number: int) -> str:
        (name,) = (name for name in self.scripts if f"This is {name}:" in prompt)
        self.prompts[name] = prompt
        if named := re.search(r"agent=([0-9a-f]+)", prompt):
            self.agents[name] = named[1]
        line = self.scripts[name][min(prompt.count(START) - 1, len(self.scripts[name]) - 1)]
        return line if isinstance(line, str) else line(self)


@dataclass
class DenseSetup:
    scripts: TaskScripts
    claw: DenseOpenClaw
    agent: BlackBoxAgent
    engine: ScriptedEngine
    pool: Pool

    @property
    def process(self) -> object:
        """The shared process."""
        (process,) = self.claw._processes.values()
        return process

    @property
    def shared_sandbox(self) -> Sandbox:
        """The sandbox of the shared process."""
        return self.process.sandbox  # type: ignore[attr-defined]


@contextlib.asynccontextmanager
async def scripted_dense(model_folder: Path, pool_file: Path, prompt: Prompt = "slim") -> AsyncIterator[DenseSetup]:
    """A shared OpenClaw whose model replies from the scripts."""
    scripts = TaskScripts()
    engine = ScriptedEngine(model_folder, scripts, at_once=512, context_window=200_000)
    with contextlib.closing(Pool(pool_file)) as pool:
        async with Gateway(engine, pool) as gateway:
            claw = DenseOpenClaw(prompt=prompt)
            agent = BlackBoxAgent(claw, gateway=gateway)
            try:
                yield DenseSetup(scripts, claw, agent, engine, pool)
            finally:
                await agent.aclose()
