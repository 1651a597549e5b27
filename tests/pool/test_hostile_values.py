"""Untrusted values in a pool: text stays text, and what databases cannot store is refused by name."""

from __future__ import annotations

import pytest

from clawgym.errors import PoolError
from clawgym.pool import Pool
from clawgym.records import Turn

SQL = "'); DROP TABLE episodes; DELETE FROM turns; --"
TEXTS = [SQL, '"; DROP TABLE turns; --', "%s %(a)s :a ?1 $1 {0}", "\\'; SELECT 1; --", "\x1b[2J\u202e", "x" * 10_000]


@pytest.mark.parametrize("text", TEXTS)
def test_sql_in_names_is_a_name(pool: Pool, text: str) -> None:
    turn = Turn((1,), (2,), (-0.5,), messages=({"role": "user", "content": text},), reply={"content": text})
    id = pool.open_episode(task_id=text, channel=text, meta={text: text})
    pool.append([(id, 0, turn)])
    assert pool.turns(id) == (turn,)
    assert (pool.episode(id).task_id, pool.episode(id).meta) == (text, {text: text})
    assert text in pool.stats()["channels"]


@pytest.mark.parametrize("text", ["a\0b", "half \ud800"])
def test_a_name_that_no_database_holds_is_refused_or_kept(pool: Pool, text: str) -> None:
    try:
        id = pool.open_episode(task_id=text)
    except (PoolError, ValueError):
        pass
    else:
        assert pool.episode(id).task_id == text
    assert pool.turns(pool.open_episode(task_id="after")) == ()


@pytest.mark.parametrize("number", [2**31, 2**63, 2**64, -(2**63) - 1, 10**400])
def test_numbers_of_any_size_are_kept_or_refused(pool: Pool, number: int) -> None:
    id = pool.open_episode(task_id="t", meta={"n": number})
    assert pool.episode(id).meta == {"n": number}
    for turn in (
        lambda: Turn((number,), (2,), (-0.5,)),
        lambda: Turn((1,), (2,), (-0.5,), policy_version=number),
        lambda: Turn((1,), (2,), (-0.5,), malformed_calls=number),
    ):
        try:
            made = turn()
            pool.append([(id, len(pool.turns(id)), made)])
        except (PoolError, ValueError, OverflowError):
            continue
        assert pool.turns(id)[-1] == made
