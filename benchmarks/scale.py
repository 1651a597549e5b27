"""From one machine to 10,000 environments: measured service times, a simulation, and how well it agrees with real runs.

    python benchmarks/scale.py                # two to three minutes on two cores; `chrt -f 5` on a busy machine
    python benchmarks/scale.py --latency 5    # seconds of a model call, where 10,000 are simulated

1. measured: what an episode costs (opening its box with the task in it, a turn, the end with grading), as seconds of
   CPU in this process and in everything it has started, and as wall time, with 1 to 64 episodes at once; and the same
   over a Ray cluster of one node, where calls cost the owner and the node's actor something, too.
2. simulated: a closed queueing network (simpy). Each environment thinks, passes the owner's event loop (one at a time),
   then takes a core of its node; costs between the measured sizes are interpolated, 128 is beyond them.
3. compared: between those, the same program runs 8, 32 and 128 real episodes at once, with a policy that thinks no time
   and one that thinks a quarter of a second, and prints how far the simulation was off. The cores that the machine had
   are measured by busy processes: on a shared machine they are fewer, and not always as many.
4. extrapolated: the same costs of the other settings, and 10,000 environments over nodes of 16 and 64 cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import logging
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import psutil
import simpy
from env import Cpu, _ticks, _tree

from clawgym.errors import ClawGymError, TaskSetNotFound
from clawgym.records import Task, ToolCall
from clawgym.rollout import Attempt, EpisodeRequest
from clawgym.sandbox import Backend, backend
from clawgym.tasks import load
from clawgym.tools.protocol import CallRefused

SIZES = (1, 4, 16, 64)
COMPARED = (8, 32, 128)
THINKS = 0.25
"""Seconds a turn, on average, of the policy that does."""
MANY = 10_000
TURNS = 20
KINDS = {
    "terminal": ("terminal-basic", "bash", {"command": "ls -l; wc -c /etc/passwd"}),
    "swe": ("swe-basic", "bash", {"command": "grep -rn import . | wc -l; python3 -c 'import unittest'"}),
    "toolcall": ("toolcall-basic", "code_interpreter", {"code": "sum(n * n for n in range(1000))"}),
}
"""Task set, and what a turn does to the machine, at least."""
OPENCLAW = 9.64 / 5, 134.0
"""CPU seconds of a turn, all of an episode's five included, and MiB: ``python benchmarks/openclaw.py``."""
MARGIN, MOMENT = 0.25, 0.05
"""Agreement that is called one: a share of what was real, or so many seconds."""


# -- measuring


@dataclasses.dataclass(frozen=True)
class Cost:
    """Seconds of one step: CPU of the owner, CPU of all else, and of neither when it is alone."""

    owner: float
    boxes: float
    rest: float = 0.0
    host: float = 0.0
    """The part of ``boxes`` that is one actor's, which does one thing at a time."""
    stall: float = 0.0
    """For how long a core stood still for it, among many: locks of the kernel, caches of others."""

    def between(self, other: Cost, share: float) -> Cost:
        mine, theirs = dataclasses.astuple(self), dataclasses.astuple(other)
        return Cost(*(a + share * (b - a) for a, b in zip(mine, theirs, strict=True)))


Costs = Mapping[str, Cost]
"""``open``, ``turn``, ``end``."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One real run of ``count`` episodes at once."""

    count: int
    costs: Costs
    ready: float
    turns: float
    """Turns a second."""
    ended: float
    """Seconds until all were graded."""
    memory: float = 0.0
    """MiB (PSS) of everything below, for each."""


class Meter:
    """CPU seconds so far: ours, everything else of ours, and, with a ``host``, that process alone."""

    def __init__(self, cpu: Cpu, host: int | None = None) -> None:
        self._cpu, self._host = cpu, host

    def read(self) -> tuple[float, float, float]:
        own = time.process_time()
        if self._host is None:
            return own, self._cpu.seconds() - own, 0.0
        hertz = os.sysconf("SC_CLK_TCK")
        return own, sum(map(_ticks, _tree(self._host))) / hertz, _own_ticks(self._host) / hertz


def _own_ticks(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return sum(map(int, file.read().rpartition(")")[2].split()[11:13]))


def tasks(kind: str) -> Iterator[Task]:
    """Real tasks, for ever: of terminal-basic those whose checkers read files, for calls those with the interpreter."""
    found = [task for task in load(KINDS[kind][0]).tasks if not task.unsupported]
    if kind == "terminal":
        found = [task for task in found if task.verifier.executes_agent_code is None]
    if kind == "toolcall":
        found = [task for task in found if any(server.name == "python" for server in task.tools)]
    if not found:
        raise TaskSetNotFound(f"no task of {KINDS[kind][0]} can run here: `clawgym tasks prepare {KINDS[kind][0]}`")
    while True:
        for task in found:
            limits = dataclasses.replace(task.limits, agent_seconds=3600.0, setup_seconds=600.0, verify_seconds=600.0)
            yield dataclasses.replace(task, limits=limits)


def thoughts(count: int, think: float, turns: int) -> list[list[float]]:
    """Seconds before each turn of each environment, exponentially distributed: always the same ones."""
    dice = random.Random(count)
    return [[dice.expovariate(1 / think) if think else 0.0 for _ in range(turns)] for _ in range(count)]


async def run(made: Backend, count: int, think: float, meter: Meter, turns: int = TURNS, kind: str = "terminal") -> Run:
    """``count`` real episodes: all opened, then all at work, then all graded."""
    source = tasks(kind)
    _, tool, arguments = KINDS[kind]
    requests = [EpisodeRequest(task=next(source), seed=0, sample=i, keep_workspace=False) for i in range(count)]
    attempts = [Attempt(request, made, "scale") for request in requests]
    marks: list[tuple[float, tuple[float, float, float]]] = []

    def mark() -> None:
        marks.append((time.perf_counter(), meter.read()))

    async def work(attempt: Attempt, thoughts: Sequence[float]) -> None:
        for number, thought in enumerate(thoughts):
            await asyncio.sleep(thought)
            said = await attempt.tools.call_all([ToolCall(str(number), tool, arguments)])
            if isinstance(said[0], CallRefused):
                raise SystemExit(said[0].content)

    mark()
    await asyncio.gather(*(attempt.open() for attempt in attempts))
    mark()
    memory = sum(_pss(p.pid) for p in psutil.Process().children(recursive=True)) / count
    mark()
    plans = thoughts(count, think, turns)
    await asyncio.gather(*(work(attempt, plan) for attempt, plan in zip(attempts, plans, strict=True)))
    mark()
    await asyncio.gather(*(attempt.finish() for attempt in attempts))
    mark()

    def cost(first: int, steps: int) -> Cost:
        (began, before), (over, after) = marks[first : first + 2]
        owner, boxes, host = ((b - a) / steps for a, b in zip(before, after, strict=True))
        rest = max(0.0, (over - began) / steps - owner - boxes) if count == 1 and not think else 0.0
        full = len(os.sched_getaffinity(0)) * (over - began) / steps
        stall = max(0.0, full - owner - boxes) if count > 1 and not think else 0.0
        return Cost(max(0.0, owner), max(0.0, boxes), rest, host, stall)

    costs = {"open": cost(0, count), "turn": cost(2, count * turns), "end": cost(3, count)}
    walls = [b[0] - a[0] for a, b in itertools.pairwise(marks)]
    return Run(count, costs, walls[0], count * turns / walls[2], walls[3], memory)


def _pss(pid: int) -> float:
    with contextlib.suppress(OSError, StopIteration), open(f"/proc/{pid}/smaps_rollup") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Pss:")) / 1024
    return 0.0


_BUSY = (
    "import time\nend = time.perf_counter() + 0.5\nwhile time.perf_counter() < end: pass\nprint(time.process_time())"
)


def cores_free() -> float:
    """How many cores busy processes of ours get just now."""
    count = len(os.sched_getaffinity(0))
    argv = [sys.executable, "-I", "-S", "-c", _BUSY]
    running = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    used = [float(process.communicate()[0]) for process in running]
    return min(float(count), sum(used) / 0.5)


# -- simulating


Work = Generator[Any, Any, None]


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Where the boxes are. ``shared``: the owner takes its CPU from the (only) node."""

    nodes: int
    cores: float
    owners: int = 1
    shared: bool = False


def simulate(
    count: int, cluster: Cluster, costs: Callable[[int], Costs], think: float, turns: int
) -> tuple[float, float, float]:
    """Seconds to ready, turns a second, seconds until all are graded. For 0 ``turns`` all go on thinking and working,
    and the turns of two thoughts' length are counted, after one thought to get there."""
    clock = simpy.Environment()
    plans, dice = thoughts(count, think, turns), random.Random(count)
    # Cores that are not whole, as others take some of their time, are whole ones that are slower.
    whole = max(1, math.ceil(cluster.cores))
    slow = whole / cluster.cores
    cores = [simpy.Resource(clock, whole) for _ in range(cluster.nodes)]
    loops = [simpy.Resource(clock, 1) for _ in range(cluster.owners)]
    hosts = [simpy.Resource(clock, 1) for _ in range(cluster.nodes)]
    gates = [simpy.Resource(clock, 8) for _ in range(cluster.nodes)]
    each = costs(max(1, count // cluster.nodes))

    def take(resource: simpy.Resource, seconds: float) -> Work:
        with resource.request() as turn:
            yield turn
            yield clock.timeout(seconds)

    def step(number: int, cost: Cost) -> Work:
        node, loop = number % cluster.nodes, loops[number % cluster.owners]
        with loop.request() as turn:
            yield turn
            if cluster.shared:
                yield from take(cores[0], cost.owner * slow)
            else:
                yield clock.timeout(cost.owner)
        if cost.host:
            with hosts[node].request() as turn:
                yield turn
                yield from take(cores[node], cost.host * slow)
        yield from take(cores[node], max(0.0, cost.boxes - cost.host + cost.stall) * slow)
        if cost.rest:
            yield clock.timeout(cost.rest)

    def opened(number: int) -> Work:
        with gates[number % cluster.nodes].request() as turn:
            yield turn
            yield from step(number, each["open"])

    def worked(number: int) -> Work:
        for thought in plans[number] if turns else iter(lambda: dice.expovariate(1 / think), None):
            if over:
                return
            yield clock.timeout(thought)
            yield from step(number, each["turn"])
            done.append(clock.now)

    def ended(number: int) -> Work:
        yield from step(number, each["end"])

    def all_of(what: Callable[[int], Work]) -> float:
        began = clock.now
        clock.run(clock.all_of([clock.process(what(number)) for number in range(count)]))
        return clock.now - began

    ready = all_of(opened)
    done: list[float] = []
    over = False
    if turns:
        rate = count * turns / all_of(worked)
    else:
        for number in range(count):
            clock.process(worked(number))
        began = clock.now + think
        clock.run(until=began + 2 * think)
        rate = sum(at > began for at in done) / (2 * think)
        over = True
        clock.run()
    return ready, rate, all_of(ended)


def between(measured: Mapping[int, Costs]) -> Callable[[int], Costs]:
    """Costs at any number of episodes at once, from those measured; the last ones hold beyond."""
    rest = measured[min(measured)]

    def at(count: int) -> Costs:
        low = max(size for size in measured if size <= max(count, min(measured)))
        high = min((size for size in measured if size >= count), default=low)
        share = 0.0 if low == high else math.log(count / low) / math.log(high / low)
        found = {name: measured[low][name].between(measured[high][name], share) for name in measured[low]}
        return {name: dataclasses.replace(cost, rest=rest[name].rest) for name, cost in found.items()}

    return at


# -- the parts


def show(name: str, *values: str) -> None:
    print(f"{name:<40}" + "".join(f"{value:>15}" for value in values), flush=True)


def show_costs(name: str, costs: Costs, *more: str) -> None:
    show(name, *(f"{1000 * c.owner:.2f} + {1000 * c.boxes:.1f}" for c in costs.values()), *more)


async def local(cpu: Cpu) -> tuple[dict[int, Costs], float, float]:
    """Costs by size, MiB of each box, and the largest disagreement as a share of what was real.

    What is measured and what it is compared with take turns: a shared machine changes from minute to minute."""
    show("ms of CPU, owner + boxes", "open", "turn", "end", "MiB each")
    found: dict[int, Costs] = {}
    real: dict[tuple[float, int], tuple[Run, float, float]] = {}
    memory = 0.0
    made = backend("namespace")
    try:
        await run(made, 1, 0.0, Meter(cpu), 2)  # whatever is made once on a machine is made now
        for think, size in [
            *((0.0, size) for size in sorted(SIZES + COMPARED)),
            *((THINKS, size) for size in COMPARED),
        ]:
            one = await run(made, size, think, Meter(cpu), TURNS if think else max(TURNS, 960 // size))
            again = [
                await run(made, size, 0.0, Meter(cpu), 1) for _ in range(0 if size > 64 else 4 if size < 64 else 2)
            ]
            runs = sorted([one, *again], key=lambda run: run.ready)  # opening takes tenths of a second: the median
            middle = runs[len(runs) // 2]
            if size in COMPARED:
                real[think, size] = one, middle.ready, await asyncio.to_thread(cores_free)
            else:
                found[size], memory = {**one.costs, "open": middle.costs["open"]}, one.memory
                show_costs(f"{size} at once", found[size], f"{one.memory:.1f}")
    finally:
        await made.aclose()
    show("", "cores", "turns/s real", "simulated", "off", "ready real", "simulated", "off")
    worst = 0.0
    for (think, size), (one, opened, cores) in real.items():
        ready, rate, _ = simulate(size, Cluster(1, cores, shared=True), between(found), think, TURNS)
        off = rate / one.turns - 1, ready / opened - 1
        worst = max(worst, abs(off[0]), abs(off[1]) if abs(ready - opened) > MOMENT else 0.0)
        shown = [f"{cores:.2f}", f"{one.turns:.0f}", f"{rate:.0f}", f"{off[0]:+.0%}"]
        shown += [f"{opened:.2f} s", f"{ready:.2f} s", f"{off[1]:+.0%}"]
        show(f"{size} at once, thinking {think:g} s", *shown)
    return found, memory, worst


async def of_each_kind(cpu: Cpu) -> None:
    """What an environment of each setting costs, and what 10,000 would."""
    print()
    show("ms of CPU, owner + boxes; 8 at once", "open", "turn", "end", "MiB each", "cores / 1000", "GiB for 10000")
    for kind in KINDS:
        made = backend("namespace")
        try:
            await run(made, 1, 0.0, Meter(cpu), 1, kind)  # whatever is made once on a machine is made now
            one = await run(made, 8, 0.0, Meter(cpu), TURNS, kind)
        except (ClawGymError, RuntimeError) as error:
            show(kind, f"not measured: {str(error)[:80]}")
            continue
        finally:
            await made.aclose()
        cores = one.costs["turn"].boxes + (one.costs["open"].boxes + one.costs["end"].boxes) / TURNS
        gib = MANY * one.memory / 1024
        show_costs(kind, one.costs, f"{one.memory:.1f}", f"{1000 * cores:.1f}", f"{gib:.0f}")
    seconds, memory = OPENCLAW
    show("openclaw", "", "", "", f"{memory:.0f}", f"{1000 * seconds:.0f}", f"{MANY * memory / 1024:.0f}")
    print(f"cores / 1000: for 1000 turns a second, episodes of {TURNS} turns (openclaw: five), grading included")


async def over_ray(cpu: Cpu, local: Costs) -> Costs:
    """The same with Ray between: what calls cost the owner and the node's actor, on top of what boxes do anyway."""
    import ray

    with tempfile.TemporaryDirectory(prefix="clawgym-ray-") as folder:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        ray.init(
            num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR, _temp_dir=folder,
            object_store_memory=100 * 2**20,
        )  # fmt: skip
        made = backend("ray")
        try:
            await made.probe()
            hosts = [p for p in psutil.Process().children(recursive=True) if p.name().startswith("ray::SandboxHos")]
            found = await run(made, 16, 0.0, Meter(cpu, hosts[0].pid))
        finally:
            await made.aclose()
            ray.shutdown()
    show_costs("16 at once, over Ray", found.costs)
    show("  of it the node's actor", *(f"{1000 * cost.host:.2f}" for cost in found.costs.values()))
    return {
        name: dataclasses.replace(cost, boxes=local[name].boxes + cost.host, stall=local[name].stall)
        for name, cost in found.costs.items()
    }


def extrapolated(costs: Costs, memory: float, latency: float) -> None:
    """``costs``: over Ray."""
    rate = MANY / latency
    boxes, owner = (
        getattr(costs["turn"], what) + (getattr(costs["open"], what) + getattr(costs["end"], what)) / TURNS
        for what in ("boxes", "owner")
    )
    print(f"\n{MANY} environments, a model that answers in {latency:g} s on average, episodes of {TURNS} turns:")
    print(f"{rate:.0f} turns/s need {rate * boxes:.1f} cores for boxes and {rate * owner:.1f} owners at 100 %")
    show("simulated", "CPU used", "owner busy", "turns/s", "ready", "graded")
    for cores in (16, 64):
        nodes = max(2, math.ceil(rate * boxes / 0.7 / cores))
        for owners in (1, max(2, math.ceil(rate * owner / 0.7))):
            ready, turns, graded = simulate(MANY, Cluster(nodes, cores, owners), lambda _: costs, latency, 0)
            used = turns * costs["turn"].boxes / (nodes * cores)
            busy = turns * costs["turn"].owner / owners
            name = f"{nodes} nodes of {cores} cores, {owners} owner{'s' * (owners > 1)}"
            show(name, f"{used:.0%}", f"{busy:.0%}", f"{turns:.0f}", f"{ready:.0f} s", f"{graded:.0f} s")
    show("memory of all boxes", f"{MANY * memory / 1024:.1f} GiB")


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency", type=float, default=10.0, help="seconds of a model call")
    options = parser.parse_args()
    cpu = Cpu()
    try:
        print(f"{os.cpu_count()} cores, of which {cores_free():.2f} were free at the start; CPU from {cpu.how}")
        found, memory, worst = await local(cpu)
        verdict = "agrees" if worst <= MARGIN else "does not agree"
        print(f"largest disagreement {worst:.0%}: it {verdict} within {MARGIN:.0%}, or {MOMENT} s")
        await of_each_kind(cpu)
        extrapolated(await over_ray(cpu, found[16]), memory, options.latency)
    finally:
        cpu.close()
    return int(worst > MARGIN)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
