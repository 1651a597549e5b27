"""The result table (rows: kinds of attack; columns: backends and baselines), and its summary as text lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from clawgym.redteam.escape.records import OPEN, SKIPPED, Column
from clawgym.redteam.escape.rows import ROWS

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["lines", "table"]


def _cell(column: Column, row: int) -> str:
    """``-`` if every probe is blocked; otherwise the letters of the open probes, and in brackets those not run."""
    mine = [finding for finding in column.findings if int(finding.probe[:-1]) == row]
    letters = {v: "".join(f.probe[-1] for f in mine if f.verdict == v) for v in (OPEN, SKIPPED)}
    if letters[SKIPPED] and len(letters[SKIPPED]) == len(mine):
        return "not run"
    skipped = f" ({letters[SKIPPED]})" if letters[SKIPPED] else ""
    return ("Y " + letters[OPEN] if letters[OPEN] else "-") + skipped


def table(columns: Sequence[Column]) -> Table:
    """The columns with findings, as a rich table that prints as Markdown."""
    from rich import box
    from rich.table import Table

    shown = [column for column in columns if column.findings]
    made = Table(box=box.MARKDOWN)
    made.add_column("attack on", no_wrap=True)
    for column in shown:
        made.add_column(column.name, no_wrap=True)
    made.add_column("stopped by")
    for row, (title, stopped_by) in ROWS.items():
        made.add_row(f"{row} {title}", *(_cell(column, row) for column in shown), stopped_by)
    return made


def lines(columns: Sequence[Column]) -> list[str]:
    """Summary lines: the probes that are open in a backend, with the evidence, and those that were not run."""
    found: list[str] = []
    for column in columns:
        if column.unavailable:
            found.append(f"{column.name}: not attacked: {column.unavailable}")
            continue
        count = {verdict: sum(f.verdict == verdict for f in column.findings) for verdict in (OPEN, SKIPPED)}
        kind = "a baseline, not a sandbox" if column.baseline else f"tier {column.tier}"
        blocked = len(column.findings) - count[OPEN] - count[SKIPPED]
        found.append(f"{column.name} ({kind}): {blocked} blocked, {count[OPEN]} open, {count[SKIPPED]} not run")
        if column.baseline:
            continue
        for f in column.findings:
            if f.unexpected:
                found.append(f"  OPEN {f.probe} {f.tries}: {f.evidence}")
            elif f.verdict == OPEN:
                found.append(f"  open, and declared: {f.probe} {f.tries}: {f.evidence} ({f.declared})")
            elif f.verdict == SKIPPED:
                found.append(f"  not run: {f.probe} {f.tries}: {f.evidence}")
    return found
