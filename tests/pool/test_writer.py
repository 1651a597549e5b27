from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import sqlite3
import threading

import pytest

from clawgym.errors import PoolError
from clawgym.pool import EpisodeEnd, Pool, PoolWriter
from clawgym.records import Image, Turn

from .histories import chain, turn


async def test_turns_of_many_sessions_arrive_in_order(pool: Pool) -> None:
    writer = PoolWriter(pool)

    async def session(seed: int) -> str:
        id = await writer.run(pool.open_episode, task_id=str(seed))
        for index, one in enumerate(chain(seed, 5)):
            await writer.append(id, index, one)
            assert len(pool.turns(id)) == index + 1  # what is acknowledged is there
        await writer.run(pool.close_episode, id, EpisodeEnd(outcome="solved"))
        return id

    ids = await asyncio.gather(*(session(seed) for seed in range(20)))
    await writer.aclose()
    for seed, id in enumerate(ids):
        assert pool.turns(id) == tuple(chain(seed, 5))


class Counting(Pool):
    """Counts its commits, and can hold them back."""

    commits = 0
    gate = threading.Event()

    def append(self, turns, *, images=()) -> None:
        self.gate.wait()
        super().append(turns, images=images)
        self.commits += 1


async def test_one_commit_carries_what_waited(tmp_path) -> None:
    pool = Counting(tmp_path / "pool.db")
    pool.gate.clear()
    writer = PoolWriter(pool)
    ids = [pool.open_episode() for _ in range(50)]
    waiting = [asyncio.create_task(writer.append(id, 0, chain(n, 1)[0])) for n, id in enumerate(ids)]
    await asyncio.sleep(0.1)
    pool.gate.set()
    await asyncio.gather(*waiting)
    await writer.aclose()
    assert pool.commits <= 3
    assert all(len(pool.turns(id)) == 1 for id in ids)
    pool.close()


async def test_a_bad_turn_fails_alone(pool: Pool) -> None:
    writer = PoolWriter(pool)
    ids = [pool.open_episode() for _ in range(10)]
    results = await asyncio.gather(
        *(writer.append(id, n % 2, chain(n, 1)[0]) for n, id in enumerate(ids)), return_exceptions=True
    )
    await writer.aclose()
    for n, (id, result) in enumerate(zip(ids, results, strict=True)):
        assert len(pool.turns(id)) == 1 - n % 2
        assert isinstance(result, PoolError) == bool(n % 2)


async def test_images_come_with_their_turn(pool: Pool) -> None:
    data = b"picture"
    image = Image(hashlib.sha256(data).hexdigest(), data, "image/jpeg")
    writer = PoolWriter(pool)
    id = await writer.run(pool.open_episode)
    await writer.append(id, 0, Turn((1,), (2,), (-0.1,), images=(image.sha256,)), images=[image])
    await writer.aclose()
    assert pool.image(image.sha256) == image


async def test_cancelled_append_is_still_written(tmp_path) -> None:
    pool = Counting(tmp_path / "pool.db")
    pool.gate.clear()
    writer = PoolWriter(pool)
    id = pool.open_episode()
    waiting = asyncio.create_task(writer.append(id, 0, chain(1, 1)[0]))
    await asyncio.sleep(0.05)
    waiting.cancel()
    pool.gate.set()
    await writer.append(id, 1, chain(1, 2)[1])
    await writer.aclose()
    assert pool.turns(id) == tuple(chain(1, 2))
    pool.close()


async def test_closing_writes_what_waits_and_then_refuses(pool: Pool) -> None:
    writer = PoolWriter(pool)
    ids = [pool.open_episode() for _ in range(30)]
    waiting = [asyncio.create_task(writer.append(id, 0, chain(n, 1)[0])) for n, id in enumerate(ids)]
    await asyncio.sleep(0)
    await writer.aclose()
    await writer.aclose()
    await asyncio.gather(*waiting)
    with pytest.raises(PoolError, match="make a new one"):
        await writer.append(ids[0], 1, chain(1, 1)[0])
    assert all(len(pool.turns(id)) == 1 for id in ids)


async def test_a_full_queue_makes_callers_wait(tmp_path) -> None:
    pool = Counting(tmp_path / "pool.db")
    pool.gate.clear()
    writer = PoolWriter(pool)
    ids = [pool.open_episode() for _ in range(400)]
    waiting = [asyncio.create_task(writer.append(id, 0, chain(1, 1)[0])) for id in ids]
    await asyncio.sleep(0.2)
    assert writer._jobs.qsize() <= 256
    pool.gate.set()
    await asyncio.gather(*waiting)
    await writer.aclose()
    assert sum(e.n_turns for e in pool.episodes()) == 400
    pool.close()


async def test_database_failure_fails_all_requests(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("clawgym.pool._store._BUSY_SECONDS", 0.5)
    pool = Counting(tmp_path / "pool.db")
    pool.gate.set()
    ids = [pool.open_episode() for _ in range(40)]
    writer = PoolWriter(pool)
    with contextlib.closing(sqlite3.connect(tmp_path / "pool.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        results = await asyncio.gather(
            *(writer.append(id, 0, chain(n, 1)[0]) for n, id in enumerate(ids)), return_exceptions=True
        )
        other.execute("ROLLBACK")
    assert all("another process has held it" in str(result) for result in results)
    assert len({id(result) for result in results}) < 5  # not one wait each
    await writer.append(ids[0], 0, chain(0, 1)[0])
    await writer.aclose()
    pool.close()


async def test_results_and_errors_of_a_call_reach_the_caller(pool: Pool) -> None:
    writer = PoolWriter(pool)
    assert (await writer.run(pool.stats))["channels"] == {}
    with pytest.raises(PoolError, match="no episode"):
        await writer.run(pool.turns, "nobody")
    id = await writer.run(pool.open_episode)
    await writer.append(id, 0, turn(random.Random(1), 0, parent=None))
    await writer.aclose()
