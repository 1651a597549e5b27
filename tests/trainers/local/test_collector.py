"""When groups begin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clawgym.pool import Pool
from clawgym.records import Outcome
from clawgym.tasks.packs import terminal_basic
from clawgym.trainers.local.collector import Groups, group_id

from .runs import small


@pytest.mark.asyncio
async def test_a_deadline_begins_with_the_first_place(tmp_path: Path) -> None:
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
        await Groups(small(), [terminal_basic.make("write-word", 0)], pool, player).play(0, {0: ()})
    assert seen == [False, True]
