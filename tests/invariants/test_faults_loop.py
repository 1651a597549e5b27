"""The loop, the process or the supervisor behind an environment ends: an error or a fresh start, never a hang."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import psutil
import pytest

from clawgym.envs._runtime import runtime
from clawgym.envs._vector import TaskVectorEnv
from clawgym.errors import ClawGymError
from clawgym.records import TaskSet
from clawgym.sandbox import leases

from ..rollouts import episode_of
from ..verifiers.tasks_for_tests import task
from .faults import LIMITS, SOLVE

TASKS = TaskSet("sums", (task(limits=LIMITS),))

pytestmark = pytest.mark.timeout(120)  # what hangs fails


@pytest.fixture
def env() -> Iterator[gym.Env[Any, Any]]:
    made = gym.make("ClawGym/terminal-v0", tasks=TASKS)
    made.reset(seed=0)
    yield made
    made.close()


@pytest.fixture
def batch() -> Iterator[TaskVectorEnv]:
    made = gym.make("ClawGym/terminal-v0", num_envs=3, tasks=TASKS)
    assert isinstance(made, TaskVectorEnv)
    made.reset(seed=0)
    yield made
    made.close()


def supervisors() -> set[int]:
    """Pids of this process's supervisors."""
    return {child.pid for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE}


def stop_loop() -> None:
    loop = runtime().loop
    loop.call_soon_threadsafe(loop.stop)


def raise_in_loop(error: type[BaseException]) -> None:
    def burst() -> None:
        raise error

    runtime().loop.call_soon_threadsafe(burst)


# -- the loop


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("fault", [stop_loop, lambda: raise_in_loop(SystemExit), lambda: raise_in_loop(RuntimeError)])
def test_a_loop_that_was_stopped_goes_on(env: gym.Env[Any, Any], fault: Callable[[], None]) -> None:
    env.step("X=7")
    fault()
    time.sleep(0.2)
    assert env.step("echo $X")[0]["output"] == "7\n"
    env.step(SOLVE)
    assert env.step("submit")[4]["outcome"] == "solved"


def test_a_loop_that_is_stopped_while_one_waits(batch: TaskVectorEnv) -> None:
    threading.Timer(0.5, stop_loop).start()
    assert batch.step(["sleep 1.5; echo a"] * 3)[0]["output"] == ("a\n",) * 3
    threading.Timer(0.5, stop_loop).start()
    batch.send(["sleep 1.5; echo a"], [1])
    assert batch.recv(1)[0].tolist() == [1]


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_a_loop_that_was_closed_is_an_error_and_leaves_nothing() -> None:
    before = supervisors()
    made = gym.make("ClawGym/terminal-v0", num_envs=2, tasks=TASKS)
    assert isinstance(made, TaskVectorEnv)
    made.reset(seed=0)
    other = gym.make("ClawGym/terminal-v0", tasks=TASKS)
    other.reset(seed=0)
    made.send(["sleep 60"] * 2, range(2))
    loop, thread = runtime().loop, runtime()._thread
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    with pytest.raises(ClawGymError, match="make the environment again"):
        made.recv(1)
    with pytest.raises(gym.error.AlreadyPendingCallError):
        made.reset(seed=0)
    made.close()
    with pytest.raises(ClawGymError, match="make the environment again"):
        other.step("ls")
    other.close()
    fresh = gym.make("ClawGym/terminal-v0", tasks=TASKS)
    fresh.reset(seed=0)
    assert fresh.step("echo on")[0]["output"] == "on\n"
    fresh.close()
    del made, other
    deadline = time.monotonic() + 20
    while supervisors() - before and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.05)
    assert not supervisors() - before, "sandboxes of a loop that is gone"


# -- forks


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_an_environment_does_not_work_in_a_fork(env: gym.Env[Any, Any], batch: TaskVectorEnv) -> None:
    def child() -> None:
        refused = 0
        calls: list[Callable[[], object]] = [lambda: env.step("ls"), lambda: env.reset(seed=0)]
        for call in [*calls, lambda: batch.step(["ls"] * 3), lambda: batch.send(["ls"], [0])]:
            try:
                call()
            except ClawGymError as error:
                refused += "make one in this process" in str(error)
        env.close()
        batch.close()
        os._exit(refused)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(30)
    assert process.exitcode == 4
    assert env.step("echo parent")[0]["output"] == "parent\n"
    assert batch.step(["echo parent"] * 3)[0]["output"] == ("parent\n",) * 3


# -- Ctrl-C


def interrupt_after(seconds: float) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests in the background ignores it
    threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGINT)).start()


def test_ctrl_c_in_a_step_ends_the_episode(env: gym.Env[Any, Any]) -> None:
    interrupt_after(0.5)
    with pytest.raises(KeyboardInterrupt):
        env.step("sleep 60")
    env.reset(seed=0)
    assert env.step("echo again")[0]["output"] == "again\n"
    interrupt_after(0.5)
    with pytest.raises(KeyboardInterrupt):
        env.step("sleep 60")
    time.sleep(0.5)
    with pytest.raises(ClawGymError, match=r"call reset\(\)"):
        env.step("ls")


def test_ctrl_c_in_a_batch_loses_no_answer(batch: TaskVectorEnv) -> None:
    interrupt_after(0.7)
    with pytest.raises(KeyboardInterrupt):
        batch.step(["echo 0", "sleep 2; echo 1", "echo 2"])
    ids, observation, *_ = batch.recv(3)
    assert ids.tolist() == [0, 1, 2]
    assert observation["output"] == ("0\n", "1\n", "2\n")


@pytest.mark.parametrize("seconds", [0.1, 0.3, 0.5])
def test_ctrl_c_in_a_reset_leaves_no_sandbox(seconds: float) -> None:
    with contextlib.closing(gym.make("ClawGym/terminal-v0", num_envs=12, tasks=TASKS)) as made:
        assert isinstance(made, TaskVectorEnv)
        sandboxes = made._runners[0].backend.sandboxes  # type: ignore[attr-defined]
        interrupt_after(seconds)

        def for_ever() -> None:
            while True:
                made.reset(seed=0)

        with pytest.raises(KeyboardInterrupt):
            for_ever()
        made.reset(seed=0)
        until = time.monotonic() + 20  # nobody waits for the end of the sandboxes before
        while len(sandboxes) > 12 and time.monotonic() < until:
            time.sleep(0.01)
        assert len(sandboxes) == 12
        assert made.step(["echo on"] * 12)[0]["output"] == ("on\n",) * 12
    assert not sandboxes


# -- the supervisor


def test_a_supervisor_that_is_killed(batch: TaskVectorEnv) -> None:
    """Its sandboxes end: nobody is to blame for that. A new environment gets a new supervisor."""
    supervised = batch._runners[0].backend.supervised  # type: ignore[attr-defined]
    os.kill(supervised._process.pid, signal.SIGKILL)
    *_, truncated, info = batch.step(["sleep 1; echo on"] * 3)
    assert truncated.all()
    assert info["outcome"].tolist() == ["infra"] * 3
    assert "start the run again" in info["cause"][0]
    _, info = batch.reset(seed=0)
    assert "supervisor has ended" in info["error"][0]
    batch.close()
    fresh = gym.make("ClawGym/terminal-v0", tasks=TASKS)
    fresh.reset(seed=0)
    assert fresh.step("echo on")[0]["output"] == "on\n"
    fresh.close()
    assert not (leases.state_dir() / "owners" / supervised.owner).exists(), "the next start clears what it left"


# -- commands that are refused


@pytest.mark.parametrize("command", ["echo a\0b", "\0"])
def test_a_refused_command_is_an_observation(env: gym.Env[Any, Any], command: str) -> None:
    observation, reward, terminated, truncated, _ = env.step(command)
    assert observation["output"].startswith("[error: ")
    assert "NUL" in observation["output"]
    assert (observation["exit_code"], reward, terminated, truncated) == (1, 0.0, False, False)
    assert env.step("echo on")[0]["output"] == "on\n"


def test_a_sandbox_that_was_closed_under_an_episode_is_an_observation(env: gym.Env[Any, Any]) -> None:
    runner = env.unwrapped._runner  # type: ignore[attr-defined]
    runtime().run(runner.attempt.sandbox.close())
    for _ in range(2):
        assert env.step("ls")[0]["output"].startswith("[error: this sandbox is closed")
    assert env.step("submit")[4]["outcome"] in ("failed", "infra")
    env.reset(seed=0)
    assert env.step("echo on")[0]["output"] == "on\n"


# -- the library's own coroutines


def test_each_asyncio_run_makes_its_own_backend() -> None:
    from clawgym.agents import ScriptAgent
    from clawgym.sandbox import backend

    async def once() -> str:
        made = backend("namespace")
        try:
            return str((await episode_of(task(limits=LIMITS), ScriptAgent(SOLVE.encode(), "x"), made)).outcome)
        finally:
            await made.aclose()

    assert [asyncio.run(once()) for _ in range(2)] == ["solved", "solved"]


TWO_RUNS = """
import asyncio
from clawgym.errors import SandboxError
from clawgym.sandbox import SandboxSpec, backend

made = backend("namespace")

async def once():
    await (await made.create(SandboxSpec())).close()

asyncio.run(once())
try:
    asyncio.run(once())
except SandboxError as error:
    print(error)
"""


def test_a_backend_of_another_asyncio_run_says_so() -> None:
    done = subprocess.run([sys.executable, "-c", TWO_RUNS], capture_output=True, text=True, timeout=10)
    assert "event loop" in done.stdout


OWNER = """
import asyncio, os, time
from clawgym.sandbox import SandboxSpec, backend

async def main():
    made = backend("namespace")
    await made.create(SandboxSpec())
    supervisor = made.supervised._process.pid
    if os.fork() == 0:
        os.close(1)
        time.sleep(60)
        os._exit(0)
    print(supervisor, flush=True)
    time.sleep(60)

asyncio.run(main())
"""


def test_a_fork_does_not_keep_the_sandboxes_of_a_killed_owner() -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        supervisor = psutil.Process(int(owner.stdout.readline()))
        forks = [child for child in psutil.Process(owner.pid).children() if child != supervisor]
        owner.kill()
    try:
        _, left = psutil.wait_procs([supervisor], 5)
        assert not left
    finally:
        for fork in forks:
            fork.kill()
