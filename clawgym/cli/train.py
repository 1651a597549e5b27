"""``clawgym train``: train a policy, or a process reward model, and write a run folder; the same command resumes."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clawgym.cli._options import ConfigName, DryRun, Out, Settings

if TYPE_CHECKING:
    from clawgym.trainers.config import TrainConfig

__all__ = ["train", "train_command"]


def train_command(
    method: Annotated[
        str,
        typer.Argument(
            metavar="rl|sft|prm",
            help="rl: from rewards of episodes; sft: on demonstrations; prm: a process reward model.",
        ),
    ] = "rl",
    config: ConfigName = "tiny-cpu",
    settings: Settings = None,
    out: Out = None,
    dry_run: DryRun = False,
) -> None:
    """Train a policy on tasks in real sandboxes.

    The run folder is runs/<name>-<method>-seed<seed> unless --out is given. The same command resumes an interrupted
    run. --dry-run shows the tasks and the memory that the run needs.
    """
    from clawgym.trainers.config import load_config

    chosen = load_config(config, settings or ())
    name = re.sub(r"[^\w.@+-]+", "-", f"{chosen.name}-{method}-seed{chosen.seed}")
    folder = out or Path("runs") / name
    if dry_run:
        _check_installed()
        from clawgym.trainers.local.main import plan

        _show(plan(chosen, method, folder))
        return
    raise typer.Exit(train(chosen, folder, method))


def train(config: TrainConfig, folder: Path, method: str) -> int:
    """Train into ``folder``, show progress on the terminal, and return the exit status.

    ``method``: ``rl``, ``sft`` or ``prm``. Raises :class:`~clawgym.errors.MissingDependency` without torch and
    transformers, and the errors of the trainer.
    """
    _check_installed()
    return asyncio.run(_run(config, folder, method))


def _check_installed() -> None:
    try:
        import clawgym.trainers.local.main  # noqa: F401
    except ImportError as error:
        from clawgym.errors import MissingDependency

        raise MissingDependency(
            f"training needs torch and transformers ({error}): pip install 'clawgym[train]'"
        ) from error


async def _run(config: TrainConfig, folder: Path, method: str) -> int:
    from clawgym.cli._running import resume_command, stop_on_signals
    from clawgym.console import Console
    from clawgym.trainers import protocols
    from clawgym.trainers.common.tracking import LiveView, PlainView

    console = Console(stderr=True)
    stop = asyncio.Event()
    with contextlib.ExitStack() as stack:
        if console.is_terminal:
            view: Any = stack.enter_context(LiveView(console, f"{config.name} {method}"))
        else:
            view = PlainView(console)
        stop_on_signals(stop, view.say)
        await protocols.train(config, folder, method, view=view, stop=stop)
    console.say(f"report: {folder / 'report.html'}")
    if stop.is_set():
        console.say("Stopped. Resume with:")
        console.say(resume_command())
        return 130
    return 0


def _show(about: Mapping[str, Any]) -> None:
    from rich.table import Table

    from clawgym.console import Console
    from clawgym.visible import visible

    table = Table(show_header=False, box=None)
    for name, value in about.items():
        if name.endswith("_bytes"):
            continue
        shown = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, Mapping) else value
        if shown not in (None, ""):
            table.add_row(name.replace("_", " "), f"{shown:,}" if isinstance(shown, int) else visible(str(shown)))
    sizes = dict(about["memory_bytes"])
    sizes |= {f"  activations {name}": size for name, size in about["activations_bytes"].items()}
    sizes |= {f"in all, during {name}": size for name, size in about["peak_bytes"].items()}
    for name, size in sizes.items():
        table.add_row(name, f"{size / 2**20:,.0f} MiB")
    Console().print(table)
