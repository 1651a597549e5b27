"""``clawgym ledger``: grade what a trace says about its tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from clawgym.pool.check import Verdict

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Grade what a trace says about its tokens.")
_SHOWN = 20


@app.callback()
def _ledger() -> None:
    """Grade what a trace says about its tokens."""


@app.command()
def check(
    source: Annotated[str, typer.Argument(metavar="FILE", help="A trace file, a pool, or postgresql://...")],
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder of the model's tokenizer: also compare ids with texts.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say of each episode whether its tokens are exact, unproved, or broken, and why.

    Ends with 0 only if every episode is exact, else with 1. Reads pools and their parquet, ATIF, and the JSON lines and
    parquet of verl, slime, Claw-R1, Agent Lightning, NeMo Gym and others.
    """
    from clawgym.console import Console
    from clawgym.pool.check import check as apply
    from clawgym.pool.tokenizer import load
    from clawgym.pool.traces import read_traces

    words = None if tokenizer is None else load(tokenizer)
    verdicts = []
    with Console(stderr=True).status("checked: 0") as status:
        for name, turns in read_traces(source):
            verdicts.append(apply(name, turns, words))
            if len(verdicts) % 50 == 0:
                status.update(f"checked: {len(verdicts):,}")
    exact = bool(verdicts) and all(verdict.status == "exact" for verdict in verdicts)
    if as_json:
        rows = [{"status": verdict.status, **asdict(verdict)} for verdict in verdicts]
        Console().json({"exact": exact, "episodes": rows})
    else:
        _show(verdicts, tokenizer is not None)
    raise typer.Exit(0 if exact else 1)


def _show(verdicts: list[Verdict], with_texts: bool) -> None:
    from rich.table import Table

    from clawgym.console import Console
    from clawgym.visible import visible

    console = Console()
    order = {"broken": 0, "unproved": 1, "exact": 2}
    table = Table()
    for name in ("episode", "verdict"):
        table.add_column(name, overflow="fold")
    for name in ("turns", "sampled", "branches", "re-encoded"):
        table.add_column(name, justify="right")
    table.add_column("why", overflow="fold")
    for verdict in sorted(verdicts, key=lambda v: order[v.status])[:_SHOWN]:
        numbers = (verdict.turns, verdict.sampled, verdict.branches, verdict.reencoded)
        table.add_row(visible(verdict.episode), verdict.status, *(f"{n:,}" for n in numbers), visible(_why(verdict)))
    console.print(table)
    if len(verdicts) > _SHOWN:
        console.say(f"and {len(verdicts) - _SHOWN:,} more; --json shows them all")
    counts = Counter(verdict.status for verdict in verdicts)
    said = ", ".join(f"{counts[status]:,} {status}" for status in order if counts[status]) or "no episodes"
    texts = "" if with_texts else "; ids were not compared with texts (--tokenizer)"
    console.say(f"{said}{texts}")


def _why(verdict: Verdict) -> str:
    """The worst findings, each kind once."""
    level = {"exact": "note", "unproved": "unproved", "broken": "broken"}[verdict.status]
    kinds: dict[str, list[str]] = {}
    for finding in verdict.findings:
        if finding.level == level:
            where = "" if finding.turn is None else f"turn {finding.turn}: "
            kinds.setdefault(finding.code, []).append(f"{where}{finding.text}")
    more = (f"{texts[0]}{f' (and {len(texts) - 1} more)' if len(texts) > 1 else ''}" for texts in kinds.values())
    return "; ".join(more)
