"""``clawgym leaderboard``: compare runs."""

from __future__ import annotations

import json
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
    from clawgym.leaderboards import load_entry, rank, to_json, to_markdown, to_view

    boards = rank([load_entry(run) for run in runs], by)
    if as_json:
        typer.echo(json.dumps(to_json(boards), indent=2))
    elif as_markdown:
        typer.echo(to_markdown(boards), nl=False)
    else:
        from rich.console import Console

        Console().print(to_view(boards))
