"""``clawgym compare``: is one run better than another, as far as their tasks can say."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["compare_command"]


def compare_command(
    first: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder to compare with.")],
    second: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder that may be better or worse.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare two runs over the same tasks, paired by task.

    Ends with 0 when it could say something, that no difference was found included, and with 2 when it refuses: more
    than 2% infrastructure errors in a run, under six tasks in common, or results that do not fit their receipt.
    """
    from clawgym.console import Console
    from clawgym.evaluation.compare import compare
    from clawgym.evaluation.terminal import comparison_view

    comparison = compare(first, second)
    if as_json:
        Console().json(comparison.to_dict())
    else:
        Console().print(comparison_view(comparison))
