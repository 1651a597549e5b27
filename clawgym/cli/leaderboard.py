"""``clawgym leaderboard``: compare runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Compare runs.")


@app.callback()
def _leaderboard() -> None:
    """Compare runs."""


@app.command()
def show(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.")],
    by: Annotated[Literal["strict", "corrected", "official"], typer.Option(help="Rank by this score.")] = "strict",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
) -> None:
    """Rank run folders; runs over different tasks get boards of their own."""
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
