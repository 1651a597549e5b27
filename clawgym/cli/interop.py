"""``clawgym interop``: check the adapters to other packages."""

from __future__ import annotations

from typing import Annotated

import typer

from clawgym.cli._options import JsonFlag
from clawgym.console import Console

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Check the adapters to other packages.")


@app.callback()
def _group() -> None:
    pass


@app.command()
def check(
    routes: Annotated[
        list[str] | None, typer.Argument(metavar="ROUTE...", help="Such as openenv; an unknown name lists all.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Run the tests of the adapters with the real packages, and write the table of the documentation.

    Each route has an environment in the cache, with its own versions. Run the same command again to resume. Exit status
    0 if all that was tested holds, else 1. Needs a clone of the repository.
    """
    from dataclasses import asdict

    from rich.table import Table

    from clawgym.interop.check import check_route, routes_named, write_results

    console, out = Console(stderr=True), Console()
    results = []
    for route in routes_named(routes or ()):
        result, output = check_route(route, console.say)
        if not result.holds:
            for line in output.splitlines():
                console.say(line)
        results.append(result)
        console.say(f"written: {write_results(results)}")
    if as_json:
        out.json([asdict(result) for result in results])
    else:
        table = Table("route", "package", "Python", "date", "passed", "failed", "skipped")
        for one in results:
            numbers = (str(one.passed), str(one.failed), str(one.skipped))
            table.add_row(one.route, f"{one.package} {one.version}", one.python, one.date, *numbers)
        out.print(table)
        for one in results:
            for sentence in one.held:
                out.say(f"{one.route}: {sentence}")
    raise typer.Exit(0 if all(result.holds for result in results) else 1)
