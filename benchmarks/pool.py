"""Measure a pool: ``python benchmarks/pool.py`` fills one with 1,000, 10,000 and 100,000 episodes and prints figures.

``--where FILE`` (or ``postgresql://...``) keeps the pool: what it holds already is not filled in again, so filling can
be interrupted, and figures can be taken anew. Six turns an episode, groups of eight, 150 new prompt ids and 100 sampled
ids a turn. 100,000 episodes take some minutes and about 1.3 GB.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from clawgym.pool import EpisodeEnd, Pool, PoolWriter
from clawgym.records import Turn

TURNS, GROUP, CONTEXT, SAMPLED = 6, 8, 150, 100
LEVELS = (1_000, 10_000, 100_000)


def make_turns() -> list[Turn]:
    dice = random.Random(0)
    return [
        Turn(
            tuple(dice.randrange(150_000) for _ in range(CONTEXT)),
            tuple(dice.randrange(150_000) for _ in range(SAMPLED)),
            tuple(-dice.random() for _ in range(SAMPLED)),
            policy_version=1,
            parent=n - 1 if n else None,
            messages=({"role": "tool", "content": "x" * 400},),
            reply={"role": "assistant", "content": "y" * 300},
        )
        for n in range(TURNS)
    ]


def milliseconds(work: Callable[[int], object], times: int = 30) -> str:
    """p50 and the worst of some calls."""
    taken = []
    for n in range(times):
        start = time.perf_counter()
        work(n)
        taken.append(1000 * (time.perf_counter() - start))
    return f"{statistics.median(taken):7.1f} ({max(taken):.1f})"


def fill(pool: Pool, turns: list[Turn], groups: int) -> float:
    """Groups of closed episodes, a group's turns in one commit; seconds."""
    start = time.perf_counter()
    for _ in range(groups):
        group = pool.open_group(size=GROUP, task_id="t")
        ids = [pool.open_episode(group=group, task_id="t", sample=n) for n in range(GROUP)]
        pool.append([(id, n, turn) for id in ids for n, turn in enumerate(turns)])
        for id in ids:
            pool.close_episode(id, EpisodeEnd(outcome="solved", reward=1.0))
    return time.perf_counter() - start


async def live(pool: Pool, turns: list[Turn], streams: int, rounds: int) -> tuple[float, float]:
    """Turns a second, and the median wait for one, of ``streams`` sessions through one writer."""
    writer, waits = PoolWriter(pool), []

    async def session() -> None:
        id = await writer.run(pool.open_episode, channel="bench")
        for n in range(rounds):
            start = time.perf_counter()
            parent = n - 1 if n else None
            turn = Turn(turns[0].context_ids, turns[0].sampled_ids, turns[0].logprobs, policy_version=1, parent=parent)
            await writer.append(id, n, turn)
            waits.append(1000 * (time.perf_counter() - start))

    start = time.perf_counter()
    await asyncio.gather(*(session() for _ in range(streams)))
    taken = time.perf_counter() - start
    await writer.aclose()
    return streams * rounds / taken, statistics.median(waits)


def measure(where: str, levels: list[int]) -> None:
    turns = make_turns()
    with Pool(where) as pool:
        print("one writer:   sessions   turns/s   wait p50")
        for streams in (1, 64, 256):
            rate, wait = asyncio.run(live(pool, turns, streams, 400 if streams == 1 else 20))
            print(f"            {streams:10,} {rate:9,.0f} {wait:7.1f} ms")
        print("milliseconds, p50 (worst):  append a turn   fetch a group   fetch 16   ack   stats     MiB   filled at")
        step = time.time_ns()
        for level in levels:
            done = sum(pool.stats()["channels"].get("train", {"groups": {}})["groups"].values()) * GROUP
            if done > level:
                continue
            taken = fill(pool, turns, max(0, level - done) // GROUP)
            rate = f"{(level - done) / taken:5,.0f} episodes/s" if level > done + 500 else ""
            id = pool.open_episode(channel="bench")
            columns = [milliseconds(lambda n, id=id: pool.append([(id, n, _nth(turns, n))]))]
            base = step
            columns.append(milliseconds(lambda n, base=base: pool.fetch("bench", base + n)))
            columns.append(milliseconds(lambda n, base=base: pool.fetch("bench", base + 100 + n, groups=16), 5))
            columns.append(milliseconds(lambda n, base=base: pool.ack("bench", base + n)))
            columns.append(milliseconds(lambda n: pool.stats(), 10))
            step += 1000
            size = pool.stats()["bytes"] / 2**20
            print(f"{level:9,} episodes  {'  '.join(columns)}  {size:7,.0f}  {rate}", flush=True)


def _nth(turns: list[Turn], n: int) -> Turn:
    first = turns[0]
    return Turn(first.context_ids, first.sampled_ids, first.logprobs, policy_version=1, parent=n - 1 if n else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--where", help="a file, or postgresql://...; a temporary file unless given")
    parser.add_argument("--most", type=int, default=LEVELS[-1], help="episodes at most")
    options = parser.parse_args()
    levels = [level for level in LEVELS if level <= options.most]
    if options.where:
        measure(options.where, levels)
        return
    with tempfile.TemporaryDirectory() as folder:
        measure(str(Path(folder) / "pool.db"), levels)


if __name__ == "__main__":
    main()
