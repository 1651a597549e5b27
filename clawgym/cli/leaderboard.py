"""``clawgym leaderboard``: rank runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from clawgym.cli._options import JsonFlag

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Rank runs.")


@app.callback()
def _leaderboard() -> None:
    """Rank runs."""


@app.command()
def show(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")],
    by: Annotated[
        Literal["strict", "corrected", "official"],
        typer.Option(help="Rank by this score; corrected is the baseline-adjusted score."),
    ] = "strict",
    as_json: JsonFlag = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
) -> None:
    """Rank run folders. Runs over different tasks are ranked separately."""
    from clawgym.console import Console
    from clawgym.leaderboards import load_entry, rank, to_json, to_markdown, to_view

    boards = rank([load_entry(run) for run in runs], by)
    out = Console()
    if as_json:
        out.json(to_json(boards))
    elif as_markdown:
        for line in to_markdown(boards).removesuffix("\n").split("\n"):
            out.say(line)
    else:
        out.print(to_view(boards))
