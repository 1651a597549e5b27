"""Warnings about a judge during training."""

from __future__ import annotations

from typing import Any

from clawgym.records import Turn
from clawgym.records.judge import Judgeable, Judgement
from clawgym.trainers.common.judging import Judging


class Broken:
    """A judge with a mistake, which shows from the second turn on."""

    name, version = "broken", "0"

    async def judge(self, record: Judgeable) -> Judgement:
        return Judgement((1,), ({0: "ok"}[record.turn],), self.name, self.version)


def turns(count: int) -> list[Turn]:
    messages = ({"role": "user", "content": "go on"},)
    return [
        Turn(parent=n - 1 if n else None, flaw="text-only", messages=messages, reply={"role": "assistant"})
        for n in range(count)
    ]


async def test_mistake_of_most_turns_is_shown_with_its_place() -> None:
    gateway: Any = None  # nothing is read from a pool
    judging = Judging(gateway, Broken())
    async with judging.pool:
        await judging.pool.judge_episode("", turns(3), id="e")
        assert judging.warnings() == [], "half of them"
        await judging.pool.judge_episode("", turns(4), id="f")
    (warning,) = judging.warnings()
    assert warning.startswith("2 of 3 turns could not be judged, 2 for KeyError: 2 (test_judging.py:")
    assert judging.warnings() == [], "each turn once"
