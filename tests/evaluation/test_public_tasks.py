"""Real tasks give the numbers that their own ``reward.sh`` gives: needs ``CLAWGYM_DATA``."""

from __future__ import annotations

import os

import pytest

from clawgym.agents import NoopAgent, OracleAgent
from clawgym.records import Outcome, Task
from clawgym.sandbox import Backend
from clawgym.tasks import load

from ..conftest import benchmark
from ..rollouts import episode_of

pytestmark = [pytest.mark.data, pytest.mark.timeout(1800)]

real_tasks = benchmark("real_tasks")

IDS = real_tasks.solved_ids()
LEAST_SOLVED = 10
"""Of the ten, all: what they change, their task asks to change (see ``README.md`` beside the solutions)."""


@pytest.fixture(scope="module")
def tasks(clawgym_data) -> dict[str, Task]:
    return load("ClawGym-Train").by_id


def sample(tasks: dict[str, Task]) -> list[Task]:
    """All 2,000 with ``CLAWGYM_FULL=1``; else 20 that pay for nothing, and 20 that do not."""
    if os.environ.get("CLAWGYM_FULL") == "1":
        return list(tasks.values())
    paying = sorted(real_tasks.do_nothing_scores())[::2][:20]
    others = [task_id for task_id in tasks if task_id not in real_tasks.do_nothing_scores()][::98][:20]
    return [tasks[task_id] for task_id in paying + others]


async def two_scores(task: Task, backend: Backend) -> tuple[Outcome, float, float]:
    episode = await episode_of(task, OracleAgent(), backend)
    assert episode.result is not None, (task.id, episode.cause)
    return episode.outcome, episode.result.official, await real_tasks.by_hand(task, backend)


async def test_episode_scores_equal_the_original_script(tasks: dict[str, Task], backend: Backend) -> None:
    rows = {task_id: await two_scores(real_tasks.with_solution(tasks[task_id]), backend) for task_id in IDS}
    assert [row[1] for row in rows.values()] == [1.0] * 10
    assert {task_id: row for task_id, row in rows.items() if row[1] != row[2]} == {}
    assert sum(row[0] is Outcome.SOLVED for row in rows.values()) >= LEAST_SOLVED, rows


async def test_partial_scores_equal_the_original_exactly(tasks: dict[str, Task], backend: Backend) -> None:
    spoiled = {task_id: real_tasks.with_solution(tasks[task_id], spoiled=True) for task_id in IDS}
    rows = {task_id: await two_scores(task, backend) for task_id, task in spoiled.items()}
    assert {task_id: row for task_id, row in rows.items() if row[1] != row[2]} == {}
    assert {row[0] for row in rows.values()} == {Outcome.FAILED}
    assert sum(0 < row[1] < 1 for row in rows.values()) >= 8, rows


async def test_no_op_solves_no_public_task(tasks: dict[str, Task], backend: Backend) -> None:
    """The test above could not fail otherwise."""
    episodes = await real_tasks.attempt_all((tasks[task_id] for task_id in IDS), NoopAgent(), backend, 4)
    assert {episode.outcome for episode in episodes} == {Outcome.FAILED}


async def test_no_op_gets_the_known_scores(tasks: dict[str, Task], backend: Backend) -> None:
    chosen = sample(tasks)
    assert len(chosen) in (40, 2000)
    episodes = await real_tasks.attempt_all(chosen, NoopAgent(), backend, 6)
    assert [episode.task_id for episode in episodes if episode.result is None] == []
    assert real_tasks.wrong_scores(episodes) == {}
