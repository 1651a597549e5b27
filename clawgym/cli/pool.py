"""``clawgym pool``: look into a pool, take episodes out, bring them in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clawgym.console import Console

if TYPE_CHECKING:
    from clawgym.pool import Pool
    from clawgym.pool.exchange import Format

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Look into a pool, take episodes out, bring them in.")

Where = Annotated[str, typer.Argument(help="A pool: its file, or postgresql://...")]


def _open(where: str, *, make: bool = False) -> Pool:
    from clawgym.errors import PoolError
    from clawgym.pool import Pool

    if not make and not where.startswith("postgresql://") and not Path(where).is_file():
        raise PoolError(f"{where}: no such pool: give its file, or postgresql://user@host/database")
    return Pool(where)


@app.command()
def stats(where: Where, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Count what a pool holds, and what became of it."""
    with _open(where) as pool:
        found = pool.stats()
    console = Console()
    if as_json:
        console.json(found)
        return
    for line in _lines(found):
        console.say(line)


def _lines(found: dict[str, Any]) -> list[str]:
    def counts(of: dict[str, int]) -> str:
        return ", ".join(f"{count:,} {name}" for name, count in sorted(of.items())) or "none"

    lines = [f"{found['name']}: {found['bytes'] / 2**20:,.1f} MiB, {found['images']:,} images"]
    for channel, about in sorted(found["channels"].items()):
        rows = about["samples_per_episode"]
        lines += [
            f"{channel}",
            f"  episodes  {counts(about['episodes'])}",
            f"  groups    {counts(about['groups'])}",
            f"  turns     {about['turns']:,}, of them flawed {about['flawed_turns']:,}",
            f"  rows      {about['samples']:,} with {about['trained_ids']:,} trained ids"
            + ("" if rows is None else f", {rows:.2f} an episode"),
        ]
        if about["fates"]:
            lines.append(f"  fates     {counts(about['fates'])}")
        if about["dropped"]:
            lines.append(f"  dropped   {counts(about['dropped'])}")
    lines.append(f"batches: {counts(found['batches'])}")
    return lines


@app.command("export")
def export_command(
    where: Where,
    out: Annotated[Path, typer.Argument(help="The file to write.")],
    format: Annotated[str, typer.Option(help="parquet, atif, or messages.")] = "parquet",
    channel: Annotated[str | None, typer.Option(help="Of this channel only.")] = None,
    task: Annotated[str | None, typer.Option(help="Of this task only.")] = None,
    outcome: Annotated[str | None, typer.Option(help="That ended so only.")] = None,
) -> None:
    """Write the closed episodes of a pool to a file, which appears when it is whole."""
    from typing import cast

    from clawgym.pool.exchange import export

    with _open(where) as pool, _Counter("exported") as progress:
        count = export(
            pool, out, format=cast("Format", format), channel=channel, task_id=task, outcome=outcome, progress=progress
        )
    Console().say(f"{out}: {count:,} episodes")


@app.command("import")
def import_command(
    where: Where, file: Annotated[Path, typer.Argument(help="Parquet of a pool, ATIF, or chat messages.")]
) -> None:
    """Bring episodes into a pool (made if it is not there). Interrupted, the same command goes on."""
    from clawgym.pool.exchange import import_

    with _open(where, make=True) as pool, _Counter("imported") as progress:
        done = import_(pool, file, progress=progress)
    Console().say(
        f"{where if '://' not in where else pool.name}: {done.episodes:,} episodes with {done.turns:,} turns, "
        f"{done.flawed:,} of them flawed; {done.known:,} episodes were there already"
    )


class _Counter:
    """A line that counts, on a terminal only."""

    def __init__(self, what: str) -> None:
        self._status = Console(stderr=True).status(f"{what}: 0")
        self._what = what

    def __enter__(self) -> Callable[[int], None]:
        self._status.start()
        return lambda done: self._status.update(f"{self._what}: {done:,}") if done % 100 == 0 else None

    def __exit__(self, *_: object) -> None:
        self._status.stop()
