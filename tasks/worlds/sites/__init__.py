"""Web apps for tasks with a desktop: forms, a table of orders, settings, a shop, a mailbox, a board of cards.

Everything here but this file is standard library only, for Python 3.9 or newer, and is mounted into the box as it is.
:func:`site_server` makes the :class:`~clawgym.records.Site` of a task, :func:`shape` what its verifier compares by.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from clawgym.records import Site, TaskFile

from .server import APPS, begin

__all__ = ["APPS", "SITE_FILE", "shape", "site_server", "tables"]

SITE_FILE = "site.sqlite"
"""Where a site keeps its state, below the workspace."""

_PORT = "8080"
_MAIN = b"import sys\n\nfrom sites.server import main\n\nmain(sys.argv[1:])\n"
_FOLDER = Path(__file__).parent


def site_server(app: str, start: Mapping[str, Any]) -> Site:
    """A site with one of :data:`APPS`, which begins as ``start``: ``{"today": "2031-03-05", "tables": {table: rows}}``
    and what else the app reads. Each row is a list of values in the order of the table's columns."""
    text = json.dumps({"app": app, **start}, indent=1, ensure_ascii=False)
    kept = sorted(path for path in _FOLDER.iterdir() if path.suffix in (".py", ".css", ".js"))
    files = (
        TaskFile("start.json", text.encode()),
        # A folder is run as a program: its __main__.py, with the folder itself, read-only, to import from.
        TaskFile("__main__.py", _MAIN),
        TaskFile("sites/__init__.py", b""),
        *(TaskFile(f"sites/{path.name}", path) for path in kept if path.name != "__init__.py"),
    )
    return Site(("python3", "-I", "-S", "-B", "/tools/site", "/tools/site/start.json", SITE_FILE, _PORT), files)


def tables(app: str, rows: Mapping[str, Any]) -> dict[str, list[list[Any]]]:
    """``rows`` as the tables of ``app`` hold them, sorted. Raises :class:`sqlite3.Error` for what they cannot hold."""
    db = sqlite3.connect(":memory:", isolation_level=None)
    try:
        db.execute("PRAGMA foreign_keys = ON")
        begin(db, {"app": app, "tables": rows})
        return {
            name: sorted([list(row) for row in db.execute(f"SELECT * FROM {name}")], key=repr)
            for name in APPS[app].TABLES
        }
    finally:
        db.close()


@cache
def shape(app: str) -> dict[str, Any]:
    """The tables of ``app`` for :class:`clawgym.verifiers.state.Comparison`."""
    db = sqlite3.connect(":memory:", isolation_level=None)
    try:
        begin(db, {"app": app, "tables": {}})
        found = {}
        for name, sql in db.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchall():
            columns = db.execute(f"PRAGMA table_info({name})").fetchall()
            keys = [row[1] for row in sorted(columns, key=lambda row: row[5]) if row[5]]
            found[name] = {"sql": sql, "columns": [row[1] for row in columns], "keys": keys}
            if name in APPS[app].PART_OF:
                found[name]["part_of"] = APPS[app].PART_OF[name]
        return found
    finally:
        db.close()
