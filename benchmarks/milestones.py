"""Milestones by family of tasks: how often a turn changes the score of the checks, and what it costs.

    python benchmarks/milestones.py [PACK ...] [--limit N]

Each reference solution is played call by call, with and without measurements, one episode at a time. Columns: turns of
a solution; share of turns that change Phi; share of tasks in which at most one turn does; share of tasks whose grade
depends on more than a copy of the workspace holds (the final message, the transcript, running programs); share of tasks
whose verifier is not stable; milliseconds that a turn takes longer, with the measurements at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import time
from collections import Counter
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from clawgym.agents._calls import run_calls
from clawgym.agents.demonstrate import reference_calls
from clawgym.agents.oracle import OracleAgent
from clawgym.agents.protocol import AgentContext, AgentReport
from clawgym.errors import ClawGymError
from clawgym.records import Outcome, Task, TaskSet
from clawgym.rollout import Ended, EpisodeRequest, run_episode
from clawgym.rollout.milestones import can_measure
from clawgym.sandbox import Backend, backend
from clawgym.sandbox.protocol import Archive
from clawgym.tasks.sets import load
from clawgym.verifiers.grading import Subject, progress
from clawgym.verifiers.scores import plain_mean

PACKS = ("terminal-basic", "swe-basic", "toolcall-basic", "gui-basic")


class Solver:
    """Makes the calls of the reference solution, one a turn. A solution of several files is one turn."""

    name, version = "solver", "1"

    async def run(self, context: AgentContext) -> AgentReport:
        if len(context.task.solution) > 1:
            return await OracleAgent().run(context)
        return await run_calls(context, reference_calls(context.task))

    def identity(self) -> dict[str, Any]:
        return {}

    async def aclose(self) -> None: ...


class NotMeasured(Exception):
    """Why a task could not be played."""


async def played(task: Task, sandboxes: Backend, *, milestones: bool) -> tuple[Ended, float]:
    """The episode, and its wall seconds."""
    started = time.perf_counter()
    ended = await run_episode(EpisodeRequest(task=task, seed=0, milestones=milestones), Solver(), sandboxes)
    if ended.episode.outcome is Outcome.INFRA:
        raise NotMeasured(ended.episode.error or ended.episode.cause or "infrastructure error")
    return ended, time.perf_counter() - started


async def measure(task: Task, sandboxes: Backend) -> dict[str, float]:
    """What one task shows."""
    (_, plain), (ended, took) = [await played(task, sandboxes, milestones=asked) for asked in (False, True)]
    known = [value if value is not None else 0.0 for value in ended.progress]
    steps = [after - before for before, after in pairwise(known)]
    turns = max(1, len(steps))
    episode = ended.episode
    copied = None
    if episode.workspace is not None and episode.result is not None:
        copy = Subject(Archive(gzip.decompress(episode.workspace)))
        copied = await progress(task, copy, sandboxes) != plain_mean(episode.result.checks)
    return {
        "turns": len(steps),
        "changed": sum(step != 0 for step in steps),
        "only at the end": float(sum(step != 0 for step in steps) <= 1 and bool(known) and known[-1] > 0),
        "not in a copy": float(bool(copied)),
        "unstable": float(ended.unstable),
        "ms": 1000 * (took - plain) / turns,
    }


async def table(tasks: TaskSet, sandboxes: Backend, limit: int | None) -> None:
    """One row for each family."""
    families: dict[str, list[dict[str, float]]] = {}
    skipped: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    for task in tasks.tasks:
        family = str(task.metadata.get("category"))
        seen[family] += 1
        if limit is not None and seen[family] > limit:
            continue
        if task.unsupported is not None or not can_measure(task):
            skipped[task.unsupported or "its verifier needs the agent's running programs, or asks a model"] += 1
            continue
        try:
            row = await measure(task, sandboxes)
        except (ClawGymError, NotMeasured) as error:
            skipped[str(error).partition("\n")[0]] += 1
            continue
        families.setdefault(family, []).append(row)
    for family, rows in sorted(families.items()):
        turns = sum(row["turns"] for row in rows)
        print(
            f"| {tasks.name} | {family} | {len(rows)} | {turns / len(rows):.1f} | "
            f"{sum(row['changed'] for row in rows) / max(1, turns):.2f} | "
            + "".join(
                f"{fmean(row[name] for row in rows):.2f} | "
                for name in ("only at the end", "not in a copy", "unstable")
            )
            + f"{median(row['ms'] for row in rows):.0f} |",
            flush=True,
        )
    for why, count in skipped.items():
        print(f"{tasks.name}: {count} tasks skipped: {why}", flush=True)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packs", nargs="*", choices=[*PACKS, []], help="all, unless named")
    parser.add_argument("--limit", type=int, help="tasks of each family")
    given = parser.parse_args()
    sandboxes = backend("auto")
    print(
        "| pack | family | tasks | turns | turns that change Phi | one change at most | not in a copy | unstable "
        "| ms a turn |"
    )
    print("|---|---|" + 7 * "---:|")
    try:
        for name in given.packs or PACKS:
            await table(load(f"{name}:train"), sandboxes, given.limit)
    finally:
        await sandboxes.aclose()


if __name__ == "__main__":
    asyncio.run(main())
