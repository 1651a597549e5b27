"""How fast environments and grading are, and whether a long run stays as fast and as small as it began.

    python benchmarks/env.py                  # envs and grading: two to three minutes on two cores
    python benchmarks/env.py envs -n 128
    CLAWGYM_DATA=/path/to/ClawGym python benchmarks/env.py grading
    CLAWGYM_DATA=/path/to/ClawGym python benchmarks/env.py flat --episodes 10000    # ten to twenty minutes

Each part runs in a process of its own. Baselines are taken in the same run, on the same work:

- envs: ``gymnasium.vector.AsyncVectorEnv``, a process for each environment, over our own single one (8 of them:
  128 processes with a supervisor each do not fit a small machine); and a plain bash over a pipe, without any sandbox.
- grading: ``python3 check.py`` as a plain subprocess, on the same checker and the same files.

CPU time is that of the benchmark's process and of everything it has started, sandboxes and what has ended included: the
``cpuacct`` cgroup the process moves itself to, if there is one, else what /proc says of its descendants (10 ms steps).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

import clawgym
from clawgym.errors import ClawGymError
from clawgym.records import Task, TaskSet
from clawgym.sandbox import Backend
from clawgym.sandbox import backend as make_backend
from clawgym.tasks import load

PARTS = ("envs", "grading", "flat")
BASELINE_ENVS = 8


class Cpu:
    """CPU seconds of this process and of everything it has started."""

    def __init__(self) -> None:
        self._group: Path | None = None
        self._parent: Path | None = None
        with contextlib.suppress(OSError, StopIteration):
            own = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if ":cpuacct" in line)
            mount = Path("/sys/fs/cgroup/cpuacct")
            self._parent = mount / own.split(":", 2)[2].lstrip("/")
            group = self._parent / f"clawgym-benchmark-{os.getpid()}"
            group.mkdir()
            (group / "cgroup.procs").write_text(str(os.getpid()))
            self._group = group

    @property
    def how(self) -> str:
        return "cpuacct cgroup" if self._group else "/proc/*/stat of all descendants"

    def seconds(self) -> float:
        if self._group is not None:
            return int((self._group / "cpuacct.usage").read_text()) / 1e9
        return sum(_ticks(pid) for pid in _tree(os.getpid())) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        if self._group is not None and self._parent is not None:
            (self._parent / "cgroup.procs").write_text(str(os.getpid()))
            for _ in range(100):  # what we have just ended leaves it a moment later
                with contextlib.suppress(OSError):
                    self._group.rmdir()
                    return
                time.sleep(0.02)


def _tree(pid: int) -> Iterator[int]:
    yield pid
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from _tree(int(child))


def _ticks(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return sum(map(int, fields[11:15]))


@dataclasses.dataclass(frozen=True)
class Span:
    """How long something took."""

    wall: float
    cpu: float


def timed(cpu: Cpu, work: Callable[[], Any]) -> Span:
    began, used = time.perf_counter(), cpu.seconds()
    work()
    return Span(time.perf_counter() - began, cpu.seconds() - used)


def line(name: str, *values: str) -> None:
    print(f"{name:<52}" + "".join(f"{value:>16}" for value in values), flush=True)


# -- environments


def bench_tasks() -> TaskSet:
    """One small task whose episodes do not end by themselves."""
    task = load("terminal-basic:heldout").tasks[0]
    limits = dataclasses.replace(
        task.limits, max_steps=10**6, agent_seconds=3600.0, memory_mb=256, disk_mb=64, pids=64, setup_seconds=120.0
    )
    return TaskSet("benchmark", (dataclasses.replace(task, limits=limits),))


def envs_part(options: argparse.Namespace, cpu: Cpu) -> None:
    tasks, many, rounds = bench_tasks(), options.n, options.rounds
    line(f"environments ({options.backend})", "turns/s", "ms CPU/turn", "x AsyncVectorEnv")
    base = async_vector_env(cpu, tasks, options)
    plain_bash(cpu, rounds * many)
    for count in sorted({BASELINE_ENVS, many}):
        vectorised(cpu, tasks, options, count, base)


def vectorised(cpu: Cpu, tasks: TaskSet, options: argparse.Namespace, count: int, base: dict[str, Span]) -> None:
    envs = gym.make("ClawGym/terminal-v0", num_envs=count, tasks=tasks, backend=options.backend)
    first = timed(cpu, envs.reset)
    again = timed(cpu, envs.reset)
    turns = options.rounds * max(1, options.n // count)
    for command in (":", "/bin/true"):
        envs.step([command] * count)
        show(f"{count} ClawGym, step {command}", lockstep(cpu, envs, command, turns), turns * count, base[command])
        span = timed(cpu, lambda c=command: asynchronous(envs, [[c] * turns] * count))
        show(f"{count} ClawGym, send/recv {command}", span, turns * count, base[command])
    line(f"{count} ClawGym, first reset", f"{first.wall:.2f} s", f"{1000 * first.cpu / count:.2f}")
    line(f"{count} ClawGym, reset of sandboxes in use", f"{again.wall:.2f} s", f"{1000 * again.cpu / count:.2f}")
    if count == options.n:
        long_tail(cpu, envs, options)
        end = timed(cpu, lambda: envs.step(["submit"] * count))
        line(f"{count} ClawGym, submit and grade", f"{end.wall:.2f} s", f"{1000 * end.cpu / count:.2f}")
    shut = timed(cpu, envs.close)
    line(f"{count} ClawGym, close", f"{shut.wall:.2f} s", f"{1000 * shut.cpu / count:.2f}")


def show(name: str, span: Span, turns: int, base: Span | None = None) -> None:
    """One row; ``base`` is what one turn takes in the baseline."""
    ratio = "" if base is None else f"{base.wall / (span.wall / turns):.1f}"
    line(name, f"{turns / span.wall:.0f}", f"{1000 * span.cpu / turns:.3f}", ratio)


def lockstep(cpu: Cpu, envs: Any, command: str, rounds: int) -> Span:
    actions = [command] * envs.num_envs
    return timed(cpu, lambda: [envs.step(actions) for _ in range(rounds)])


def asynchronous(envs: Any, commands: Sequence[Sequence[str]]) -> None:
    """Give every environment its own list of commands, the next one as soon as it has answered."""
    at = [1] * len(commands)
    envs.send([own[0] for own in commands], range(len(commands)))
    busy = len(commands)
    while busy:
        ids, *_ = envs.recv(1)
        going = [i for i in ids.tolist() if at[i] < len(commands[i])]
        envs.send([commands[i][at[i]] for i in going], going)
        for i in going:
            at[i] += 1
        busy += len(going) - len(ids)


def async_vector_env(cpu: Cpu, tasks: TaskSet, options: argparse.Namespace) -> dict[str, Span]:
    """Command -> what one turn takes with a process for each environment."""

    def one() -> gym.Env[Any, Any]:
        return gym.make("ClawGym/terminal-v0", tasks=tasks, backend=options.backend)

    count, found = BASELINE_ENVS, {}
    envs = gym.vector.AsyncVectorEnv([one] * count, shared_memory=False)
    reset = timed(cpu, envs.reset)
    for command in (":", "/bin/true"):
        envs.step((command,) * count)
        turns = max(20, options.rounds * options.n // count // 4)
        span = timed(cpu, lambda c=command, t=turns: [envs.step((c,) * count) for _ in range(t)])
        found[command] = Span(span.wall / turns / count, span.cpu / turns / count)
        show(f"{count} AsyncVectorEnv, step {command}", span, turns * count, found[command])
    line(f"{count} AsyncVectorEnv, first reset", f"{reset.wall:.2f} s", f"{1000 * reset.cpu / count:.2f}")
    envs.close()
    return found


def plain_bash(cpu: Cpu, turns: int) -> None:
    """The lower bound: one bash without a sandbox, told a command and asked for its exit code, over and over."""
    for command in (":", "/bin/true"):
        with subprocess.Popen(["bash"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as bash:
            assert bash.stdin is not None
            assert bash.stdout is not None
            told, heard = bash.stdin, bash.stdout

            def ask(count: int, command: str = command, told: Any = told, heard: Any = heard) -> None:
                for _ in range(count):
                    told.write(f"{command}; echo $?\n".encode())
                    heard.read(64)

            ask(10)
            show(f"1 plain bash, no sandbox, {command}", timed(cpu, lambda n=turns: ask(n)), turns)
            told.close()


def long_tail(cpu: Cpu, envs: Any, options: argparse.Namespace) -> None:
    """Most commands are quick, one in twenty takes 0.2 to 1 s: in lockstep every step waits for the slowest."""
    drawn, count = random.Random(0), envs.num_envs
    slow = [[drawn.uniform(0.2, 1.0) if drawn.random() < 0.05 else 0.0 for _ in range(10)] for _ in range(count)]
    commands = [[f"sleep {s:.3f}" if s else ":" for s in own] for own in slow]

    def in_step() -> None:
        for column in zip(*commands, strict=True):
            envs.step(list(column))

    together = timed(cpu, in_step)
    apart = timed(cpu, lambda: asynchronous(envs, commands))
    show(f"{count} ClawGym, long-tailed mix, step", together, 10 * count)
    show(f"{count} ClawGym, long-tailed mix, send/recv", apart, 10 * count)
    longest = max(map(sum, slow))
    line("  send/recv against step", f"{together.wall / apart.wall:.1f} x", "", "")
    line("  the longest row of sleeps, one environment's own", f"{longest:.2f} s", f"of {apart.wall:.2f} s")


# -- grading


def real_tasks(count: int) -> list[Task]:
    """Tasks with the stock checker, spread over the train set; our own pack where the public data is not here."""
    from clawgym.verifiers.protocols.reward_sh import standard_reward_sh

    name = "ClawGym-Train" if os.environ.get("CLAWGYM_DATA") else "terminal-basic:heldout"

    def stock(task: Task) -> bool:
        files = {f.path: f for f in task.verifier.files}
        return "check.py" in files and "reward.sh" in files and files["reward.sh"].read() == standard_reward_sh()

    able = [task for task in load(name).tasks if not task.unsupported and stock(task)]
    chosen = able[:: max(1, len(able) // count)][:count]
    print(f"{len(chosen)} tasks of {name}, inputs as the agent finds them", flush=True)
    return chosen


def grading_part(options: argparse.Namespace, cpu: Cpu) -> None:
    asyncio.run(measure_grading(real_tasks(options.tasks), options, cpu))


async def measure_grading(tasks: Sequence[Task], options: argparse.Namespace, cpu: Cpu) -> None:
    from clawgym.verifiers.grading import Subject, grade, untouched

    sandboxes = make_backend(options.backend)
    await sandboxes.probe()
    bare: list[Span] = []
    ours: list[Span] = []
    try:
        for task in tasks:
            task = task.frozen()
            subject = Subject(untouched(task))
            with tempfile.TemporaryDirectory() as folder:
                argv, env = lay_out(task, Path(folder))
                await grade(task, subject, sandboxes)  # once to warm up, both of them
                subprocess.run(argv, env=env, cwd=folder, capture_output=True, check=False)
                pairs: list[tuple[Span, Span]] = []
                for _ in range(options.repeats):
                    plain = timed(
                        cpu, lambda a=argv, e=env, f=folder: subprocess.run(a, env=e, cwd=f, capture_output=True)
                    )
                    began, used = time.perf_counter(), cpu.seconds()
                    await grade(task, subject, sandboxes)
                    wall = time.perf_counter() - began
                    await asyncio.sleep(0.02)  # what is cleared away afterwards counts too, as CPU time
                    pairs.append((plain, Span(wall, cpu.seconds() - used)))
            for which, out in ((0, bare), (1, ours)):
                out.append(Span(*(statistics.median(getattr(p[which], f) for p in pairs) for f in ("wall", "cpu"))))
    finally:
        await sandboxes.aclose()
    line(f"grading ({options.backend}, {options.repeats} times each)", "p50 ms", "p90 ms", "p50 ms CPU")
    for name, spans in (("python3 check.py, a plain subprocess", bare), ("grade(), clean mode", ours)):
        wall, used = ([1000 * getattr(s, f) for s in spans] for f in ("wall", "cpu"))
        line(name, *(f"{v:.1f}" for v in (statistics.median(wall), np.quantile(wall, 0.9), statistics.median(used))))
    ratios = [[getattr(o, f) / getattr(b, f) for o, b in zip(ours, bare, strict=True)] for f in ("wall", "cpu")]
    wall, used = ratios
    line(
        "ratio, task by task",
        *(f"{v:.2f} x" for v in (statistics.median(wall), np.quantile(wall, 0.9), statistics.median(used))),
    )


def lay_out(task: Task, folder: Path) -> tuple[list[str], dict[str, str]]:
    """The task's files on the host; the command that checks them, and its environment."""
    workspace, checker = folder / "workspace", folder / "checker"
    for root, files in ((workspace, task.inputs), (checker, task.verifier.files)):
        root.mkdir()
        for file in files:
            path = root / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.read())
    payload = folder / "payload.json"
    payload.write_text("{}")
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "OPENCLAW_REWARD_PAYLOAD": str(payload)}
    return ["/usr/bin/python3", str(checker / "check.py"), str(workspace)], env


# -- long runs


class Marks:
    """A progress view that measures at certain numbers of episodes."""

    def __init__(self, cpu: Cpu, at: Iterable[int]) -> None:
        self._cpu = cpu
        self._at = sorted(at)
        self._count = 0
        self._last: tuple[int, float, float] = (0, 0.0, 0.0)
        self._phases: list[float] = []

    def start(self, folder: Any, to_run: int) -> None:
        self._last = (0, time.perf_counter(), self._cpu.seconds())
        line("episodes", "ms wall each", "ms CPU each", "p50 ms in sandboxes", "owner MiB", "helpers MiB")

    def running(self, now: int, limit: int) -> None: ...

    def finished(self, row: Mapping[str, Any]) -> None:
        self._count += 1
        self._phases.append(sum((row.get("seconds") or {}).values()))
        if self._at and self._count == self._at[0]:
            self._at.pop(0)
            before, wall, used = self._last
            self._last = now = (self._count, time.perf_counter(), self._cpu.seconds())
            each = now[0] - before
            line(
                f"{before + 1} to {self._count}",
                *(f"{v:.1f}" for v in (1000 * (now[1] - wall) / each, 1000 * (now[2] - used) / each)),
                f"{1000 * statistics.median(self._phases):.1f}",
                f"{resident(os.getpid()):.1f}",
                f"{sum(map(resident, helpers())):.1f}",
            )
            self._phases.clear()

    def stop(self, aborted: str | None) -> None:
        if aborted:
            print(f"stopped: {aborted}")


def resident(pid: int) -> float:
    """Resident memory in MiB; 0 if the process has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def helpers() -> list[int]:
    """The supervisor and its zygote."""
    mine: list[int] = []
    for pid in _tree(os.getpid()):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
            if pid != os.getpid() and (b"clawgym-zygote" in words or b"_supervisor" in words):
                mine.append(pid)
    return mine


def flat_part(options: argparse.Namespace, cpu: Cpu) -> None:
    asyncio.run(measure_flatness(options, cpu))


async def measure_flatness(options: argparse.Namespace, cpu: Cpu) -> None:
    from clawgym.agents import NoopAgent
    from clawgym.evaluation.runner import EvalConfig, evaluate

    tasks = load("ClawGym-Train" if os.environ.get("CLAWGYM_DATA") else "terminal-basic:train")
    able = [task for task in tasks.tasks if not task.unsupported]
    drawn = random.Random(0).sample(able, len(able))  # the tasks of one family stand together: mixed, windows compare
    samples = -(-options.episodes // len(able))
    print(f"doing nothing on {len(able)} tasks of {tasks.name}, {samples} samples each", flush=True)
    sandboxes: Backend = make_backend(options.backend)
    marks = [m for m in (100, 1000, 2000, 5000, 10_000, 20_000) if m < options.episodes]
    with tempfile.TemporaryDirectory() as folder:
        config = EvalConfig(
            TaskSet(tasks.name, tuple(drawn[: options.episodes])),
            NoopAgent(),
            sandboxes,
            Path(folder) / "run",
            samples=samples,
            concurrency=options.concurrency,
        )
        try:
            stop = asyncio.Event()
            began = time.perf_counter()
            summary = await evaluate(config, progress=Marks(cpu, [*marks, options.episodes]), stop=stop)
            print(f"{summary.scores.episodes} episodes, {time.perf_counter() - began:.0f} s with the report;", end=" ")
            print(f"the owner has {resident(os.getpid()):.1f} MiB, {peak():.1f} MiB at most")
        finally:
            await sandboxes.aclose()


def peak() -> float:
    """This process's largest resident memory, MiB."""
    text = Path("/proc/self/status").read_text()
    return int(text.split("VmHWM:")[1].split()[0]) / 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", nargs="*", choices=[*PARTS, []], help="default: envs grading")
    parser.add_argument("--backend", default="namespace")
    parser.add_argument("-n", type=int, default=128, help="environments at once")
    parser.add_argument("--rounds", type=int, default=40, help="lockstep rounds of each command")
    parser.add_argument("--tasks", type=int, default=50, help="tasks to grade")
    parser.add_argument("--repeats", type=int, default=3, help="gradings of each")
    parser.add_argument("--episodes", type=int, default=1000, help="episodes of the long run")
    parser.add_argument("--concurrency", type=int, default=4, help="of them at once")
    options = parser.parse_args()
    parts = options.part or ["envs", "grading"]
    if len(parts) > 1:
        shared = [word for word in sys.argv[1:] if word not in PARTS]
        return max(subprocess.run([sys.executable, __file__, part, *shared], check=False).returncode for part in parts)
    cpu = Cpu()
    print(f"clawgym {clawgym.__version__}, {len(os.sched_getaffinity(0))} cores; CPU time: {cpu.how}", flush=True)
    try:
        {"envs": envs_part, "grading": grading_part, "flat": flat_part}[parts[0]](options, cpu)
    except ClawGymError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        cpu.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
