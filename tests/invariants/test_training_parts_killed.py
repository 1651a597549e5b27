"""What a training run leans on is killed at any moment: the run goes on, or says why not, and its batches are whole.

The outside judge, a gateway before it, and what keeps the sandboxes are killed; the engine, which is a part of
the trainer, fails now and then. The long form:
``CLAWGYM_SOAK=30 .venv/bin/pytest tests/invariants/test_training_parts_killed.py -s --timeout=0``.
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from clawgym.pool import Pool
from clawgym.trainers.config import TrainConfig

from ..trainers.runs import small
from .test_training_kills import PROGRAM, check_learnt, learnt

PARTS = ("judge", "gateway", "supervisor", "judge", "gateway")
KILLS = min(30, int(os.environ.get("CLAWGYM_SOAK", "3")))
WAIT = 600
"""Seconds, for what takes a few on a quiet machine."""

# Is pleased with everything, but for its first answers, while it still loads.
JUDGE = r"""
import asyncio, json, sys
from aiohttp import web

loading = int(sys.argv[2])

async def answer(request):
    global loading
    body = await request.json()
    await asyncio.sleep(0.05)
    if loading:
        loading -= 1
        return web.json_response({"error": {"message": "still loading", "type": "x", "code": 400}}, status=400)
    def chunk(delta, why=None):
        choice = {"index": 0, "delta": delta, "finish_reason": why}
        return {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": "m", "choices": [choice]}
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    said = [{"role": "assistant", "content": "Good.\n"}, {"content": "Verdict: +1"}]
    for event in (*map(chunk, said), chunk({}, "stop")):
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await asyncio.sleep(0.02)
    await response.write(b"data: [DONE]\n\n")
    return response

app = web.Application()
app.router.add_post("/v1/chat/completions", answer)
web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)
"""

FAILING = """
import itertools
from clawgym.engines.transformers import TransformersEngine
from clawgym.errors import EngineError

calls, whole = itertools.count(1), TransformersEngine.generate

async def generate(self, *given, **more):
    if next(calls) % 9 == 0:
        raise EngineError("CUDA error: put the accelerator back", retryable=False)
    async for tokens in whole(self, *given, **more):
        yield tokens

TransformersEngine.generate = generate
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def until(true: Callable[[], Any], process: subprocess.Popen[Any] | None = None, said: Path | None = None) -> None:
    """Wait for it, while ``process`` runs."""
    deadline = time.monotonic() + WAIT
    while not true():
        ended = process is not None and process.poll() is not None
        assert not ended, said.read_text()[-2000:] if said else "it has ended"
        assert time.monotonic() < deadline, said.read_text()[-2000:] if said else "nothing comes"
        time.sleep(0.05)


class Outside:
    """A judge, and a gateway before it; both come back where they were."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = {"judge": free_port(), "gateway": free_port()}
        self.processes: dict[str, subprocess.Popen[Any]] = {}
        self.start("judge", 0)
        self.start("gateway")
        lines = (folder / "gateway.out").read_text().splitlines()
        self.base_url, self.key = (line.split()[-1] for line in lines[:2])

    def start(self, name: str, loading: int = 3) -> None:
        port = str(self.ports[name])
        out = self.folder / f"{name}.out"
        if name == "judge":
            command = [sys.executable, "-c", JUDGE, port, str(loading)]
        else:
            words = f"gateway --engine openai --model judge --port {port} --pool {self.folder / 'judge.db'}"
            words += f" --base-url http://127.0.0.1:{self.ports['judge']}/v1"
            command = [sys.executable, "-c", "from clawgym.cli import main; main()", *words.split()]
        with out.open("w") as file:
            process = self.processes[name] = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        until(lambda: self.listens(name) and (name == "judge" or "pool:" in out.read_text()), process, out)

    def listens(self, name: str) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.ports[name]), timeout=1).close()
        except OSError:
            return False
        return True

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait()


@contextmanager
def outside(folder: Path) -> Iterator[Outside]:
    made = Outside(folder)
    try:
        yield made
    finally:
        for process in made.processes.values():
            process.kill()
            process.wait()


class Trainer:
    """The process that trains, begun again where it ended."""

    def __init__(self, out: Path, config: TrainConfig, key: str) -> None:
        self.out, self.said = out, out.with_suffix(".said")
        self.config = config
        self.environment = {**os.environ, "OPENAI_API_KEY": key, "OMP_NUM_THREADS": "1"}
        self.start()

    def start(self, **budget: int) -> None:
        config = self.config.model_copy(update={"budget": self.config.budget.model_copy(update=budget)})
        command = [sys.executable, "-c", FAILING + PROGRAM, str(self.out), config.model_dump_json()]
        with self.said.open("w") as said:
            self.process = subprocess.Popen(command, stdout=said, stderr=said, env=self.environment)

    def step(self) -> int:
        """Wait for one step more; its number."""
        before = len(learnt(self.out))
        until(lambda: len(learnt(self.out)) > before, self.process, self.said)
        return before + 1

    def kill_supervisor(self) -> None:
        (supervisor,) = psutil.Process(self.process.pid).children()
        supervisor.kill()


@pytest.mark.timeout(0 if KILLS > 5 else 900)
def test_a_run_outlives_what_it_leans_on(tmp_path: Path) -> None:
    rng = random.Random(KILLS)
    with outside(tmp_path) as others:
        config = small(
            reward={"judge": "model", "model": "judge", "base_url": others.base_url, "votes": 1},
            evaluation={"every": 10_000, "canary": 1},
            rollout={"groups": 1, "group_size": 2, "staleness": 1},
            budget={"steps": 10_000},
        )
        trainer = Trainer(tmp_path / "run", config, others.key)
        try:
            for kill in range(KILLS):
                part = PARTS[kill % len(PARTS)]
                trainer.step()
                time.sleep(rng.random())
                if part == "supervisor":
                    trainer.kill_supervisor()
                    assert trainer.process.wait(WAIT) not in (0, -9)
                    said = trainer.said.read_text()
                    assert "the sandbox supervisor has ended: start the run again" in said, said[-2000:]
                    trainer.start()
                else:
                    others.kill(part)
                    time.sleep(rng.random())
                    others.start(part)
                print(f"{kill + 1} of {KILLS}: {part}", flush=True)
            steps = trainer.step() + 2
            trainer.process.kill()
            trainer.process.wait()
            trainer.start(steps=steps)
            assert trainer.process.wait(WAIT) == 0, trainer.said.read_text()[-2000:]
        finally:
            trainer.process.kill()
            trainer.process.wait()

    check_learnt(trainer.out, steps)
    unscored = scored = 0
    with Pool(trainer.out / "pool.db") as pool:
        for episode in pool.episodes(channel="train"):
            given = pool.turn_rewards(episode.id).get("judge", {})
            if episode.outcome == "infra":
                assert episode.fate != "delivered"
            elif episode.fate == "delivered":
                assert set(given.values()) <= {1.0}  # what was never said is no 0
                scored += bool(given)
                unscored += not given
        assert any(e.outcome == "infra" and "put the accelerator back" in (e.cause or "") for e in pool.episodes())
    assert scored
    assert unscored  # a judge that still loads says nothing
    rows = [json.loads(line) for line in (trainer.out / "metrics.jsonl").read_text().splitlines()]
    assert any(row["reward/process_scored_frac"] for row in rows)
