"""How long snapshots of episodes take, and what could hold running programs.

    python benchmarks/snapshots.py        # a minute on two cores

``fork`` and ``replay`` are the two methods of ``env.snapshot()``. ``reset`` is what a branch costs without them, before
its actions are repeated. Frozen: all processes of a sandbox are stopped by its cgroup and continue later; so one branch
could keep its programs, not two. CRIU writes the memory of processes to files, if it works on this kernel.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym

import clawgym  # noqa: F401  # registers the ids
from clawgym.console import Console
from clawgym.envs import TaskEnv, TaskVectorEnv
from clawgym.envs._runtime import runtime
from clawgym.sandbox.namespace.backend import NamespaceBackend

ROUNDS = 30
FILL = "for i in $(seq 500); do echo $i > file$i; done; X=1; f() { echo $X; }"


def median_ms(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


def single(say: Callable[[str, float], None]) -> None:
    env: Any = gym.make("ClawGym/terminal-v0")
    assert isinstance(env, TaskEnv)
    env.reset(seed=0)
    say("reset", median_ms(lambda: env.reset(seed=0)))
    for name, command in (("new episode", "true"), ("500 files", FILL)):
        env.reset(seed=0)
        env.step(command)
        say(f"{name}: snapshot, fork", median_ms(lambda: env.snapshot().close()))
        with env.snapshot() as snapshot:
            say(f"{name}: restore, fork", median_ms(lambda s=snapshot: env.restore(s)))
        with env.snapshot(method="replay") as snapshot:
            say(f"{name}: restore, replay", median_ms(lambda s=snapshot: env.restore(s), 10))
    env.close()


def batch(say: Callable[[str, float], None]) -> None:
    envs: Any = gym.make("ClawGym/terminal-v0", num_envs=16)
    assert isinstance(envs, TaskVectorEnv)
    envs.reset(seed=0)
    envs.step([FILL] * 16)
    (snapshot,) = envs.snapshot([0])
    say("16 branches from one snapshot of 500 files", median_ms(lambda: envs.restore(snapshot), 5))
    envs.close()


def frozen(say: Callable[[str, float], None]) -> None:
    env: Any = gym.make("ClawGym/terminal-v0")
    env.reset(seed=0)
    env.step("for i in 1 2 3; do sleep 1000 & done")
    backend = env._runner.backend
    if isinstance(backend, NamespaceBackend):
        lease = env._runner.attempt.sandbox.id

        def freeze() -> None:
            for state in (True, False):
                runtime().run(backend.supervised.ask("freeze", lease, frozen=state))

        say("freeze and thaw a sandbox with three programs", median_ms(freeze))
    env.close()


def criu() -> str:
    if (program := shutil.which("criu")) is None:
        return "CRIU: not installed (apt-get install criu)"
    version = subprocess.run([program, "--version"], capture_output=True, text=True).stdout.split()
    done = subprocess.run([program, "check"], capture_output=True, text=True)
    said = (done.stderr or done.stdout).strip().splitlines()
    return (
        f"CRIU {version[1] if len(version) > 1 else '?'} check: exit code {done.returncode}: {said[0] if said else ''}"
    )


def main() -> None:
    console = Console()

    def say(what: str, milliseconds: float) -> None:
        console.say(f"{what:48} {milliseconds:8.1f} ms")

    single(say)
    batch(say)
    frozen(say)
    console.say(criu())


if __name__ == "__main__":
    main()
