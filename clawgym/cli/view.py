"""``clawgym view``: show runs, pools, trainings, leaderboards and what runs now on a local web page."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["view_command"]


def view_command(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[PATH]...", help="Folders to search, or pools. Default: the working folder."),
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Let the page promote and roll back versions of online services.")
    ] = False,
) -> None:
    """Show runs, pools, trainings, leaderboards and what runs now on a local web page.

    The page is for this machine only: its address contains a secret. It changes nothing, unless --write is given.
    Ctrl-C ends it; runs in progress continue.
    """
    asyncio.run(_view(paths or [Path()], write))


async def _view(paths: list[Path], write: bool) -> None:
    from clawgym.cli._running import stop_on_signals
    from clawgym.console import Console
    from clawgym.errors import MissingDependency

    try:
        from clawgym.viewer.server import open_viewer
    except ImportError as error:
        raise MissingDependency("clawgym view needs aiohttp: pip install 'clawgym[openai]'") from error
    console = Console()
    stop = asyncio.Event()
    stop_on_signals(stop, lambda _: None)
    async with open_viewer(paths, write=write) as viewer:
        for problem in viewer.catalog.problems:
            Console(stderr=True).say(problem)
        console.say(f"{len(viewer.catalog.all())} found; shown at {viewer.url} (Ctrl-C ends this)")
        await stop.wait()
