"""Does a policy take on a person's style from what the person says to its replies? (docs/how-to/personal.md)

    python benchmarks/personal.py --out runs/personal
    python benchmarks/personal.py --method combined --method random --seeds 5
    python benchmarks/personal.py --method opd --lr 3e-5 --lr 1e-4 --lr 3e-4 --out runs/personal-rates

The same command resumes an interrupted run; finished cells (method, seed) are kept. ``report.html`` has the scores of
first replies over the sessions. With ``--lr``, each rate is a run in ``OUT/lr-RATE``, all from the same first policy in
``OUT/sft``, and ``OUT/report.html`` has a chart for each method with a line for each rate.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from clawgym.cli._running import stop_on_signals
from clawgym.console import Console, Progress, progress
from clawgym.errors import ClawGymError
from clawgym.reporting.experiment import experiment, experiment_page
from clawgym.trainers.config import TrainConfig, load_config
from clawgym.trainers.local.personal import METHODS, Method, bench, first_policy
from clawgym.trainers.local.personal_report import cells_of, curves, tables


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 130 when interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="folder of a model, or run of `clawgym train`; default: imitation")
    parser.add_argument("--method", action="append", choices=METHODS, help="may be given several times; default: all")
    parser.add_argument(
        "--lr", action="append", type=float, metavar="RATE", help="may be given several times; default: optimizer.lr"
    )
    parser.add_argument("--seeds", type=int, default=3, help="of people, requests and sampling, from 0 on")
    parser.add_argument("--config", "-c", default="personal-cpu", help="a YAML file, or the name of a recipe")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="may be given several times")
    parser.add_argument("--out", "-o", type=Path, default=Path("runs/personal"), help="run folder")
    options = parser.parse_args(argv)
    if options.seeds < 1:
        parser.error("--seeds must be at least 1")
    overrides = [*options.set, *([] if options.model is None else [f'model.path="{options.model}"'])]
    wanted = [name for name in METHODS if name in (options.method or METHODS)]
    work = partial(_run, options.config, overrides, options.out, wanted, options.seeds, options.lr or [])
    return asyncio.run(work())


async def _run(
    source: str, overrides: list[str], out: Path, methods: list[Method], seeds: int, rates: list[float]
) -> int:
    console = Console(stderr=True)
    stop = asyncio.Event()
    config = load_config(source, overrides)
    with progress(console) as bars:
        stop_on_signals(stop, console.say)
        on_progress = _progress_bar(bars, console)
        go = partial(bench, methods=methods, seeds=seeds, on_progress=on_progress, say=console.say, stop=stop)
        if not rates:
            found = {out: await go(config, out)}
        else:
            model = await first_policy(config, out, on_progress=on_progress, stop=stop)
            found = {}
            for rate in rates:
                if model is not None and not stop.is_set():
                    given = [*overrides, f'model.path="{model}"', f"optimizer.lr={rate:g}"]
                    folder = out / f"lr-{rate:g}"
                    found[folder] = await go(load_config(source, given), folder)
            _write_rates(out, methods, found, config)
    for folder, results in found.items():
        _show(results)
        console.say(f"report: {folder / 'report.html'}")
    if rates:
        console.say(f"all rates: {out / 'report.html'}")
    if stop.is_set():
        console.say("Stopped. Run the same command again to resume.")
        return 130
    return 0


def _write_rates(
    out: Path, methods: Sequence[Method], found: Mapping[Path, Mapping[str, Any]], config: TrainConfig
) -> None:
    """``OUT/report.html``: the curves and the tables of all rates."""
    charts = []
    for method in methods:
        rates = {folder.name: rows for folder, results in found.items() if (rows := cells_of(results).get(method))}
        if rates:
            charts.append(curves(f"{method}: score of first replies during training", rates, config.rollout.groups))
    by_rate = [tables(results)[0] | {"title": folder.name} for folder, results in found.items() if results["cells"]]
    page = experiment_page(experiment(out.resolve().name, charts=charts, tables=by_rate))
    (out / "report.html").write_text(page, "utf-8")


def _progress_bar(bars: Progress, console: Console) -> Callable[[str, int, int], None]:
    """A bar on a terminal, else a line for each tenth."""
    bar = bars.add_task("starting")

    def on_progress(what: str, done: int, total: int) -> None:
        bars.update(bar, description=what, completed=done, total=total)
        if not console.is_terminal and (done == total or done % max(1, total // 10) == 0):
            console.say(f"{what} ({done} of {total})")

    return on_progress


def _show(results: Mapping[str, Any]) -> None:
    """The table by method, as Markdown."""
    by_method = tables(results)[0]
    columns = by_method["columns"]
    for cells in (columns, ["---"] * len(columns), *by_method["rows"]):
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ClawGymError as error:
        sys.exit(f"personal: {error}")
