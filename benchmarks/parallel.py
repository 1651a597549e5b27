"""How many environments stand side by side on one small machine, what they cost, and whether anything stays behind.

    python benchmarks/parallel.py                      # all three settings: three to four minutes on two cores
    python benchmarks/parallel.py swe -n 16 --backend docker

Each setting runs in a process of its own, over real sandboxes and real tasks, with a policy that takes no time: it says
the same thing in every turn. So a turn is what the environment costs, and nothing else.

- ready: from ``gym.make`` until the last of all environments has its first observation.
- PSS: of everything below this process, by environment; this process itself stands apart.
- turns/s: every environment gets its next action as soon as it has answered (``send``/``recv``), for three seconds at
  least. The baseline is one environment alone, in the same run.
- graded: all of them submit at once, without having done anything.
- left: what is there two seconds after ``close`` and was not before: processes, listening sockets, and what bears the
  owner's id: mounts, control groups, folders.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import psutil

import clawgym
from clawgym.records import TaskSet
from clawgym.sandbox import leases
from clawgym.tasks import load


@dataclasses.dataclass(frozen=True)
class Setting:
    """One kind of environment, how many of them, and what the stub policy says."""

    env: str
    tasks: str
    count: int
    turns: int
    """Of each environment."""
    action: str
    submit: str = "submit"


def call(name: str, **arguments: Any) -> str:
    """An assistant message that calls one tool."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return json.dumps({"content": "", "tool_calls": [{"type": "function", "function": function}]})


SETTINGS = {
    "terminal": Setting("ClawGym/terminal-v0", "terminal-basic", 128, 40, ":"),
    "swe": Setting("ClawGym/swe-v0", "swe-basic", 64, 40, "ls"),
    "toolcall": Setting(
        "ClawGym/toolcall-v0",
        "toolcall-basic",
        32,
        40,
        call("code_interpreter", code="6 * 7"),
        call("submit", message=""),
    ),
}
ROW = "{:<10}{:>6}{:>10}{:>12}{:>14}{:>12}{:>14}{:>12}{:>10}{:>10}"


def steady(name: str, setting: Setting) -> TaskSet:
    """Tasks whose episodes do not end by themselves; for tool calls, those that offer the interpreter."""
    tasks = [task for task in load(setting.tasks).tasks if not task.unsupported]
    if name == "toolcall":
        tasks = [task for task in tasks if any(server.name == "python" for server in task.tools)]
    return TaskSet(
        f"{setting.tasks} (steady)",
        tuple(
            dataclasses.replace(
                task,
                limits=dataclasses.replace(task.limits, max_steps=10**6, agent_seconds=3600.0, setup_seconds=300.0),
            )
            for task in tasks
        ),
    )


def pss(pid: int) -> float:
    """MiB; 0 if it has ended."""
    with contextlib.suppress(OSError, StopIteration), open(f"/proc/{pid}/smaps_rollup") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Pss:")) / 1024
    return 0.0


def below() -> list[psutil.Process]:
    """Everything that this process has started, and they."""
    return [p for p in psutil.Process().children(recursive=True) if p.is_running()]


def owners() -> set[str]:
    """Ids of the owners of sandboxes whose supervisor this process has started."""
    known = {folder.name for folder in (leases.state_dir() / "owners").glob("*")}
    lines = [" ".join(process.cmdline()) for process in below()]
    return {owner for owner in known if any(owner in line for line in lines)}


def things(mine: set[str]) -> set[str]:
    """What could stay behind, each by its name."""
    found = (_processes(), _sockets(), _mounts(mine), _cgroups(mine), _folders(mine))
    return {name for names in found for name in names}


def _processes() -> Iterator[str]:
    for process in below():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                yield f"process {process.pid} {process.name()}"


def _mounts(mine: set[str]) -> Iterator[str]:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        if any(owner in line for owner in mine):
            yield f"mount {line.split()[4]}"


def _cgroups(mine: set[str]) -> Iterator[str]:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        if " - cgroup" in line:
            for folder, names, _ in os.walk(line.split()[4]):
                yield from (f"cgroup {folder}/{name}" for name in names if any(owner in name for owner in mine))


def _folders(mine: set[str]) -> Iterator[str]:
    for owner in mine:
        yield from (f"folder {found}" for found in leases.state_dir().glob(f"**/*{owner}*"))


def _sockets() -> Iterator[str]:
    for connection in psutil.Process().net_connections("all"):
        if connection.status == psutil.CONN_LISTEN:
            yield f"socket {connection.laddr}"


def drive(envs: Any, action: str, turns: int, seconds: float = 3.0) -> float:
    """Turns a second of all environments together: rounds of ``turns`` of each, until ``seconds`` are over."""
    began, rounds = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        drive_once(envs, action, turns)
        rounds += 1
    return rounds * turns * envs.num_envs / (time.perf_counter() - began)


def drive_once(envs: Any, action: str, turns: int) -> None:
    count = envs.num_envs
    left = [turns - 1] * count
    envs.send([action] * count, range(count))
    busy = count
    while busy:
        ids, *_ = envs.recv(1)
        going = [i for i in ids.tolist() if left[i]]
        for i in going:
            left[i] -= 1
        envs.send([action] * len(going), going)
        busy -= len(ids) - len(going)


def measure(name: str, options: argparse.Namespace) -> None:
    """One row."""
    setting = SETTINGS[name]
    count = options.n or setting.count
    tasks = steady(name, setting)
    ids = [tasks.tasks[i % len(tasks)].id for i in range(count)]
    with contextlib.closing(gym.make(setting.env, num_envs=1, tasks=tasks, backend=options.backend)) as one:
        one.reset(options={"task_ids": ids[:1]})  # whatever is made once on a machine is made now
        alone = drive(one, setting.action, 2 * setting.turns)
    before = things(set())
    began = time.perf_counter()
    envs: Any = gym.make(setting.env, num_envs=count, tasks=tasks, backend=options.backend)
    envs.reset(options={"task_ids": ids})
    ready = time.perf_counter() - began
    mine = owners()
    if not mine and options.backend != "docker":
        raise SystemExit(f"{name}: no owner of sandboxes was found: nothing could be counted")
    each = sum(pss(process.pid) for process in below()) / count
    own = pss(os.getpid())
    rate = drive(envs, setting.action, setting.turns)
    began = time.perf_counter()
    *_, terminated, truncated, infos = envs.step([setting.submit] * count)
    graded = time.perf_counter() - began
    outcomes = infos["outcome"].tolist()
    if not (terminated | truncated).all() or any(outcome != "failed" for outcome in outcomes):
        raise SystemExit(f"{name}: episodes that did nothing ended as {sorted(set(outcomes))}")
    envs.close()
    time.sleep(2.0)  # what the library promises
    left = things(mine) - before
    print(
        ROW.format(
            name,
            count,
            f"{ready:.2f} s",
            f"{1000 * ready / count:.0f} ms",
            f"{each:.1f} MiB",
            f"{own:.0f} MiB",
            f"{rate:.0f}",
            f"{rate / alone:.2f} x",
            f"{graded:.1f} s",
            str(len(left)),
        ),
        flush=True,
    )
    for what in sorted(left):
        print(f"  left: {what}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", choices=[*SETTINGS, []], help="all, unless named")
    parser.add_argument("-n", type=int, help="environments; otherwise 128, 64 and 32")
    parser.add_argument("--backend", default="namespace")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        measure(options.part, options)
        return 0
    print(f"clawgym {clawgym.__version__}, {options.backend}, {os.cpu_count()} cores")
    print(
        ROW.format("", "envs", "ready", "each", "PSS each", "owner PSS", "env-turns/s", "x one env", "graded", "left"),
        flush=True,
    )
    failed = 0
    for name in options.settings or SETTINGS:
        argv = [sys.executable, __file__, "--part", name, "--backend", options.backend]
        failed |= subprocess.run([*argv, *(["-n", str(options.n)] if options.n else [])]).returncode
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
