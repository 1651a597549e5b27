"""Whatever moment the clients of a pool are killed at: nothing acknowledged is lost, nothing is delivered twice.

Two writers and two consumers share a pool; one after the other is killed with SIGKILL at a random moment and started
again. ``CLAWGYM_SOAK`` is the number of kills (12 unless set, for each of four settings).
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from clawgym.pool import EpisodeEnd, Pool
from clawgym.records import prompt_ids

from ..pool.servers import new_database, postgres_server
from .pool_to_kill import GROUP_DEADLINE, turn_of

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="kills with SIGKILL")

KILLS = int(os.environ.get("CLAWGYM_SOAK", "12"))
CLIENTS = {"w0": "writer", "w1": "writer", "c0": "consumer", "c1": "consumer"}
_SCRIPT = str(Path(__file__).with_name("pool_to_kill.py"))


@pytest.fixture(params=["sqlite", "postgres"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield str(tmp_path / "pool.db")
        return
    with postgres_server() as server:
        yield new_database(server, f"s{uuid.uuid4().hex}")


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def kill_again_and_again(where: str, folder: Path, lease: float) -> None:
    """``KILLS`` kills, each of a client that has had time to do something, or not."""
    dice = random.Random(os.urandom(8))
    running: dict[str, int] = {}
    with subprocess.Popen([sys.executable, _SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as nest:
        assert nest.stdin is not None
        assert nest.stdout is not None

        def start(name: str) -> None:
            print(CLIENTS[name], where, name, folder, lease, file=nest.stdin, flush=True)
            running[name] = int(nest.stdout.readline())  # type: ignore[union-attr]

        def kill(name: str) -> None:
            pid = running.pop(name)
            os.kill(pid, signal.SIGKILL)
            while not gone(pid):
                time.sleep(0.002)

        def errors(name: str) -> str:
            return (folder / f"{name}.errors").read_text()

        try:
            for name in CLIENTS:
                start(name)
            for _ in range(KILLS):
                victim = dice.choice(list(CLIENTS))
                log = folder / f"{victim}.log"
                seen = log.stat().st_size if log.exists() else 0
                deadline = time.monotonic() + 60
                if dice.random() < 0.8:  # most are killed at work, some while they start
                    while (log.stat().st_size if log.exists() else 0) <= seen + 1 and time.monotonic() < deadline:
                        assert not gone(running[victim]), errors(victim)
                        time.sleep(0.005)
                time.sleep(dice.random() * 0.1)
                assert not gone(running[victim]), errors(victim)
                kill(victim)
                start(victim)
        finally:
            for name in list(running):
                if not gone(running[name]):
                    kill(name)
            nest.stdin.close()


def acknowledged(folder: Path, first: str) -> list[list[str]]:
    """The lines that begin with ``first``, of all clients; one that was cut by a kill says nothing."""
    text = "".join((folder / f"{name}.log").read_text() for name in CLIENTS)
    return [words[1:] for line in text.splitlines() if (words := line.split()) and words[0] == first]


def consume_the_rest(pool: Pool, name: str, learnt: list[list[str]]) -> None:
    """What the consumer would do when it is started once more, until nothing is ready."""
    while (batch := pool.fetch(name, len(learnt), min_episodes=1)) is not None:
        learnt.append([member.episode.id for group in batch.groups for member in group.episodes])
        pool.ack(name, len(learnt) - 1)


@pytest.mark.parametrize("lease", [600.0, 0.05], ids=["leases-hold", "leases-run-out"])
def test_nothing_acknowledged_is_lost_and_nothing_is_delivered_twice(where: str, tmp_path: Path, lease: float) -> None:
    kill_again_and_again(where, tmp_path, lease)
    with Pool(where) as pool:
        for left in list(pool.episodes(state="open")):
            pool.close_episode(left.id, EpisodeEnd(outcome="failed"))
        time.sleep(GROUP_DEADLINE + max(0.1, lease if lease < 1 else 0))
        stored = {episode.id: episode for episode in pool.episodes()}
        for (id,) in acknowledged(tmp_path, "opened"):
            assert id in stored
        for (id,) in acknowledged(tmp_path, "closed"):
            assert stored[id].state == "closed"
        turns = {id: pool.turns(id) for id in stored}
        appended = acknowledged(tmp_path, "turn")
        assert appended
        for id, index in appended:
            assert turns[id][int(index)] == turn_of(id, int(index))
        for id, some in turns.items():  # and what was not acknowledged is whole, or not there
            assert some == tuple(turn_of(id, index) for index in range(len(some)))

        learnt: list[str] = []
        for name in ("c0", "c1"):
            checkpoint = tmp_path / f"{name}.json"
            steps = json.loads(checkpoint.read_text()) if checkpoint.exists() else []
            if lease > 1 and steps:
                pool.ack(name, len(steps) - 1)
            elif steps:  # the last one may have been lost: what the pool acknowledged counts
                steps = [words[1:] for words in acknowledged(tmp_path, "acked") if words[1:] in steps]
            if lease > 1:
                consume_the_rest(pool, name, steps)
            learnt += [id for step in steps for id in step]
        acked = Counter(id for _, *ids in acknowledged(tmp_path, "acked") for id in ids)
        assert max(acked.values(), default=0) <= 1
        if lease > 1:
            assert max(Counter(learnt).values()) == 1
            stored = {episode.id: episode for episode in pool.episodes()}
            assert set(learnt) == {id for id, episode in stored.items() if episode.fate == "delivered"}
            assert {e.fate for e in stored.values()} <= {"delivered", "empty", "late", "dropped"}
            assert set(acked) <= set(learnt)
            assert set(pool.stats()["batches"]) == {"acked"}
        for group in (pool.fetch("last", 0, min_episodes=1, groups=1),):
            if group is not None:
                assert not {m.episode.id for g in group.groups for m in g.episodes} & set(acked)


def test_the_turns_of_a_writer_continue_each_other() -> None:
    """The test above compares with these: they must be worth comparing with."""
    turns = [turn_of("x", n) for n in range(3)]
    assert len({turn.sampled_ids for turn in turns}) == 3
    assert prompt_ids(turns, 2)[: len(turns[0].context_ids)] == turns[0].context_ids
