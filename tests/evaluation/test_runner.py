from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path

import pytest

from clawgym.errors import AgentError, EngineError, RunFolderError, SandboxError, SandboxUnavailable, UnsupportedTask
from clawgym.evaluation.runner import MAX_ATTEMPTS, EvalConfig, episode_seed, evaluate
from clawgym.records import Episode, Fault, Outcome, Task, TaskSet, VerifierResult, VerifierSpec
from clawgym.records.run_folder import RunFolder
from clawgym.rollout import Ended
from clawgym.sandbox.protocol import Isolation


class FakeAgent:
    name, version = "fake", "1"

    def identity(self):
        return {"engine": {"model": "m"}}


class FakeBackend:
    name = "fake"

    async def probe(self):
        return Isolation("fake", "none", {})

    async def create(self, spec):
        raise SandboxError("no sandboxes here: use a real backend")


def tasks(n: int = 4, **kwargs) -> TaskSet:
    return TaskSet("demo", tuple(Task(f"t{i}", f"do {i}", VerifierSpec("reward_sh", ()), **kwargs) for i in range(n)))


def config(out: Path, task_set: TaskSet | None = None, **kwargs) -> EvalConfig:
    return EvalConfig(task_set or tasks(), FakeAgent(), FakeBackend(), out, **kwargs)  # type: ignore[arg-type]


async def attempt(request, agent, backend, *, outcome=None, cause=None):
    """Solved or not by the seed alone."""
    task, score = request.task, float(request.seed % 2)
    outcome = outcome or (Outcome.SOLVED if score else Outcome.FAILED)
    result = (
        None if outcome == Outcome.INFRA else VerifierResult({"a": score}, score, score, None, floor=request.baseline)
    )
    episode = Episode(
        task.id, task.content_hash, request.sample, request.seed, agent.name, outcome, cause=cause, result=result
    )
    return Ended(episode=episode, reward=None if result is None else score, truncated=False)


def rows(out: Path) -> dict[str, tuple]:
    run = RunFolder.read(out)
    return {key: (row["seed"], row["outcome"], row["result"]["checks"]["a"]) for key, row in run.latest.items()}


async def test_every_task_runs_k_times_and_the_folder_is_complete(tmp_path: Path):
    summary = await evaluate(config(tmp_path / "run", samples=3), run_episode=attempt)
    assert summary.complete
    assert summary.scores.episodes == 12
    assert sorted(rows(tmp_path / "run")) == sorted(f"t{i}#{s}" for i in range(4) for s in range(3))
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["complete"] is True
    assert "demo" in (tmp_path / "run" / "report.html").read_text()


async def test_results_do_not_depend_on_concurrency_or_finishing_order(tmp_path: Path):
    async def shuffled(request, *args):
        await asyncio.sleep(random.random() / 50)
        return await attempt(request, *args)

    for width in (1, 7):
        await evaluate(config(tmp_path / str(width), samples=3, concurrency=width), run_episode=shuffled)
    assert rows(tmp_path / "1") == rows(tmp_path / "7")


async def test_seeds_depend_on_run_task_and_sample_only(tmp_path: Path):
    await evaluate(config(tmp_path / "run", samples=2), run_episode=attempt)
    seeds = [seed for seed, _, _ in rows(tmp_path / "run").values()]
    assert len(set(seeds)) == 8
    assert episode_seed(0, "h", 0) == episode_seed(0, "h", 0)
    assert (
        len({episode_seed(0, "h", 0), episode_seed(1, "h", 0), episode_seed(0, "g", 0), episode_seed(0, "h", 1)}) == 4
    )
    assert all(0 <= seed < 2**31 for seed in seeds)


async def test_episodes_start_in_order_and_within_the_concurrency(tmp_path: Path):
    started, now, most = [], 0, 0

    async def watched(request, *args):
        nonlocal now, most
        started.append(f"{request.task.id}#{request.sample}")
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.01)
        now -= 1
        return await attempt(request, *args)

    await evaluate(config(tmp_path / "run", tasks(6), samples=2, concurrency=3), run_episode=watched)
    assert started == [f"t{i}#{s}" for s in range(2) for i in range(6)]
    assert 2 <= most <= 3


async def test_infrastructure_errors_are_retried_recorded_and_not_scored(tmp_path: Path):
    calls: Counter[str] = Counter()

    async def flaky(request, *args):
        task = request.task
        calls[task.id] += 1
        if task.id == "t0" or (task.id == "t1" and calls["t1"] < 3):
            return await attempt(request, *args, outcome=Outcome.INFRA, cause="fork failed")
        if task.id == "t2" and calls["t2"] < 2:
            raise EngineError("502: try later", retryable=True)
        return await attempt(request, *args)

    summary = await evaluate(config(tmp_path / "run"), run_episode=flaky, retry_seconds=0)
    assert calls == {"t0": MAX_ATTEMPTS, "t1": 3, "t2": 2, "t3": 1}
    assert summary.missing == ("t0#0",)
    assert not summary.complete
    assert summary.scores.episodes == 3
    assert (summary.attempts, summary.infra_attempts) == (9, 6)
    assert summary.infra_causes["fork failed"] == 5
    assert [row["attempt"] for row in RunFolder.read(tmp_path / "run").rows if row["key"] == "t1#0"] == [0, 1, 2]

    again = await evaluate(config(tmp_path / "run"), run_episode=attempt)
    assert again.complete
    assert calls["t3"] == 1
    assert RunFolder.read(tmp_path / "run").latest["t0#0"]["attempt"] == MAX_ATTEMPTS


async def test_exception_in_one_episode_is_recorded_as_infrastructure_error(tmp_path: Path):
    async def buggy(request, *args):
        task = request.task
        if task.id == "t2":
            raise KeyError("oops")
        return await attempt(request, *args)

    summary = await evaluate(config(tmp_path / "run"), run_episode=buggy, retry_seconds=0)
    assert summary.missing == ("t2#0",)
    assert summary.scores.episodes == 3
    assert summary.infra_causes == {"KeyError: 'oops'": MAX_ATTEMPTS}
    assert "in buggy" in (tmp_path / "run" / "episodes" / "t2.0" / "error.log").read_text()


async def test_run_aborts_after_many_infrastructure_errors_in_a_row(tmp_path: Path):
    calls = 0

    async def down(request, *args):
        nonlocal calls
        calls += 1
        return await attempt(request, *args, outcome=Outcome.INFRA, cause="engine: refused")

    summary = await evaluate(config(tmp_path / "run", tasks(100), concurrency=2), run_episode=down, retry_seconds=0)
    assert calls < 20
    assert len(summary.missing) == 100


async def test_errors_of_tasks_do_not_abort_the_run(tmp_path: Path):
    async def broken(request, *args):
        ended = await attempt(request, *args, outcome=Outcome.INFRA, cause="task: gone")
        return dataclasses.replace(ended, episode=dataclasses.replace(ended.episode, fault=Fault.TASK))

    summary = await evaluate(config(tmp_path / "run", tasks(20)), run_episode=broken, retry_seconds=0)
    assert summary.infra_faults == {"task": 20 * MAX_ATTEMPTS}


async def test_unsupported_tasks_are_not_scored(tmp_path: Path):
    async def picky(request, *args):
        task = request.task
        if task.id == "t1":
            raise UnsupportedTask("needs network")
        if task.id == "t2":
            raise AgentError("no reference solution: add solution/solve.sh")
        return await attempt(request, *args)

    marked = tasks(4).tasks + tasks(6, unsupported="needs an image").tasks[4:5]
    summary = await evaluate(config(tmp_path / "run", TaskSet("demo", marked)), run_episode=picky)
    assert summary.unsupported == {
        "t1": "needs network",
        "t2": "no reference solution: add solution/solve.sh",
        "t4": "needs an image",
    }
    assert summary.complete
    assert summary.planned == summary.scores.episodes == 2

    async def never(*args, **kwargs):
        raise AssertionError("an unsupported task was run again")

    assert (await evaluate(config(tmp_path / "run", TaskSet("demo", marked)), run_episode=never)).complete


async def test_unavailable_backend_ends_the_run(tmp_path: Path):
    async def nowhere(*args, **kwargs):
        raise SandboxUnavailable("no user namespaces: enable them")

    with pytest.raises(SandboxUnavailable):
        await evaluate(config(tmp_path / "run"), run_episode=nowhere)
    assert not RunFolder.read(tmp_path / "run").rows


async def test_baselines_reach_the_episodes_and_the_run_manifest(tmp_path: Path, monkeypatch):
    task_set = tasks(2)
    monkeypatch.setattr("clawgym.verifiers.baselines.known_baseline", lambda task: 0.25)
    await evaluate(config(tmp_path / "run", task_set, baselines={"t1": 0.5}), run_episode=attempt)
    run = RunFolder.read(tmp_path / "run")
    assert {k: row["result"]["floor"] for k, row in run.latest.items()} == {"t0#0": 0.25, "t1#0": 0.5}
    assert run.manifest.tasks["t1"]["floor"] == 0.5
    with pytest.raises(RunFolderError, match=r"tasks\.t1\.floor"):
        await evaluate(config(tmp_path / "run", task_set), run_episode=attempt)


async def test_stopping_cancels_running_episodes_and_the_same_call_resumes(tmp_path: Path):
    stop, ran, cancelled = asyncio.Event(), Counter(), []

    async def slow(request, *args):
        task = request.task
        if task.id == "t3" and not stop.is_set():
            asyncio.get_running_loop().call_later(0.05, stop.set)
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.append(task.id)
                raise
        ran[f"{request.task.id}#{request.sample}"] += 1
        return await attempt(request, *args)

    began = time.monotonic()
    first = await evaluate(config(tmp_path / "run", tasks(6), concurrency=1), run_episode=slow, stop=stop)
    assert time.monotonic() - began < 10
    assert cancelled == ["t3"]
    assert not first.complete
    assert (tmp_path / "run" / "report.html").exists()
    second = await evaluate(config(tmp_path / "run", tasks(6), concurrency=1), run_episode=slow)
    assert second.complete
    assert set(ran.values()) == {1}, "an episode that was done was run again"


async def test_cancelling_evaluate_leaves_nothing_running(tmp_path: Path):
    alive, started = 0, asyncio.Event()

    async def slow(*args, **kwargs):
        nonlocal alive
        alive += 1
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            alive -= 1

    call = asyncio.create_task(evaluate(config(tmp_path / "run", concurrency=2), run_episode=slow))
    await started.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert alive == 0
    RunFolder.open(tmp_path / "run", RunFolder.read(tmp_path / "run").manifest).close()


PROGRAM = """
import asyncio, importlib.util, sys
spec = importlib.util.spec_from_file_location("helpers", {here!r})
helpers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(helpers)

async def slow(request, *args):
    with open({log!r}, "a") as log:
        log.write(f"{{request.task.id}}#{{request.sample}}\\n")
    await asyncio.sleep(0.02)
    return await helpers.attempt(request, *args)

config = helpers.config(helpers.Path({out!r}), helpers.tasks(30), samples=2, concurrency=4)
print(asyncio.run(helpers.evaluate(config, run_episode=slow)).complete)
"""


@pytest.mark.parametrize("kill_after", [1, 17, 40])
def test_sigkill_loses_at_most_the_episodes_in_flight(tmp_path: Path, kill_after: int):
    out, log = tmp_path / "run", tmp_path / "log"
    program = textwrap.dedent(PROGRAM.format(here=__file__, log=str(log), out=str(out)))
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        deadline = time.monotonic() + 60
        results = out / "results.jsonl"
        while not results.exists() or results.read_bytes().count(b"\n") < kill_after:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    survived = {row["key"] for row in RunFolder.read(out).rows}
    assert kill_after <= len(survived) < 60
    with results.open("ab") as file:  # what a kill within write() leaves
        file.write(b'{"key": "t29#1", "outco')
    for key in survived:
        assert (out / "episodes" / key.replace("#", ".") / "transcript.json").exists()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
    run = RunFolder.read(out)
    assert len(run.rows) == len(run.latest) == 60
    started = Counter(log.read_text().split())
    again = {key for key, times in started.items() if times > 1}
    assert not again & survived
    assert len(again) <= 4
    assert len(run.manifest.resumed) == 1
