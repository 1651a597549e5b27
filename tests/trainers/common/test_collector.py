"""When groups start."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from clawgym.pool import EpisodeEnd, Pool
from clawgym.records import Outcome
from clawgym.tasks.packs import terminal_basic
from clawgym.trainers.common.collector import INTERRUPTED, Collector, GroupPlayer, _Slot, group_id

from ..runs import small


@pytest.mark.asyncio
async def test_group_deadline_starts_with_first_slot(tmp_path: Path) -> None:
    seen: list[bool] = []

    class Ended:
        outcome = Outcome.FAILED

    class Player:
        async def play(self, task: Any, *, placed: Any, **about: Any) -> Any:
            seen.append(group_id(0) in pool.group_states())
            await placed()
            seen.append(group_id(0) in pool.group_states())
            return Ended()

    with Pool(tmp_path / "pool.db") as pool:
        player: Any = Player()
        await GroupPlayer(small(), [terminal_basic.make("write-word", 0)], pool, player).play(0, {0: ()})
    assert seen == [False, True]


class Endless:
    """Groups that never end. ``unfinished`` are those of an earlier process."""

    def __init__(self, *before: int) -> None:
        self.played: list[int] = []
        self._before = before

    async def unfinished(self) -> dict[int, dict[int, tuple[str, ...]]]:
        return {number: {} for number in self._before}

    async def play(self, number: int, samples: Any = None) -> None:
        self.played.append(number)
        await asyncio.Event().wait()


async def collected(groups: Endless, staleness: int, *advances: tuple[int, int]) -> list[int]:
    """The number of started groups, at first and after each of ``advances``."""
    collector = Collector(small(rollout={"groups": 2, "group_size": 2, "staleness": staleness}), groups)  # type: ignore
    running = asyncio.create_task(collector.run())
    counts = []
    try:
        for advance in (None, *advances):
            if advance is not None:
                collector.advance(*advance)
            for _ in range(50):
                await asyncio.sleep(0)
            counts.append(len(groups.played))
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    return counts


@pytest.mark.asyncio
async def test_no_group_starts_that_would_be_too_stale() -> None:
    """Two groups per batch: those of the next batch and of ``staleness`` further batches are started."""
    for staleness, counts in ((0, [2, 4, 4, 5]), (1, [4, 6, 6, 7]), (3, [8, 10, 10, 11])):
        groups = Endless()
        assert await collected(groups, staleness, (1, 0), (1, 0), (1, 1)) == counts
        assert groups.played == list(range(counts[-1]))


@pytest.mark.asyncio
async def test_groups_of_earlier_process_count_and_are_not_restarted() -> None:
    groups = Endless(0, 1, 2)
    assert await collected(groups, 1, (1, 0)) == [1, 3]
    assert groups.played == [3, 4, 5]


@pytest.mark.asyncio
async def test_resumed_run_replaces_open_episodes(tmp_path: Path) -> None:
    """Groups of two: one is complete, one lacks a running and a failed episode, one was dropped."""
    with Pool(tmp_path / "pool.db") as pool:

        def episode(id: str, group: int, sample: int, outcome: str | None) -> None:
            pool.open_episode(id=id, group=group_id(group), sample=sample)
            if outcome is not None:
                pool.close_episode(id, EpisodeEnd(outcome=outcome, reward=1.0))

        for number in range(4):
            pool.open_group(id=group_id(number), size=2, deadline=0.0 if number == 3 else 600.0)
        for sample in range(2):
            episode(f"whole{sample}", 0, sample, "solved")
        episode("broke", 2, 0, "infra")
        episode("open", 2, 1, None)
        episode("done", 3, 0, "failed")
        episode("late", 3, 1, None)
        assert pool.fetch("trainer", 0, only=group_id(3), min_episodes=1, wait=10) is None
        found = await GroupPlayer(small(), [terminal_basic.make("write-word", 0)], pool, object()).unfinished()  # type: ignore
        assert {number: dict(missing) for number, missing in found.items()} == {
            0: {},
            1: {0: (), 1: ()},
            2: {0: (), 1: ["open"]},
            3: {},
        }
        late = pool.episode("late")
        assert (late.state, late.outcome, late.cause) == ("closed", "infra", INTERRUPTED)
        assert pool.episode("open").state == "open"


@pytest.mark.asyncio
async def test_infrastructure_errors_are_retried_once_and_counted(tmp_path: Path) -> None:
    outcomes = [Outcome.INFRA, Outcome.SOLVED, Outcome.INFRA, Outcome.INFRA]
    seeds: list[int] = []

    class Ended:
        error, cause = "no memory", "host"

    class Player:
        async def play(self, task: Any, *, seed: int, **about: Any) -> Any:
            seeds.append(seed)
            ended = Ended()
            ended.outcome = outcomes[len(seeds) - 1]  # type: ignore[attr-defined]
            return ended

    with Pool(tmp_path / "pool.db") as pool:
        player: Any = Player()
        groups = GroupPlayer(small(), [terminal_basic.make("write-word", 0)], pool, player)
        await groups.play(0, {0: ()})
        assert (groups.infra, groups.failures_in_a_row) == (1, 0)
        await groups.play(1, {0: ()})
        assert (groups.infra, groups.failures_in_a_row, groups.last_cause) == (3, 2, "no memory")
    assert len({*seeds}) == 4


@pytest.mark.asyncio
async def test_slot_is_released_once() -> None:
    places = asyncio.Semaphore(1)
    place = _Slot(places)
    async with place:
        assert places.locked()
        place.free()
        assert not places.locked()
    await places.acquire()
    assert places.locked()
