"""Measure the no-model baselines in the package: ``python benchmarks/baselines.py`` writes verifiers/floors.json.gz.

Needs CLAWGYM_DATA for the public task sets. Known baselines are not measured again, so an interrupted run
is resumed. All of them take about 20 minutes on two cores. ``--fresh`` ignores the baselines in the package.
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
from clawgym.verifiers import baselines

TARGET = Path(__file__).parent.parent / "verifiers" / "floors.json.gz"
SETS = ("ClawGym-Train", "ClawGym-Bench", "terminal-basic:heldout", "terminal-basic:train")


async def measure() -> dict[str, float]:
    sandboxes = backend()
    await sandboxes.probe()
    found: dict[str, float] = {}
    try:
        for name in SETS:
            task_set = load(name)
            with Progress(console=Console(stderr=True)) as progress:
                bar = progress.add_task(name, total=None)
                measured = await measure_baselines(
                    task_set, sandboxes, lambda done, total, bar=bar: progress.update(bar, completed=done, total=total)
                )
            found |= {
                baselines.key_of(task): round(measured[task.id], 6) for task in task_set.tasks if task.id in measured
            }
            mean = sum(measured.values()) / len(measured)
            print(f"{name:24} {len(measured):5} baselines, mean {mean:.4f}, at most {max(measured.values()):.3f}")
    finally:
        await sandboxes.aclose()
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
    print(f"{TARGET}: {len(found)} baselines")


if __name__ == "__main__":
    main()
