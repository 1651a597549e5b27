"""Does a policy take on a person's style from what the person says to its replies? (docs/how-to/personal.md)

    python benchmarks/personal.py --out runs/personal
    python benchmarks/personal.py --method combined --method random --seeds 5

The same command resumes an interrupted run; finished cells (method, seed) are kept.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from clawgym.cli._running import stop_on_signals
from clawgym.console import Console, Progress, progress
from clawgym.errors import ClawGymError
from clawgym.trainers.config import TrainConfig, load_config
from clawgym.trainers.local.personal import METHODS, Method, bench
from clawgym.trainers.local.personal_report import by_method, format_interval

_COLUMNS = ("method", "seeds", "before", "learning", "after", "change", "against random", "all right", "content",
            "stable after")  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 130 when interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="folder of a model, or run of `clawgym train`; default: imitation")
    parser.add_argument("--method", action="append", choices=METHODS, help="may be given several times; default: all")
    parser.add_argument("--seeds", type=int, default=3, help="of people, requests and sampling, from 0 on")
    parser.add_argument("--config", "-c", default="personal-cpu", help="a YAML file, or the name of a recipe")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="may be given several times")
    parser.add_argument("--out", "-o", type=Path, default=Path("runs/personal"), help="run folder")
    options = parser.parse_args(argv)
    if options.seeds < 1:
        parser.error("--seeds must be at least 1")
    overrides = [*options.set, *([] if options.model is None else [f'model.path="{options.model}"'])]
    chosen = load_config(options.config, overrides)
    wanted = [name for name in METHODS if name in (options.method or METHODS)]
    return asyncio.run(_run(chosen, options.out, wanted, options.seeds))


async def _run(config: TrainConfig, out: Path, methods: list[Method], seeds: int) -> int:
    console = Console(stderr=True)
    stop = asyncio.Event()
    with progress(console) as bars:
        stop_on_signals(stop, console.say)
        on_progress = _progress_bar(bars, console)
        results = await bench(
            config, out, methods=methods, seeds=seeds, on_progress=on_progress, say=console.say, stop=stop
        )
    _show(results)
    console.say(f"report: {out / 'report.md'}")
    if stop.is_set():
        console.say("Stopped. Run the same command again to resume.")
        return 130
    return 0


def _progress_bar(bars: Progress, console: Console) -> Callable[[str, int, int], None]:
    """A bar on a terminal, else a line for each tenth."""
    bar = bars.add_task("starting")

    def on_progress(what: str, done: int, total: int) -> None:
        bars.update(bar, description=what, completed=done, total=total)
        if not console.is_terminal and (done == total or done % max(1, total // 10) == 0):
            console.say(f"{what} ({done} of {total})")

    return on_progress


def _show(results: Mapping[str, Any]) -> None:
    table = Table(*_COLUMNS)
    for method, row in by_method(results).items():
        stable = ", ".join("never" if n is None else str(n) for n in row["stable"])
        table.add_row(
            method,
            str(row["seeds"]),
            f"{row['before'][0]:.2f}",
            format_interval(row["learning"]),
            format_interval(row["after"]),
            format_interval(row["change"], sign=True),
            "" if row["against_random"] is None else format_interval(row["against_random"], sign=True),
            format_interval(row["right"]),
            format_interval(row["content"]),
            stable,
        )
    Console().print(table)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ClawGymError as error:
        sys.exit(f"personal: {error}")
