"""What an agent's work does to a sandbox, and a broken verifier to its own: who is to blame, and the run goes on."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from clawgym.agents import NoopAgent, ScriptAgent
from clawgym.agents.protocol import AgentContext, AgentReport
from clawgym.evaluation.runner import EvalConfig, evaluate
from clawgym.records import GradingMode, Outcome, Task, TaskSet
from clawgym.records.run_folder import RunFolder
from clawgym.sandbox import Backend

from ..rollouts import episode_of
from ..verifiers.tasks_for_tests import CHECK, task, with_mode
from .faults import LIMITS, SOLVE

SMALL = dataclasses.replace(LIMITS, memory_mb=128, disk_mb=32)


def script(text: str) -> ScriptAgent:
    return ScriptAgent(text.encode(), "fault")


def sandboxes(backend: Backend) -> list[str]:
    return list(backend.sandboxes)  # type: ignore[attr-defined]


# -- disk


@pytest.mark.parametrize("mode", [GradingMode.CLEAN, GradingMode.FORK])
async def test_a_full_disk_in_the_sandbox_is_the_agents(backend: Backend, mode: GradingMode) -> None:
    """It is told so by the system and can go on; what it left is graded."""
    made = with_mode(task(limits=SMALL), mode)
    full = "for i in 1 2 3; do cat /dev/zero > big$i; done"
    episode = await episode_of(made, script(full), backend)
    assert episode.outcome is Outcome.FAILED, (episode.outcome, episode.cause)
    assert "No space left on device" in episode.steps[-1].observations[0].content
    mended = await episode_of(made, script(f"{full}; rm big*; {SOLVE}"), backend)
    assert mended.outcome is Outcome.SOLVED, mended.cause


async def test_work_that_leaves_no_room_for_grading_is_the_agents(backend: Backend) -> None:
    """The fresh sandbox takes the workspace and the verifier: an agent that used every byte has filled that too."""
    many = task(limits=dataclasses.replace(SMALL, disk_mb=8))
    filled = "mkdir -p output; i=0; while printf %4096s > output/$i; do i=$((i + 1)); done; " + SOLVE
    episode = await episode_of(many, script(filled), backend)
    assert (episode.outcome, episode.error) == (Outcome.FAILED, ""), (episode.outcome, episode.cause)
    assert episode.cause == "workspace"
    assert episode.result is not None
    assert episode.result.strict == 0.0


# -- memory


class Hoarder(NoopAgent):
    """Fills its disk and then its shared memory until nothing is left for process 1 either."""

    async def run(self, context: AgentContext) -> AgentReport:
        for number in range(200):
            where = "/tmp/a" if number == 0 else f"/dev/shm/{number}"
            await context.sandbox.exec(["bash", "-c", f"head -c {60 if number < 2 else 4}M /dev/zero > {where}"])
        return AgentReport()


async def test_a_sandbox_out_of_memory_is_the_agents(backend: Backend) -> None:
    """First a program of its own is killed, which it can see; a sandbox whose process 1 goes has failed as ``oom``."""
    hog = "python3 -c 'x = bytearray(2**31)'"
    one = await episode_of(task(limits=SMALL), script(f"{hog}; {SOLVE}"), backend)
    assert one.outcome is Outcome.SOLVED, (one.outcome, one.cause)
    files = task(limits=dataclasses.replace(SMALL, memory_mb=40, disk_mb=64))  # files are memory too
    whole = await episode_of(files, Hoarder(), backend)
    assert (whole.outcome, whole.cause) == (Outcome.FAILED, "oom")
    assert not sandboxes(backend)


READS_ALL = CHECK + b"\nheld = open(os.path.join(root, 'output/sum.txt'), 'rb').read() * 400\n"


async def test_a_verifier_that_runs_out_of_memory_on_the_agents_work(backend: Backend) -> None:
    hungry = task(b"import os, sys\nroot = sys.argv[1]\nheld = bytearray(2**31)")
    without = await episode_of(hungry, script("true"), backend)
    assert (without.outcome, without.cause) == (Outcome.INFRA, "control-killed")
    assert without.error.splitlines()[0].endswith("repair the verifier in the task")
    control = b"if not os.path.exists(os.path.join(sys.argv[1], 'output/sum.txt')): print('{}'); raise SystemExit\n"
    made = task(b"import os, sys\n" + control + READS_ALL, limits=SMALL)
    bloated = "mkdir output; head -c 8M /dev/zero > output/sum.txt"
    episode = await episode_of(made, script(bloated), backend)
    assert (episode.outcome, episode.cause) == (Outcome.FAILED, "killed"), episode.error
    assert episode.result is not None
    assert episode.result.official == 0.0


# -- a verifier that never ends

ENDLESS = {
    "ignores-signals": "import signal, time\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\n"
    "while 1: time.sleep(1)",
    "forks-twice": "import os, time\nif os.fork() == 0:\n os.setsid()\n if os.fork() == 0: time.sleep(10**6)\n"
    " os._exit(0)\ntime.sleep(10**6)",
    "prints": "while 1: print('x' * 4096)",
    "forks": "import os\nwhile 1:\n try: os.fork()\n except OSError: pass",
}
LEAVES_ONE = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(10**6)
    os._exit(0)
os.wait()
print('{"made": 0.0}', flush=True)
"""
ON_WORK_ONLY = (
    "import os, sys\nif not os.path.exists(sys.argv[1] + '/output'): print('{\"made\": 0.0}'); raise SystemExit\n"
)


async def test_verifiers_that_never_end(backend: Backend, tmp_path: Path) -> None:
    """On the agent's work only: ``failed``. On the untouched workspace too: ``infra``. The other tasks are graded."""

    def endless(kind: str, check: str, seconds: float) -> Task:
        limits = dataclasses.replace(LIMITS, verify_seconds=seconds, pids=32)
        return task(check.encode(), id=kind, limits=limits)

    tasks = [endless(f"work-{name}", ON_WORK_ONLY + check, 3) for name, check in ENDLESS.items()]
    tasks += [endless(f"always-{name}", check, 0.7) for name, check in ENDLESS.items()]
    tasks += [endless("leaves-one-on-its-output", LEAVES_ONE, 20), task(id="good", limits=LIMITS)]
    config = EvalConfig(TaskSet("endless", tuple(tasks)), script(SOLVE), backend, tmp_path / "run", concurrency=6)
    summary = await asyncio.wait_for(evaluate(config, retry_seconds=0), 120)
    run = RunFolder.read(tmp_path / "run")
    for name in ENDLESS:
        work, always = run.latest[f"work-{name}#0"], run.latest[f"always-{name}#0"]
        assert work["outcome"] == "failed", work
        assert work["cause"] in ("timeout", "killed", "crash", "unresponsive", "pids", "oom"), work
        assert always["outcome"] == "infra", always
        assert always["cause"].startswith("control-")
        assert "repair the verifier" in (run.episode_folder(f"always-{name}", 0) / "error.log").read_text()
    assert set(summary.missing) == {f"always-{name}#0" for name in ENDLESS}
    # What the checker itself said counts, whoever else holds its output.
    assert run.latest["leaves-one-on-its-output#0"]["result"]["checks"] == {"made": 0.0}
    assert run.latest["good#0"]["outcome"] == "solved"
    assert not sandboxes(backend)


async def test_many_broken_verifiers_do_not_stop_a_run(backend: Backend, tmp_path: Path) -> None:
    """They are the tasks' own: what comes behind them in the set is reached, and by each later call too."""
    broken = [task(b"raise SystemExit(9)", id=f"t-{i:02}", limits=LIMITS) for i in range(6)]
    tasks = (*broken, task(id="t-good", limits=LIMITS))
    config = EvalConfig(TaskSet("broken", tasks), script(SOLVE), backend, tmp_path / "run", concurrency=3)
    summary = await asyncio.wait_for(evaluate(config, retry_seconds=0), 120)
    assert summary.missing == tuple(f"t-{i:02}#0" for i in range(6))
    assert summary.outcomes == {"solved": 1}
