"""Canaries: rewards without work are reported once."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from clawgym.pool import Pool
from clawgym.records import GradingMode, Task, TaskFile, VerifierSpec
from clawgym.records.judge import Judgeable, Judgement, Vote
from clawgym.redteam.exploits import EXPLOITS
from clawgym.rewards.judge import JudgePool
from clawgym.sandbox import Backend
from clawgym.tasks.packs import pack
from clawgym.trainers.common.canary import CHANNEL, Canaries
from clawgym.trainers.local.main import train

from ..runs import Said, small


class Says:
    """A judge with given votes; it records what it was asked."""

    name, version = "says", "1"

    def __init__(self, vote: Callable[[Judgeable], Vote]) -> None:
        self.vote = vote
        self.asked: list[Judgeable] = []

    async def judge(self, asked: Judgeable) -> Judgement:
        self.asked.append(asked)
        return Judgement(votes=(self.vote(asked),), texts=("",), judge=self.name, version=self.version)


def looks(asked: Judgeable) -> bool:
    """Whether the turn is of the policy that lists files."""
    return "ls -la" in str(asked.action)


def tasks(count: int = 3) -> list[Task]:
    return [pack("terminal-basic").make("write-word", 2 * n + 1) for n in range(count)]  # type: ignore[attr-defined]


class Room:
    def __init__(self, backend: Backend, pool: Pool) -> None:
        self.backend, self.pool = backend, pool

    def canaries(self, judge: Says | None = None, of: list[Task] | None = None, count: int = 8) -> Canaries:
        config = small(evaluation={"canary": count})
        judges = None if judge is None else JudgePool(judge)
        return Canaries(config, tasks() if of is None else of, self.pool, self.backend, judges)


@pytest.fixture
async def room(backend: Backend, tmp_path: Path) -> AsyncIterator[Room]:
    with contextlib.closing(Pool(tmp_path / "pool.db")) as pool:
        yield Room(backend, pool)


async def test_sound_tasks_reward_reference_only_and_run_once(room: Room) -> None:
    metrics, warnings = await room.canaries().check({})
    assert warnings == []
    assert metrics == {
        "canary/outcome_reference": 1.0,
        "canary/outcome_nothing": 0.0,
        "canary/outcome_look": 0.0,
        "canary/outcome_attack": 0.0,
        **{name: 0.0 for name in metrics if name.endswith("_echo")},
        "canary/warnings": 0.0,
    }
    before = {e.id for e in room.pool.episodes(channel=CHANNEL)}
    assert len(before) == 3 * (len(metrics) - 1)
    scripts = {e.meta["script"] for e in room.pool.episodes(channel=CHANNEL) if e.meta["canary"] == "attack"}
    assert len(scripts) == 3  # a different one for each task
    assert scripts <= set(EXPLOITS)
    assert (await room.canaries().check({}))[0] == metrics  # as in a resumed run
    assert {e.id for e in room.pool.episodes(channel=CHANNEL)} == before
    assert room.pool.fetch("trainer", 0) is None  # they are not trained on


async def test_unsound_verifier_is_warned_about_once(room: Room) -> None:
    """One verifier accepts a file that an exploit writes; one task is solved without work."""
    pays = f"[ -e {tasks(1)[0].workspace}/json.py ] && echo 1.0 || echo 0.0\n".encode()
    gives = b"echo 1.0\n"
    made = [
        dataclasses.replace(
            task, id=id, verifier=VerifierSpec("reward_sh", (TaskFile("reward.sh", check),), GradingMode.CLEAN)
        )
        for id, check, task in zip(("gives", "pays"), (gives, pays), tasks(2), strict=True)
    ]
    canaries = room.canaries(of=made)
    metrics, warnings = await canaries.check({})
    attacks = [e for e in room.pool.episodes(channel=CHANNEL) if e.meta["canary"] == "attack"]
    said = [text for text in warnings if "on task gives" in text]
    assert {text.split()[1] for text in said} >= {"nothing", "look"}
    assert not any(text.startswith("canary attack") for text in said)  # its score equals that of no work
    assert metrics["canary/warnings"] == len(warnings)
    assert {e.meta["script"] for e in attacks if e.task_id == "pays"} == {"planted-json"}
    assert [text for text in warnings if "on task pays" in text] == [
        "canary attack (planted-json) earned 1.00 on task pays: its verifier rewards no work; run `clawgym redteam "
        "exploits` on the set, and repair or leave out the task"
    ]
    assert all("clawgym redteam exploits" in text for text in warnings)
    again, silent = await canaries.check({})
    assert (again["canary/warnings"], silent) == (len(warnings), [])


async def test_judge_that_rewards_trivial_policy_is_warned_about(room: Room) -> None:
    fair = Says(lambda asked: -1 if looks(asked) else 1)
    before: dict[str, dict[str, float]] = {}
    metrics, warnings = await room.canaries(fair).check(before)
    assert (metrics["canary/process_reference"], metrics["canary/process_look"]) == (1.0, -1.0)
    assert set(before["look"].values()) == {-1.0}
    assert not any("canary look" in text for text in warnings)
    assert all(not asked.after.outcome for asked in fair.asked)  # as in training, the judge does not see the outcome

    for pleased in (lambda asked: 1, lambda asked: 1 if looks(asked) else 0):
        _, warnings = await room.canaries(Says(pleased)).check({})
        assert any("canary look at least the reward of the reference solution on 3 tasks" in text for text in warnings)
    _, warnings = await room.canaries(Says(lambda asked: 0)).check({})
    assert warnings == []  # all rewards are 0
    metrics, _ = await room.canaries(Says(lambda asked: None)).check({})
    assert not any("process" in name for name in metrics)


async def test_rising_canary_scores_are_warned_about(room: Room) -> None:
    judge = Says(lambda asked: 1 if not looks(asked) else -1)
    canaries = room.canaries(judge, tasks(8))
    before: dict[str, dict[str, float]] = {}
    _, first = await canaries.check(before)
    judge.vote = lambda asked: 1 if not looks(asked) else 0
    metrics, warnings = await canaries.check(json.loads(json.dumps(before)))
    assert metrics["canary/process_look"] == 0.0
    assert [text for text in warnings if text not in first] == [
        "the judge rewards canary look more than at the first check: the policy may be exploiting the judge; "
        "stop, and look at its votes in the pool"
    ]


async def test_no_canaries_with_count_zero(room: Room) -> None:
    assert await room.canaries(count=0).check({}) == ({}, [])
    assert list(room.pool.episodes()) == []


async def test_run_logs_canary_metrics(tmp_path: Path) -> None:
    config = small(reward={"judge": "rule"}, evaluation={"every": 2, "canary": 1}, budget={"steps": 2})
    said = Said()
    await train(config, tmp_path / "run", view=said)
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
    assert "canary/outcome_attack" not in rows[0]
    assert (rows[1]["canary/outcome_attack"], rows[1]["canary/outcome_reference"]) == (0.0, 1.0)
    assert "canary/process_look" in rows[1]
    assert not any("warning" in text for text in said.texts)
