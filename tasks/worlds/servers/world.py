"""A world: tables of an SQLite file, and the tools that read and change them.

Invariants: each call is one transaction, and a call that fails changes nothing; text reaches SQL only as a parameter;
the file is complete after every call. Rows made by tools are numbered on from the highest number in their table.
"""

from __future__ import annotations

import json
import sqlite3
import sys
from typing import Any

from .clawgym_tools import Server
from .world_bank import Bank
from .world_calendar import Calendar
from .world_inventory import Inventory
from .world_mail import Mail

__all__ = ["PARTS", "World", "main"]

PARTS: dict[str, Any] = {"bank": Bank, "calendar": Calendar, "inventory": Inventory, "mail": Mail}


class World(Server):
    """The tools of ``parts`` over the file at ``path``, which begins as ``seed`` where there is none yet."""

    def __init__(self, path: str, parts: list[str], seed: dict[str, Any]) -> None:
        super().__init__("world")
        self.db = sqlite3.connect(path, isolation_level=None)
        self.db.execute("PRAGMA foreign_keys = ON")
        self.db.execute("PRAGMA synchronous = OFF")  # the file outlives this process; no box outlives its machine
        if not self.db.execute("SELECT 1 FROM sqlite_master").fetchone():
            self.begin(self.db, parts, seed)
        for name in parts:
            part = PARTS[name](self.db, seed["today"])
            for method in part.TOOLS:
                self.tool(getattr(part, method))

    @staticmethod
    def begin(db: sqlite3.Connection, parts: list[str], seed: dict[str, Any]) -> None:
        """Make the tables of ``parts`` and fill them from ``seed``."""
        db.execute("BEGIN IMMEDIATE")
        for part in parts:
            for table, columns in PARTS[part].TABLES.items():
                db.execute(f"CREATE TABLE {table} ({columns})")
            for table in PARTS[part].TABLES:
                for row in seed.get(table, ()):
                    db.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)
        db.execute("COMMIT")

    def call(self, name: str, arguments: dict[str, Any]) -> dict:
        """As :meth:`Server.call`, in a transaction that only a call without an error keeps."""
        self.db.execute("BEGIN IMMEDIATE")
        result = {"isError": True}
        try:
            result = super().call(name, arguments)
        finally:
            self.db.execute("ROLLBACK" if result["isError"] else "COMMIT")
        return result

    def tables(self) -> dict[str, list[list[Any]]]:
        """Every table's rows, sorted."""
        names = [name for (name,) in self.db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {
            name: sorted([list(row) for row in self.db.execute(f"SELECT * FROM {name}")], key=repr) for name in names
        }


def main(arguments: list[str]) -> None:
    """``SEED_FILE WORLD_FILE PART...``: serve on stdin and stdout."""
    seed, path, *parts = arguments
    try:
        with open(seed, encoding="utf-8") as file:
            world = World(path, parts, json.load(file))
    except (OSError, ValueError, sqlite3.Error) as error:
        sys.exit(f"the world cannot begin: {error}")
    world.run()
