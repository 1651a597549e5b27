"""Many tasks at once in one OpenClaw (``openclaw-dense``): wall, CPU and memory of all of it, in one run.

    python benchmarks/openclaw_dense.py [--tasks 128] [--latency 1.0] [--prompt slim]

The model, the task and its four tools are those of ``openclaw.py``. CPU is in seconds of one core; memory is PSS at its
highest, looked at every two seconds. Quiet machine, nothing else running.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import time
from collections import Counter
from pathlib import Path

import psutil
from openclaw import TASK, Bench, line

from clawgym.agents.openclaw.dense import DenseOpenClaw
from clawgym.rollout import EpisodeRequest, run_episode
from clawgym.sandbox import backend


def is_node(process: psutil.Process) -> bool:
    return os.path.basename(os.readlink(f"/proc/{process.pid}/exe")) == "node"


def look() -> tuple[Counter[str], Counter[str]]:
    """PSS in MiB and CPU seconds so far, of this process, of OpenClaw, and of the boxes."""
    memory: Counter[str] = Counter()
    spent: Counter[str] = Counter()
    us = psutil.Process()
    for process in (us, *us.children(recursive=True)):
        with contextlib.suppress(psutil.Error, OSError, ValueError):
            times = process.cpu_times()
            name = "ours" if process == us else "openclaw" if is_node(process) else "boxes"
            text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            memory[name] += int(text.partition("Pss:")[2].split()[0]) / 1024  # type: ignore[assignment]
            spent[name] += times.user + times.system + times.children_user + times.children_system
    return memory, spent


async def main(tasks: int, latency: float, prompt: str) -> None:
    boxes = backend("namespace")
    await boxes.probe()
    bench = Bench(DenseOpenClaw(prompt=prompt), boxes, latency)  # type: ignore[arg-type]
    memory: Counter[str] = Counter()
    spent: Counter[str] = Counter()

    async def watch() -> None:
        nonlocal memory
        while True:
            await asyncio.sleep(2)
            seen, so_far = await asyncio.to_thread(look)
            memory = max(memory, seen, key=lambda counted: counted.total())
            for name, seconds in so_far.items():  # boxes come and go, and their owner counts those that went
                spent[name] = max(spent[name], seconds)

    watching = asyncio.ensure_future(watch())
    started = time.perf_counter()
    async with bench.agent() as agent:
        request = EpisodeRequest(task=TASK, seed=1, keep_workspace=False)
        ended = await asyncio.gather(*(run_episode(request, agent, boxes) for _ in range(tasks)))
        episodes = [one.episode for one in ended]
        wall = time.perf_counter() - started
        await asyncio.sleep(3)
    watching.cancel()
    await boxes.aclose()
    parts = ("openclaw", "boxes", "ours")
    line(f"{tasks} tasks at once, {prompt}, {latency:g} s a model call", "all", *parts)
    line("wall, the start of OpenClaw included", f"{wall:.1f} s")
    line("CPU", f"{spent.total():.1f} s", *(f"{spent[name]:.1f} s" for name in parts))
    line("CPU a task", f"{spent.total() / tasks:.2f} s")
    line("memory (PSS)", f"{memory.total():.0f} MiB", *(f"{memory[name]:.0f} MiB" for name in parts))
    line("model calls", str(len(bench.model.asked)))
    for outcome, count in Counter(str(episode.outcome) for episode in episodes).items():
        line(outcome, str(count))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=128)
    parser.add_argument("--latency", type=float, default=1.0)
    parser.add_argument("--prompt", choices=("reference", "slim"), default="slim")
    options = parser.parse_args()
    asyncio.run(main(options.tasks, options.latency, options.prompt))
