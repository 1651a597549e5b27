"""Tasks for one OpenClaw that many agents share, and a model that plays them."""

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
from .desk import START

CHECK = b"cd /root/.openclaw/workspace; cmp in.txt out.txt && echo 1.0 || echo 0\n"
Line = str | Callable[["Cast"], str]


def copy_task(name: str, seconds: float = 120.0) -> Task:
    """Solved where ``out.txt`` holds what ``in.txt`` has, which no other task's has."""
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
    """What the tools said, in order."""
    return [observation.content for step in episode.steps for observation in step.observations]


@dataclass
class Cast:
    """``say`` of a :class:`ScriptedEngine`: a script a task, whose lines may depend on what was seen so far."""

    scripts: dict[str, Sequence[Line]] = field(default_factory=dict)
    agents: dict[str, str] = field(default_factory=dict)
    """Task -> OpenClaw's name of its agent."""

    prompts: dict[str, str] = field(default_factory=dict)
    """Task -> what its model was shown last."""

    def session(self, name: str) -> str:
        """OpenClaw's name of the last command that a task left running."""
        return re.findall(r"running \(session ([a-z-]+)", self.prompts[name])[-1]

    def __call__(self, prompt: str, number: int) -> str:
        (name,) = (name for name in self.scripts if f"This is {name}:" in prompt)
        self.prompts[name] = prompt
        if named := re.search(r"agent=([0-9a-f]+)", prompt):
            self.agents[name] = named[1]
        line = self.scripts[name][min(prompt.count(START) - 1, len(self.scripts[name]) - 1)]
        return line if isinstance(line, str) else line(self)


@dataclass
class Desk:
    cast: Cast
    claw: DenseOpenClaw
    agent: BlackBoxAgent
    engine: ScriptedEngine
    pool: Pool

    @property
    def process(self) -> object:
        """The one OpenClaw."""
        (process,) = self.claw._processes.values()
        return process

    @property
    def office(self) -> Sandbox:
        """The box that OpenClaw is in."""
        return self.process.box  # type: ignore[attr-defined]


@contextlib.asynccontextmanager
async def dense_desk(model_folder: Path, pool_file: Path, prompt: Prompt = "slim") -> AsyncIterator[Desk]:
    """One OpenClaw with a model that says what its cast has."""
    cast = Cast()
    engine = ScriptedEngine(model_folder, cast, at_once=512, context_window=200_000)
    with contextlib.closing(Pool(pool_file)) as pool:
        async with Gateway(engine, pool) as gateway:
            claw = DenseOpenClaw(prompt=prompt)
            agent = BlackBoxAgent(claw, gateway=gateway)
            try:
                yield Desk(cast, claw, agent, engine, pool)
            finally:
                await agent.aclose()
