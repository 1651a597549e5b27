"""How fast boxes are: ``python benchmarks/sandboxes.py [--backend namespace] [-n 128]``.

Times are wall milliseconds, p50; the baseline in the same run is starting ``/bin/true`` with nothing around it.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable

import gymnasium as gym

import clawgym
from clawgym.records import Limits
from clawgym.sandbox import Sandbox, SandboxSpec, backend


async def timed(work: Callable[[], Awaitable[object]], count: int) -> float:
    """Median milliseconds of ``count`` awaited calls."""
    spans = []
    for _ in range(count):
        started = time.perf_counter()
        await work()
        spans.append(time.perf_counter() - started)
    return statistics.median(spans) * 1000


async def plain() -> None:
    await (await asyncio.create_subprocess_exec("/bin/true")).wait()


async def measure(name: str, many: int) -> None:
    boxes = backend(name)
    await boxes.probe()
    spec = SandboxSpec(limits=Limits(memory_mb=256, disk_mb=64, pids=64))
    rows: list[tuple[str, float, str]] = [("/bin/true, no sandbox", base := await timed(plain, 30), "ms")]
    made: list[Sandbox] = []

    async def create() -> None:
        made.append(await boxes.create(spec))

    rows.append(("create a box", await timed(create, 20), "ms"))
    box = made[0]
    shell = await box.shell()
    rows.append(("':' in its shell", await timed(lambda: shell.run(":"), 200), "ms"))
    rows.append(("/bin/true in its shell", await timed(lambda: shell.run("/bin/true"), 200), "ms"))
    rows.append(("exec /bin/true", await timed(lambda: box.exec(["/bin/true"]), 50), "ms"))
    closing = iter(made)
    rows.append(("close a box", await timed(lambda: next(closing).close(), 20), "ms"))
    started = time.perf_counter()
    crowd = await asyncio.gather(*(boxes.create(spec) for _ in range(many)))
    rows.append((f"{many} boxes up", time.perf_counter() - started, "s"))
    shells = await asyncio.gather(*(b.shell() for b in crowd))
    for command, rounds in ((":", 20), ("/bin/true", 5)):
        started = time.perf_counter()
        for _ in range(rounds):
            await asyncio.gather(*(s.run(command) for s in shells))
        rows.append((f"{command!r} in all of them", many * rounds / (time.perf_counter() - started), "/s"))
    started = time.perf_counter()
    await asyncio.gather(*(b.close() for b in crowd))
    rows.append((f"{many} boxes down", time.perf_counter() - started, "s"))
    await boxes.aclose()
    for what, value, unit in rows:
        ratio = f"{value / base:8.1f} x /bin/true" if unit == "ms" else ""
        print(f"{what:28} {value:9.2f} {unit:3} {ratio}")


def environments(name: str, many: int) -> None:
    """The same through Gymnasium: reset, step, submit (with grading)."""
    task = "write-word-h0001"
    envs = gym.make("ClawGym/terminal-v0", num_envs=many, backend=name)
    for what, act in (
        ("reset", lambda: envs.reset(options={"task_ids": [task]})),
        ("step", lambda: envs.step(["ls"] * many)),
        ("submit and grade", lambda: envs.step(["submit"] * many)),
    ):
        started = time.perf_counter()
        act()
        print(f"{many} environments: {what:16} {time.perf_counter() - started:6.2f} s")
    envs.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="namespace")
    parser.add_argument("-n", type=int, default=128, help="boxes at once")
    options = parser.parse_args()
    print(f"clawgym {clawgym.__version__}, {options.backend}")
    asyncio.run(measure(options.backend, options.n))
    environments(options.backend, options.n)


if __name__ == "__main__":
    main()
