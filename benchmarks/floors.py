"""Measure the floors that come with the package: ``python benchmarks/floors.py`` rewrites verifiers/floors.json.gz.

Needs CLAWGYM_DATA for the public task sets. What is known already is not measured again, so it can be interrupted; from
nothing it takes about 20 minutes on two cores. ``--fresh`` forgets what the package holds.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from clawgym.evaluation.baselines import measure_baselines
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
                floors = await measure_baselines(
                    task_set, boxes, lambda done, total, bar=bar: progress.update(bar, completed=done, total=total)
                )
            found |= {room.key_of(task): round(floors[task.id], 6) for task in task_set.tasks if task.id in floors}
            mean = sum(floors.values()) / len(floors)
            print(f"{name:24} {len(floors):5} floors, mean {mean:.4f}, at most {max(floors.values()):.3f}")
    finally:
        await boxes.aclose()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fresh", action="store_true")
    options = parser.parse_args()
    if options.fresh:
        TARGET.unlink(missing_ok=True)
    found = asyncio.run(measure())
    data = json.dumps(dict(sorted(found.items())), separators=(",", ":")).encode()
    TARGET.write_bytes(gzip.compress(data, 9, mtime=0))
    print(f"{TARGET}: {len(found)} floors")


if __name__ == "__main__":
    main()
