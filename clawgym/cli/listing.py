"""``clawgym list``: the registered names of agents, engines, sandboxes and so on, and their options."""

from __future__ import annotations

from typing import Annotated

import typer

from clawgym.cli._options import JsonFlag

__all__ = ["list_command"]


def list_command(
    kind: Annotated[str | None, typer.Argument(help="agents, sandboxes, ... Default: all kinds.")] = None,
    name: Annotated[str | None, typer.Argument(help="Show the options of this name.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """List the registered names of a kind, or the options of one name."""
    import dataclasses

    from rich.table import Table

    from clawgym.console import Console
    from clawgym.registry import KINDS, did_you_mean

    console = Console()
    if kind is not None and kind not in KINDS:
        raise typer.BadParameter(
            f"there is no kind {kind!r}.{did_you_mean(kind, KINDS)} Choose one of: {', '.join(KINDS)}"
        )
    if name is not None:
        assert kind is not None
        options = KINDS[kind].options(name)
        if as_json:
            console.json([dataclasses.asdict(option) for option in options])
            return
        table = Table(box=None, pad_edge=False)
        for title in ("option", "type", "default", ""):
            table.add_column(title, overflow="fold")
        for option in options:
            table.add_row(option.name, option.type, option.default or "required", option.about)
        if options:
            console.print(table)
        else:
            console.say(f"{KINDS[kind].kind} {name!r} takes no options.")
        return
    chosen = KINDS if kind is None else {kind: KINDS[kind]}
    entries = [entry for registry in chosen.values() for entry in registry.entries()]
    if as_json:
        console.json([dataclasses.asdict(entry) for entry in entries])
        return
    table = Table(box=None, pad_edge=False)
    for title in ("kind", "name", "what it is", "from"):
        table.add_column(title, overflow="fold")
    for entry in entries:
        table.add_row(entry.kind, entry.name, entry.summary, entry.source)
    console.print(table)
