"""Evaluation of a policy during training."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from clawgym.errors import TrainingError
from clawgym.records import Outcome, Task, VerifierSpec
from clawgym.trainers.common.services import EpisodeScore, score_tasks, summarize

from ..runs import small


class Player:
    """Solves the tasks named in ``solves``; others fail, and those in ``broken`` have no result the first ``times``."""

    def __init__(self, *solves: str, broken: str = "", times: int = 0) -> None:
        self.seeds: dict[tuple[str, int], list[int]] = {}
        self._solves, self._broken, self._times = solves, broken, times

    async def play(self, task: Task, *, seed: int, sample: int, channel: str, greedy: bool) -> Any:
        tried = self.seeds.setdefault((task.id, sample), [])
        tried.append(seed)
        if task.id == self._broken and len(tried) <= self._times:
            return SimpleNamespace(outcome=Outcome.INFRA, result=None)
        strict = float(task.id in self._solves)
        outcome = Outcome.SOLVED if strict else Outcome.FAILED
        return SimpleNamespace(outcome=outcome, result=SimpleNamespace(strict=strict, checks={"a": 1.0, "b": strict}))


def task(name: str, generator: str | None = None) -> Task:
    metadata = {} if generator is None else {"generator": generator}
    return Task(name, f"do {name}", VerifierSpec("reward_sh", ()), metadata=metadata)


TASKS = [task("a", "sum"), task("b", "sum"), task("c")]


async def found(player: Any, samples: int = 2) -> list[EpisodeScore]:
    return await score_tasks(player, small(), TASKS, samples=samples, greedy=False, channel="validation")


@pytest.mark.asyncio
async def test_scores_are_by_task_and_by_generator() -> None:
    results = await found(Player("a", "c"))
    assert results == [
        EpisodeScore(name, kind, s, 0.5 + s / 2)
        for name, kind, s in (("a", "sum", 1), ("b", "sum", 0), ("c", "all", 1))
        for _ in range(2)
    ]
    about = summarize(results)
    assert about.estimate.value == pytest.approx(2 / 3)
    assert about.by_generator == {"all": 1.0, "sum": 0.5}
    assert about.infra == 0
    assert about.partial == pytest.approx(5 / 6)


@pytest.mark.asyncio
async def test_evaluation_seeds_are_fixed() -> None:
    first, second = Player(), Player()
    await found(first)
    await found(second)
    assert first.seeds == second.seeds
    assert len({seed for (seed,) in first.seeds.values()}) == 6


@pytest.mark.asyncio
async def test_evaluation_episode_is_retried_twice() -> None:
    late, never = Player("a", "b", "c", broken="b", times=2), Player("a", "c", broken="b", times=3)
    assert summarize(await found(late, 1)).by_generator == {"all": 1.0, "sum": 1.0}
    assert len({*late.seeds["b", 0]}) == 3
    about = summarize(await found(never, 1))
    assert (about.infra, about.by_generator) == (1, {"all": 1.0, "sum": 1.0})
    assert len(never.seeds["b", 0]) == 3


def test_no_graded_episode_raises() -> None:
    with pytest.raises(TrainingError, match="no episode could be graded"):
        summarize([EpisodeScore("a", "all", None, 0.0)])
