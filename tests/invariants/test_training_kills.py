"""A trainer that is killed at any moment goes on: no batch is learnt twice, no episode is lost.

``CLAWGYM_SOAK=30 .venv/bin/pytest tests/invariants/test_training_kills.py --timeout=0`` is the long form.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clawgym.pool import Pool
from clawgym.trainers.common.checkpoints import Checkpoints

from ..trainers.runs import small

KILLS = min(30, int(os.environ.get("CLAWGYM_SOAK", "2")))
PROGRAM = """
import asyncio, sys
from pathlib import Path
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.local.main import train

class Quiet:
    def __getattr__(self, name):
        return lambda *said: None

asyncio.run(train(TrainConfig.model_validate_json(sys.argv[2]), Path(sys.argv[1]), view=Quiet()))
"""


def learnt(out: Path) -> list[int]:
    """The steps that the run has written figures of."""
    try:
        return [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    except (FileNotFoundError, ValueError):
        return []


def check_learnt(out: Path, steps: int) -> None:
    """Every step has its figures and its batch, and each group that was delivered was delivered once, whole."""
    assert learnt(out) == list(range(1, steps + 1))
    last = Checkpoints(out).last()
    assert last is not None
    assert int(last.name) == steps
    assert not list((out / "checkpoints").glob(".*"))
    with Pool(out / "pool.db") as pool:
        delivered: dict[str, int] = {}
        for step in range(steps):
            batch = pool.fetch("trainer", step)
            assert batch is not None
            assert batch.acked
            for group in batch.groups:
                delivered[group.id] = delivered.get(group.id, 0) + 1
                assert len(group.episodes) == 2  # what was under way at a kill was played again
        assert set(delivered.values()) == {1}
        # Every episode of a group that was learnt has an end, and was either in a batch or made up for.
        for episode in pool.episodes(channel="train"):
            if episode.group in delivered:
                assert episode.state == "closed"
                assert episode.fate == "delivered" or episode.outcome == "infra"


# Killed in its third step, once, right before or after its checkpoint is written.
KILLED = """
import os, signal
from clawgym.trainers.common.checkpoints import Checkpoints

save = Checkpoints.save

def killing(self, policy, learner, progress):
    mark = self.folder.parent / "killed"
    kill = progress.step == 3 and not mark.exists()
    if not kill or {after}:
        save(self, policy, learner, progress)
    if kill:
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)

Checkpoints.save = killing
"""


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_step_is_whole_where_its_checkpoint_is_the_last_that_was_done(tmp_path: Path, after: bool) -> None:
    config = small(
        budget={"steps": 4}, checkpoint_every=3, evaluation={"every": 100}, rollout={"groups": 1, "group_size": 2}
    )
    given = [str(tmp_path / "run"), config.model_dump_json()]
    cut = PROGRAM.replace("asyncio.run(", f"{KILLED.format(after=after)}\nasyncio.run(")
    first = subprocess.run([sys.executable, "-c", cut, *given], capture_output=True, text=True)
    assert first.returncode == -signal.SIGKILL, first.stderr[-2000:]
    done = subprocess.run([sys.executable, "-c", cut, *given], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    check_learnt(tmp_path / "run", 4)


@pytest.mark.timeout(600 if KILLS < 3 else 0)
def test_a_killed_trainer_learns_every_batch_once(tmp_path: Path) -> None:
    steps = 8 * KILLS  # more than are learnt between the kills, so that each of them finds a trainer at work
    config = small(
        budget={"steps": steps}, evaluation={"every": 100}, rollout={"groups": 1, "group_size": 2, "staleness": 1}
    )
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "run"), config.model_dump_json()]
    rng = random.Random(8)
    killed = 0
    for _ in range(KILLS):
        before = len(learnt(tmp_path / "run"))
        with open(tmp_path / "said", "w+") as said:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said)
            while len(learnt(tmp_path / "run")) <= before and process.poll() is None:
                time.sleep(0.05)
            time.sleep(rng.random())
            process.send_signal(signal.SIGKILL)
            ended = process.wait()
            assert ended in (0, -signal.SIGKILL), (said.seek(0), said.read())[1][-2000:]
        killed += ended == -signal.SIGKILL
    assert killed
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]

    check_learnt(tmp_path / "run", steps)
