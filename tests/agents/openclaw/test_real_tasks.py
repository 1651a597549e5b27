"""The real OpenClaw on public tasks: rewards, exact tokens, no leaks. Needs ``CLAWGYM_DATA``."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from clawgym.agents.programs.install import Installation
from clawgym.gateway.request import SessionRequest
from clawgym.pool import Pool, sequences_of
from clawgym.records import Episode, Outcome, Task, TaskFile, prompt_ids
from clawgym.sandbox import backend as make_backend
from clawgym.tasks import load

from ...conftest import benchmark
from ...gateway.scripted import ScriptedEngine
from ...rollouts import episode_of
from ...sandbox.conftest import docker_engine
from .scripted_openclaw import call, scripted_openclaw

__all__ = ["docker_engine"]

pytestmark = [pytest.mark.data, pytest.mark.timeout(1800)]

real_tasks = benchmark("real_tasks")

NOTES = "notes.md"


@pytest.fixture(scope="module")
def twenty(clawgym_data) -> list[Task]:
    """Ten tasks that are solved, and ten of which half give reward for almost no work."""
    tasks = load("ClawGym-Train").by_id
    solved = [real_tasks.with_solution(tasks[name]) for name in real_tasks.solved_ids()]
    paying = real_tasks.do_nothing_scores()
    others = [name for name in tasks if name not in paying]
    rest = [*sorted(paying)[:: len(paying) // 5][:5], *others[11::390][:5]]
    assert len({task.id for task in solved} | set(rest)) == 20
    idle = TaskFile("solve.sh", f"echo looked > {NOTES}\n".encode())
    return solved + [dataclasses.replace(tasks[name], solution=(idle,)) for name in rest]


def script_of(task: Task) -> list[str]:
    """The reference solution as a script for OpenClaw's tools: look, write the file, run it, answer."""
    (solution,) = task.solution
    if solution.read().endswith(f"{NOTES}\n".encode()):
        return ["Let me look." + call("exec", command="ls -R"), call("write", path=NOTES, content="looked\n"), "Done."]
    return [
        "Let me look at the files." + call("exec", command="ls -la"),
        call("write", path="/tmp/solve.sh", content=solution.read().decode()),
        call("exec", command=f"bash /tmp/solve.sh > /tmp/out 2>&1; echo $?; tail -c 300 /tmp/out; cd {task.workspace}"),
        "Done: see the workspace.",
    ]


async def work_on(agent, backend, tasks: list[Task], at_once: int) -> list[Episode]:
    gate = asyncio.Semaphore(at_once)

    async def one(task: Task) -> Episode:
        async with gate:
            return await episode_of(task, agent, backend, seed=7, session=SessionRequest())

    return list(await asyncio.gather(*map(one, tasks)))


def check_exact(episode: Episode, engine: ScriptedEngine, pool: Pool) -> None:
    """Each turn has the prompt and tokens of the engine, and the episode is one training sequence."""
    seen = {(s.prompt, tuple(s.sampled), tuple(s.logprobs)) for s in engine.seen}
    for n, turn in enumerate(episode.turns):
        assert turn.flaw is None
        assert turn.role == "main"
        assert (prompt_ids(episode.turns, n), turn.sampled_ids, turn.logprobs) in seen
    (sample,) = sequences_of(episode.turns)
    assert sum(sample.mask) == sum(len(turn.sampled_ids) for turn in episode.turns)
    (stored,) = [e for e in pool.episodes() if e.task_id == episode.task_id]
    assert (stored.outcome, stored.n_turns, stored.state) == (str(episode.outcome), len(episode.turns), "closed")
    assert stored.reward == episode.result.strict  # type: ignore[union-attr]


async def by_hand(tasks: list[Task], backend) -> dict[str, float]:
    return {task.id: await real_tasks.by_hand(task, backend) for task in tasks}


@pytest_asyncio.fixture
async def backend(request):
    if request.param == "docker":
        request.getfixturevalue("docker_engine")
    if request.param == "chroot" and os.geteuid() != 0:
        pytest.skip("needs root, for a uid per sandbox")
    made = make_backend(request.param)
    yield made
    await made.aclose()


@pytest.mark.parametrize(
    ("backend", "count"),
    [("namespace", 20), pytest.param("docker", 3, marks=pytest.mark.docker), ("chroot", 1)],
    indirect=["backend"],
)
async def test_rewards_and_exact_tokens_on_public_tasks(
    backend, count: int, twenty: list[Task], openclaw: Installation, model_folder: Path, tmp_path: Path
) -> None:
    tasks = twenty[:: len(twenty) // count][:count]
    scripts = {task.instruction: script_of(task) for task in tasks}
    before = set(psutil.Process().children(recursive=True))
    sockets = len(psutil.Process().net_connections(kind="all"))
    async with scripted_openclaw(model_folder, tmp_path / "pool.db", scripts) as (agent, engine, pool):
        episodes = await work_on(agent, backend, tasks, at_once=4)
        for episode, task in zip(episodes, tasks, strict=True):
            assert episode.result is not None, (task.id, episode.error)
            assert len(episode.turns) == len(scripts[task.instruction]), task.id
            check_exact(episode, engine, pool)
            assert any(name.endswith(".jsonl") for name in episode.files)
            assert episode.usage.prompt_tokens > 10_000
    expected = await by_hand(tasks, backend)
    assert {e.task_id: e.result.official for e in episodes if e.result} == expected
    solved = [e.task_id for e in episodes if e.outcome is Outcome.SOLVED]
    assert set(solved) == {task.id for task in tasks} & set(real_tasks.solved_ids())
    await backend.aclose()
    left = {p for p in psutil.Process().children(recursive=True) if p.is_running()} - before
    assert not left
    assert len(psutil.Process().net_connections(kind="all")) <= sockets
