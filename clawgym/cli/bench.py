"""``clawgym bench``: experiments that answer one question each, into a run folder."""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from clawgym.console import Console, Progress
    from clawgym.trainers.config import TrainConfig

__all__ = ["app"]

_COLUMNS = ("method", "seeds", "before", "learning", "after", "change", "against random", "all right", "content",
            "stable after")  # fmt: skip

app = typer.Typer(help="Experiments that answer one question each.", no_args_is_help=True)


@app.callback()
def _top() -> None: ...


@app.command("personal")
def personal(
    model: Annotated[
        Path | None, typer.Option(help="Folder of a model, or run of `clawgym train`; made by imitation by default.")
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="binary, opd, combined or random; may be repeated. All by default.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Of people, requests and sampling, from 0 on.")] = 3,
    config: Annotated[str, typer.Option("--config", "-c", help="A YAML file, or a recipe's name.")] = "personal-cpu",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="key=value, with dots for parts; may be repeated.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Run folder.")] = Path("runs/personal"),
) -> None:
    """Does a policy learn a person's style from what they say to its replies?

    The same command continues an interrupted run; what is finished is kept.
    """
    from clawgym.errors import MissingDependency, TrainingError
    from clawgym.trainers.config import load_config

    overrides = [*(settings or ()), *([] if model is None else [f'model.path="{model}"'])]
    chosen = load_config(config, overrides)
    try:
        from clawgym.trainers.local.personal import METHODS
    except ImportError as error:
        raise MissingDependency(
            f"this bench needs torch and transformers ({error}): pip install 'clawgym[train]'"
        ) from error
    if unknown := sorted(set(method or ()) - set(METHODS)):
        raise TrainingError(f"there is no method {unknown[0]!r}: choose among {', '.join(METHODS)}")
    wanted = [name for name in METHODS if name in (method or METHODS)]
    raise typer.Exit(asyncio.run(_run(chosen, out, wanted, seeds)))


async def _run(config: TrainConfig, out: Path, methods: list[Any], seeds: int) -> int:
    from clawgym.cli.eval import stop_on_signals
    from clawgym.console import Console, progress
    from clawgym.trainers.local.personal import bench

    console = Console(stderr=True)
    stop = asyncio.Event()
    with progress(console) as shown:
        stop_on_signals(stop, console.say)
        told = _told(shown, console)
        results = await bench(config, out, methods=methods, seeds=seeds, told=told, say=console.say, stop=stop)
    _show(results)
    console.say(f"report: {out / 'report.md'}")
    if stop.is_set():
        console.say("Stopped. Continue with:")
        console.say("  clawgym " + shlex.join(sys.argv[1:]))
        return 130
    return 0


def _told(shown: Progress, console: Console) -> Callable[[str, int, int], None]:
    """A bar on a terminal, else a line for each tenth."""
    bar = shown.add_task("starting")

    def told(what: str, done: int, total: int) -> None:
        shown.update(bar, description=what, completed=done, total=total)
        if not console.is_terminal and (done == total or done % max(1, total // 10) == 0):
            console.say(f"{what} ({done} of {total})")

    return told


def _show(results: Mapping[str, Any]) -> None:
    from rich.table import Table

    from clawgym.console import Console
    from clawgym.trainers.local.personal_report import by_method, shown

    table = Table(*_COLUMNS)
    for method, row in by_method(results).items():
        stable = ", ".join("never" if n is None else str(n) for n in row["stable"])
        table.add_row(
            method,
            str(row["seeds"]),
            f"{row['before'][0]:.2f}",
            shown(row["learning"]),
            shown(row["after"]),
            shown(row["change"], sign=True),
            "" if row["against_random"] is None else shown(row["against_random"], sign=True),
            shown(row["right"]),
            shown(row["content"]),
            stable,
        )
    Console().print(table)
