"""Measure the floors that come with the package: ``python benchmarks/floors.py`` rewrites verifiers/floors.json.gz.

Needs CLAWGYM_DATA for the public task sets. What is known already is not measured again, so it can be interrupted; from
nothing it takes about 20 minutes on two cores. ``--fresh`` forgets what the package holds.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from clawgym.evaluation.floors import measure_floors
from clawgym.records import Task
from clawgym.sandbox import backend
from clawgym.tasks import load
from clawgym.verifiers import floors as room

TARGET = Path(__file__).parent.parent / "verifiers" / "floors.json.gz"
SETS = ("ClawGym-Train", "ClawGym-Bench", "terminal-basic:heldout", "terminal-basic:train")


async def measure() -> dict[str, float]:
    boxes = backend()
    await boxes.probe()
    found: dict[str, float] = {}
    try:
        for name in SETS:
            task_set = load(name)
            with Progress(console=Console(stderr=True)) as progress:
                bar = progress.add_task(name, total=None)
                floors = await measure_floors(
                    task_set, boxes, lambda done, total, bar=bar: progress.update(bar, completed=done, total=total)
                )
            found |= {room.key_of(task): round(floors[task.id], 6) for task in task_set.tasks if task.id in floors}
            mean = sum(floors.values()) / len(floors)
            print(f"{name:24} {len(floors):5} floors, mean {mean:.4f}, at most {max(floors.values()):.3f}")
    finally:
        await boxes.aclose()
    return found


async def policies(name: str) -> None:
    """What each cheap policy earns on a task set; a crash counts as 0."""
    boxes = backend()
    await boxes.probe()
    turn = asyncio.Semaphore(4)
    task_set = load(name)
    rows: list[dict[str, tuple[float | None, float]]] = []

    async def one(task: Task) -> None:
        async with turn:
            rows.append(await room.cheap_scores(task, boxes))
            print(f"\r{len(rows)}/{len(task_set)}", end="", file=sys.stderr)

    try:
        await asyncio.gather(*(one(task) for task in task_set.tasks))
    finally:
        await boxes.aclose()
    print(f"\r{name}, {len(rows)} tasks: mean official score")
    for policy in room.CHEAP_POLICIES:
        print(f"  {policy:8} {sum(row[policy][0] or 0.0 for row in rows) / len(rows):.4f}")
    print(f"  floor    {sum(max(mean for _, mean in row.values()) for row in rows) / len(rows):.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--policies", metavar="SET", help="only print what the cheap policies earn on SET")
    options = parser.parse_args()
    if options.policies:
        asyncio.run(policies(options.policies))
        return
    if options.fresh:
        TARGET.unlink(missing_ok=True)
    found = asyncio.run(measure())
    data = json.dumps(dict(sorted(found.items())), separators=(",", ":")).encode()
    TARGET.write_bytes(gzip.compress(data, 9, mtime=0))
    print(f"{TARGET}: {len(found)} floors")


if __name__ == "__main__":
    main()
