"""Clients of a pool that are about to be killed.

``python pool_to_kill.py`` reads lines ``writer|consumer WHERE NAME FOLDER LEASE`` and answers each with the pid of a
client that it forked: it has imported everything already, so a client is at work within milliseconds.

Whatever the pool acknowledges is written down at once: a writer appends lines to ``FOLDER/NAME.log``; a consumer
replaces ``FOLDER/NAME.json``, its checkpoint, and goes on from there when it is started again.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import traceback
import uuid
from pathlib import Path

from clawgym.errors import PoolError
from clawgym.pool import EpisodeEnd, Pool, PoolWriter
from clawgym.records import Turn

GROUP_DEADLINE = 0.5


def turn_of(id: str, index: int) -> Turn:
    """The turn that a writer gives an episode at this place."""
    dice = random.Random(f"{id} {index}")
    count = dice.randint(1, 40)
    return Turn(
        tuple(dice.randrange(30_000) for _ in range(dice.randint(1, 60))),
        tuple(dice.randrange(30_000) for _ in range(count)),
        tuple(-dice.random() - 1e-6 for _ in range(count)),
        policy_version=1,
        parent=index - 1 if index else None,
        messages=({"role": "user", "content": str(dice.random())},),
    )


class Log:
    """Lines that are in the file when :meth:`write` returns; the last may be half written."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(self._file, b"\n")

    def write(self, *words: object) -> None:
        os.write(self._file, (" ".join(map(str, words)) + "\n").encode())


async def write(where: str, name: str, folder: Path) -> None:
    """Episodes for ever, three at once; first those that an earlier life left open are closed."""
    log = Log(folder / f"{name}.log")
    pool = Pool(where)
    for left in list(pool.episodes(state="open")):
        if left.agent == name:
            pool.close_episode(left.id, EpisodeEnd(outcome="failed", reward=0.0))
            log.write("closed", left.id)
    writer = PoolWriter(pool)

    async def one(group: str | None) -> None:
        id = uuid.uuid4().hex
        try:
            await writer.run(pool.open_episode, id=id, group=group, agent=name)
        except PoolError as error:
            if "open another group" not in str(error):
                raise
            return  # this one was slow: the deadline of its group has passed
        log.write("opened", id)
        for index in range(random.randint(1, 6)):
            await writer.append(id, index, turn_of(id, index))
            log.write("turn", id, index)
        await writer.run(pool.close_episode, id, EpisodeEnd(outcome="solved", reward=1.0))
        log.write("closed", id)

    while True:
        group = await writer.run(pool.open_group, size=2, deadline=GROUP_DEADLINE)
        await asyncio.gather(one(group), one(group), one(None))


def consume(where: str, name: str, folder: Path, lease: float) -> None:
    """Step after step: fetch, learn, checkpoint, acknowledge."""
    checkpoint = folder / f"{name}.json"
    learnt = json.loads(checkpoint.read_text()) if checkpoint.exists() else []
    log = Log(folder / f"{name}.log")
    pool = Pool(where)
    lost = 0
    if learnt:
        try:
            pool.ack(name, len(learnt) - 1)  # the checkpoint says that it was learnt; the pool may not know yet
        except PoolError as error:  # the lease ran out while nobody ran: what was learnt is thrown away
            if "another consumer" not in str(error) and "not fetched" not in str(error):
                raise
            learnt.pop()
    while True:
        step = len(learnt)
        batch = pool.fetch(name, step, groups=random.randint(1, 2), min_episodes=1, lease_seconds=lease, wait=0.2)
        if batch is None:
            continue
        learnt.append([member.episode.id for group in batch.groups for member in group.episodes])
        fresh = checkpoint.with_suffix(".new")
        fresh.write_text(json.dumps(learnt))
        fresh.replace(checkpoint)
        try:
            pool.ack(name, step)
        except PoolError as error:
            if "another consumer" not in str(error):
                raise
            learnt.pop()
            lost += 1
        else:
            log.write("acked", step, *learnt[-1])


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the killed
    for line in sys.stdin:
        kind, where, name, folder, lease = line.split()
        pid = os.fork()
        if pid:
            print(pid, flush=True)
            continue
        try:
            os.dup2(os.open(f"{folder}/{name}.errors", os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
            if kind == "writer":
                asyncio.run(write(where, name, Path(folder)))
            else:
                consume(where, name, Path(folder), float(lease))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)


if __name__ == "__main__":
    main()
