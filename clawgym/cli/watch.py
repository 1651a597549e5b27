"""``clawgym watch``: look at what runs, without stopping it."""

from __future__ import annotations

import contextlib
import time
from typing import Annotated

import typer

__all__ = ["watch_command"]


def watch_command(
    what: Annotated[
        str | None, typer.Argument(help="A run folder in progress, or a process id; all that is yours by default.")
    ] = None,
) -> None:
    """Show the desktops (and the last lines of what has none) of running evaluations and environments on a page.

    The address holds a secret and is for this machine alone. Ctrl-C ends the page; what runs does not notice.
    """
    from clawgym.console import Console
    from clawgym.live.page import Page
    from clawgym.live.processes import Processes

    source = Processes(_process(what))
    page = Page(source)
    Console().say(f"{len(source.all())} running; shown at {page.url} (Ctrl-C ends this)")
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            time.sleep(1)  # not for ever: where another thread was given the signal, it is seen between two sleeps
    page.close()


def _process(what: str | None) -> int | None:
    """Raises :class:`RunFolderError` for a run that nobody writes."""
    from clawgym.errors import RunFolderError
    from clawgym.records.run_folder import writer_of

    if what is None:
        return None
    if what.isdecimal():
        return int(what)
    if (pid := writer_of(what)) is None:
        raise RunFolderError(f"{what} is not in progress: look at its report.html, or run its command again")
    return pid
