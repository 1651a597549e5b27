"""Whether an SQLite file has become what a task asked for, and nothing else; copied beside a checker as
``clawgym_state.py``. Standard library only.

Two files are compared by what changed in them since the start. Rows that were there are known by their key; rows that
were added, by what they say: the number that a tool gave them does not count, nor the order in which they were made.

Invariants: the file is read as data: no code, view or trigger of it runs, and it is never written to; a file that is
damaged, of another shape, huge, or no file at all makes every check of it 0.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import stat
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["Comparison", "changes"]

SIZE_CAP = 16 << 20
_ROW_CAP = 20_000
_SECONDS = 10.0

Tables = Mapping[str, Iterable[Iterable[Any]]]
Shape = Mapping[str, Mapping[str, Any]]
"""Table -> ``sql`` (its definition), ``columns``, ``keys`` (names of its key columns), and for a table whose rows
belong to another's, ``part_of``: ``[column, table]``."""


class Unusable(Exception):
    """The file is not what a world leaves."""


class Comparison:
    """The file ``path`` beside what it should be. ``expected`` has ``shape``, ``start`` and ``end``."""

    def __init__(self, path: str | Path, expected: Mapping[str, Any]) -> None:
        self._shape: Shape = expected["shape"]
        self.wanted = changes(self._shape, expected["start"], expected["end"])
        self._got: dict[str, Counter[Any]] | None = None
        self._problem = ""
        try:
            self._got = changes(self._shape, expected["start"], _read(Path(path), self._shape))
        except (Unusable, OSError, sqlite3.Error, ValueError, OverflowError, MemoryError) as error:
            self._problem = f"{type(error).__name__}: {error}"

    @property
    def tables(self) -> list[str]:
        """The tables that the task asks to change."""
        return [table for table, wanted in self.wanted.items() if wanted]

    def share(self, table: str) -> float:
        """What was changed rightly in ``table``, of all that was or should have been changed there."""
        got, wanted = self._changed()[table], self.wanted[table]
        union = sum((got | wanted).values())
        return sum((got & wanted).values()) / union if union else 0.0

    def exact(self) -> bool:
        """Whether all that was asked for was changed, and nothing else."""
        return self._changed() == self.wanted

    def _changed(self) -> dict[str, Counter[Any]]:
        if self._got is None:
            raise Unusable(self._problem)
        return self._got


def changes(shape: Shape, start: Tables, end: Tables) -> dict[str, Counter[Any]]:
    """What is different in ``end``, table by table, as a multiset of facts that do not depend on new numbers."""
    new: dict[str, set[Any]] = {}
    gone: dict[str, set[Any]] = {}
    before, after = ({t: _keyed(shape[t], rows[t]) for t in shape} for rows in (start, end))
    for table in shape:
        new[table] = set(after[table]) - set(before[table])
        gone[table] = set(before[table]) - set(after[table])
    found: dict[str, Counter[Any]] = {table: Counter() for table in shape}
    for table, facts in found.items():
        form = shape[table]
        columns, keys, owner = form["columns"], form["keys"], form.get("part_of")
        for key in gone[table]:
            if not (owner and (_owner(columns, owner, before[table][key]),) in gone[owner[1]]):
                facts[("gone", *key)] += 1
        for key in new[table]:
            row = after[table][key]
            if owner and (_owner(columns, owner, row),) in new[owner[1]]:
                continue  # told with its owner
            numbered = keys == ["id"]
            values = [_plain(v) for c, v in zip(columns, row, strict=True) if not (numbered and c == "id")]
            facts[("new", json.dumps([values, _parts(shape, after, table, key)]))] += 1
        for key in set(before[table]) & set(after[table]):
            for column, old, now in zip(columns, before[table][key], after[table][key], strict=True):
                if _plain(old) != _plain(now):
                    facts[("changed", *key, column, _plain(now))] += 1
    return found


def _owner(columns: list[str], owner: list[str], row: list[Any]) -> Any:
    return row[columns.index(owner[0])]


def _parts(shape: Shape, tables: Mapping[str, Mapping[Any, list[Any]]], table: str, key: tuple[Any, ...]) -> list[Any]:
    """The rows of other tables that belong to the row ``key``, without its number."""
    parts = []
    for other, form in sorted(shape.items()):
        owner = form.get("part_of")
        if owner and owner[1] == table:
            place = form["columns"].index(owner[0])
            rows = [row for row in tables[other].values() if (row[place],) == key]
            parts.append([other, sorted([_plain(v) for v in row[:place] + row[place + 1 :]] for row in rows)])
    return parts


def _plain(value: Any) -> Any:
    """Text with single spaces; other values as they are, with their type."""
    return " ".join(value.split()) if isinstance(value, str) else value


def _keyed(form: Mapping[str, Any], rows: Iterable[Iterable[Any]]) -> dict[tuple[Any, ...], list[Any]]:
    places = [form["columns"].index(key) for key in form["keys"]]
    return {tuple(row[place] for place in places): row for row in map(list, rows)}


def _read(path: Path, shape: Shape) -> dict[str, list[list[Any]]]:
    """The rows of a file, from a copy: what was cut off in the middle of a change is rolled back there."""
    folder = Path(tempfile.mkdtemp(prefix="state-"))
    try:
        copy = folder / "copy.sqlite"
        for suffix in ("", "-journal"):
            source = Path(f"{path}{suffix}")
            try:
                info = source.lstat()
            except FileNotFoundError:
                if not suffix:
                    raise
                continue
            if not stat.S_ISREG(info.st_mode) or info.st_size > SIZE_CAP:
                raise Unusable(f"{source.name} is not a file of at most {SIZE_CAP >> 20} MiB")
            shutil.copyfile(source, f"{copy}{suffix}", follow_symlinks=False)
        return _rows(copy, shape)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _rows(path: Path, shape: Shape) -> dict[str, list[list[Any]]]:
    db = sqlite3.connect(path)
    try:
        end = time.monotonic() + _SECONDS
        db.set_progress_handler(lambda: time.monotonic() > end, 10_000)
        db.execute("PRAGMA trusted_schema = OFF")
        found = {
            name: (kind, sql) for kind, name, sql in db.execute("SELECT type, name, sql FROM sqlite_master") if sql
        }
        if found != {name: ("table", form["sql"]) for name, form in shape.items()}:
            raise Unusable("its tables are not the ones that the world began with")
        tables = {}
        for name in shape:
            rows = db.execute(f'SELECT * FROM "{name}"').fetchmany(_ROW_CAP)
            if len(rows) == _ROW_CAP or any(isinstance(value, bytes) for row in rows for value in row):
                raise Unusable(f"{name} holds what no tool puts there")
            tables[name] = [list(row) for row in rows]
        return tables
    finally:
        db.close()
