"""The recipes of the pack ``swe-basic``: put in, recorded again, and what they hold.

    python benchmarks/swe_pack.py add recipe.json ...    # what `clawgym tasks make swe` wrote
    python benchmarks/swe_pack.py record                 # hashes of what every recipe comes out as now
    python benchmarks/swe_pack.py table                  # the table of docs/results/environments.md
    python benchmarks/swe_pack.py try [PACKAGE ...]      # solution, nothing and what is wrong, once each, in boxes

After ``add`` a package has to be named in ``PACKAGES`` of the pack; after ``record`` its ``VERSION`` has to be raised,
if a hash has changed.
"""

from __future__ import annotations

import asyncio
import gzip
import sys
import time
from collections import Counter
from pathlib import Path

from clawgym.agents.noop import NoopAgent
from clawgym.agents.oracle import OracleAgent
from clawgym.agents.protocol import Agent
from clawgym.agents.script import ScriptAgent
from clawgym.records import Outcome, Task
from clawgym.rollout import EpisodeRequest, run_episode
from clawgym.sandbox import backend
from clawgym.tasks.layers import prepare
from clawgym.tasks.packs import swe_basic
from clawgym.tasks.swe.make import recorded
from clawgym.tasks.swe.recipes import Recipe, read_recipe, write_recipe
from clawgym.tasks.swe.sources import read_source

FOLDER = Path(swe_basic.__file__).parent


def keep(recipe: Recipe) -> None:
    recipe = recorded(recipe, read_source(recipe.source), prepare(recipe.layer))
    data = gzip.compress(write_recipe(recipe), 9, mtime=0)
    (FOLDER / f"{recipe.project}.json.gz").write_bytes(data)
    print(f"{recipe.project} {recipe.version}: {len(recipe.instances)} instances, {len(data)} bytes")


def table() -> None:
    print("| split | package | licence | tests | instances of bugs tried | s a run |\n|---|---|---|---|---|---|")
    total: Counter[str] = Counter()
    operators: Counter[str] = Counter()
    for split, packages in swe_basic.PACKAGES.items():
        for name in packages:
            r = swe_basic.recipe(name)
            total.update(instances=len(r.instances), tried=r.tried)
            operators.update(instance.edit.operator for instance in r.instances)
            made = f"{len(r.instances)} of {r.tried}"
            print(f"| {split} | {name} {r.version} | {r.licence} | {len(r.tests)} | {made} | {r.seconds:.1f} |")
    print(dict(total), dict(operators))


async def attempts(packages: list[str]) -> None:
    boxes, slots, took, bad = backend(), asyncio.Semaphore(2), [], 0

    async def one(task: Task, agent: Agent) -> None:
        nonlocal bad
        async with slots:
            episode = (await run_episode(EpisodeRequest(task=task, seed=0, keep_workspace=False), agent, boxes)).episode
        wanted = Outcome.SOLVED if agent.name == "oracle" else Outcome.FAILED
        if episode.result is not None:
            took.append(episode.result.seconds)
        if episode.outcome is not wanted:
            bad += 1
            print(f"{task.id} {agent.name}: {episode.outcome} {episode.cause or ''} {episode.error}", flush=True)

    tasks = swe_basic.taskset(swe_basic.NAME, packages).tasks
    scripts = {task.id: [ScriptAgent(file.read(), file.path) for file in task.wrong_solutions] for task in tasks}
    work = [one(task, agent) for task in tasks for agent in (OracleAgent(), NoopAgent(), *scripts[task.id])]
    started = time.monotonic()
    try:
        await asyncio.gather(*work)
    finally:
        await boxes.aclose()
    took.sort()
    print(
        f"{len(tasks)} instances, {len(work)} episodes in {time.monotonic() - started:.0f} s, {bad} not as they should "
        f"be; grading {took[len(took) // 2]:.1f} s in the middle, {took[-1]:.1f} s at most"
    )


def main() -> None:
    command, *rest = sys.argv[1:] or ["table"]
    every = [name for packages in swe_basic.PACKAGES.values() for name in packages]
    if command == "add":
        for path in rest:
            keep(read_recipe(Path(path).read_bytes(), path))
    elif command == "record":
        for name in every:
            keep(swe_basic.recipe(name))
    elif command == "try":
        asyncio.run(attempts(rest or every))
    elif command == "table":
        table()
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
