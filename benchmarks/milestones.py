"""Milestones by family of tasks: how often a turn changes the share of passing checks, and what it costs.

    python benchmarks/milestones.py [PACK ...] [--limit N]

Each reference solution is played call by call, with and without measurements, one episode at a time. Columns: turns of
a solution; share of turns that change Phi; share of tasks in which at most one turn does; milliseconds that a turn
takes longer.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from clawgym.agents._calls import run_calls
from clawgym.agents.demonstrate import reference_calls
from clawgym.agents.protocol import AgentContext, AgentReport
from clawgym.records import Task, TaskSet
from clawgym.rollout import EpisodeRequest, run_episode
from clawgym.rollout.milestones import can_measure
from clawgym.sandbox import Backend, backend
from clawgym.tasks.sets import load

PACKS = ("terminal-basic", "swe-basic", "toolcall-basic", "gui-basic")


class Solver:
    """Makes the calls of the reference solution, one a turn."""

    name, version = "solver", "1"

    async def run(self, context: AgentContext) -> AgentReport:
        return await run_calls(context, reference_calls(context.task))

    def identity(self) -> dict[str, Any]:
        return {}

    async def aclose(self) -> None: ...


async def measure(task: Task, sandboxes: Backend) -> dict[str, float]:
    """What one task shows."""
    took, progress = {}, ()
    for asked in (False, True):
        started = time.perf_counter()
        ended = await run_episode(EpisodeRequest(task=task, seed=0, milestones=asked), Solver(), sandboxes)
        took[asked] = time.perf_counter() - started
        progress = ended.progress
    known = [value if value is not None else 0.0 for value in progress]
    steps = [after - before for before, after in pairwise(known)]
    turns = max(1, len(steps))
    return {
        "turns": len(steps),
        "changed": sum(step != 0 for step in steps),
        "only at the end": float(sum(step != 0 for step in steps) <= 1 and bool(known) and known[-1] > 0),
        "ms": 1000 * (took[True] - took[False]) / turns,
    }


async def table(tasks: TaskSet, sandboxes: Backend) -> None:
    """One row for each family."""
    families: dict[str, list[dict[str, float]]] = {}
    for task in tasks.tasks:
        if can_measure(task) and task.unsupported is None:
            families.setdefault(str(task.metadata.get("category")), []).append(await measure(task, sandboxes))
    for family, rows in sorted(families.items()):
        turns = sum(row["turns"] for row in rows)
        print(
            f"| {tasks.name} | {family} | {len(rows)} | {turns / len(rows):.1f} | "
            f"{sum(row['changed'] for row in rows) / max(1, turns):.2f} | "
            f"{fmean(row['only at the end'] for row in rows):.2f} | "
            f"{median(row['ms'] for row in rows):.0f} |",
            flush=True,
        )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packs", nargs="*", choices=[*PACKS, []], help="all, unless named")
    parser.add_argument("--limit", type=int, help="tasks of each pack")
    given = parser.parse_args()
    sandboxes = backend("auto")
    print("| pack | family | tasks | turns | turns that change Phi | only at the end | ms a turn |")
    print("|---|---|---:|---:|---:|---:|---:|")
    try:
        for name in given.packs or PACKS:
            await table(load(f"{name}:train", limit=given.limit), sandboxes)
    finally:
        await sandboxes.aclose()


if __name__ == "__main__":
    asyncio.run(main())
