"""Worlds in SQLite files, beside what a task asked them to become."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from clawgym.verifiers.state import SIZE_CAP, Comparison, Unusable

SQL = {
    "orders": "CREATE TABLE orders (id INTEGER PRIMARY KEY, customer TEXT, total REAL)",
    "lines": "CREATE TABLE lines (order_id INTEGER, item TEXT, amount INTEGER, PRIMARY KEY (order_id, item))",
    "stock": "CREATE TABLE stock (item TEXT PRIMARY KEY, amount INTEGER)",
}
SHAPE = {
    "orders": {"sql": SQL["orders"], "columns": ["id", "customer", "total"], "keys": ["id"]},
    "lines": {
        "sql": SQL["lines"],
        "columns": ["order_id", "item", "amount"],
        "keys": ["order_id", "item"],
        "part_of": ["order_id", "orders"],
    },
    "stock": {"sql": SQL["stock"], "columns": ["item", "amount"], "keys": ["item"]},
}
START = {
    "orders": [[1, "Ada", 10.0], [2, "Ben", 20.0]],
    "lines": [[1, "nut", 3], [2, "bolt", 4]],
    "stock": [["nut", 100], ["bolt", 50], ["screw", 7]],
}
END = {
    "orders": [[1, "Ada", 10.0], [2, "Ben", 20.0], [3, "Cleo", 5.0]],
    "lines": [[1, "nut", 3], [2, "bolt", 4], [3, "nut", 1], [3, "screw", 2]],
    "stock": [["nut", 99], ["bolt", 50], ["screw", 5]],
}
"""Cleo orders a nut and two screws, which leave the stock."""


def world(path: Path, tables: Mapping[str, list[list[Any]]], *more: str) -> Path:
    path.unlink(missing_ok=True)
    db = sqlite3.connect(path)
    for sql in SQL.values():
        db.execute(sql)
    for table, rows in tables.items():
        for row in rows:
            db.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)
    for sql in more:
        db.execute(sql)
    db.commit()
    db.close()
    return path


@pytest.fixture
def compared(tmp_path: Path) -> Callable[..., Comparison]:
    """The comparison of a world with ``tables`` instead of what it should hold."""

    def compare(*more: str, **tables: list[list[Any]]) -> Comparison:
        return Comparison(
            world(tmp_path / "w.sqlite", {**END, **tables}, *more), {"shape": SHAPE, "start": START, "end": END}
        )

    return compare


def test_complete_work_scores_one(compared: Callable[..., Comparison]) -> None:
    found = compared()
    assert found.exact()
    assert found.tables == ["orders", "stock"], "lines are told with the order that they belong to"
    assert (found.share("orders"), found.share("stock")) == (1.0, 1.0)


def test_half_of_the_work_scores_half(compared: Callable[..., Comparison]) -> None:
    found = compared(stock=[["nut", 99], ["bolt", 50], ["screw", 7]])
    assert not found.exact()
    assert (found.share("orders"), found.share("stock")) == (1.0, 0.5)


def test_unrequested_changes_lower_the_score(compared: Callable[..., Comparison]) -> None:
    found = compared(stock=[["nut", 99], ["bolt", 1], ["screw", 5]])
    assert not found.exact()
    assert found.share("stock") == pytest.approx(2 / 3)


def test_wrong_value_counts_as_missing_and_extra(compared: Callable[..., Comparison]) -> None:
    found = compared(stock=[["nut", 98], ["bolt", 50], ["screw", 5]])
    assert found.share("stock") == pytest.approx(1 / 3)


def test_no_work_scores_zero(compared: Callable[..., Comparison]) -> None:
    found = compared(**START)
    assert not found.exact()
    assert (found.share("orders"), found.share("stock")) == (0.0, 0.0)


def test_unchanged_table_without_expected_changes_is_ignored(compared: Callable[..., Comparison]) -> None:
    assert compared().share("lines") == 0.0


@pytest.mark.parametrize("number", [4, 77])
def test_generated_ids_do_not_count(compared: Callable[..., Comparison], number: int) -> None:
    lines = [*START["lines"], [number, "screw", 2], [number, "nut", 1]]
    assert compared(orders=[*START["orders"], [number, "Cleo", 5.0]], lines=lines).exact()


def test_types_count_but_blanks_do_not(compared: Callable[..., Comparison]) -> None:
    assert compared(orders=[*START["orders"], [3, " Cleo\n", 5.0]]).exact()
    assert not compared(orders=[*START["orders"], [3, "cleo", 5.0]]).exact()
    assert not compared(stock=[["nut", "99 or so"], ["bolt", 50], ["screw", 5]]).exact()


@pytest.mark.parametrize(
    "lines", [[[3, "nut", 1]], [[3, "nut", 1], [3, "screw", 3]], [[3, "nut", 1], [3, "screw", 2], [3, "bolt", 1]]]
)
def test_parts_of_new_rows_count(compared: Callable[..., Comparison], lines: list[list[Any]]) -> None:
    found = compared(lines=[*START["lines"], *lines])
    assert not found.exact()
    assert found.share("orders") == 0.0
    assert found.share("lines") == 0.0


def test_line_added_to_existing_order_counts(compared: Callable[..., Comparison]) -> None:
    found = compared(lines=[*END["lines"], [1, "bolt", 1]])
    assert not found.exact()
    assert found.share("orders") == 1.0


def test_deleted_rows_count(tmp_path: Path) -> None:
    end = {**START, "orders": START["orders"][:1], "lines": START["lines"][:1]}
    expected = {"shape": SHAPE, "start": START, "end": end}
    found = Comparison(world(tmp_path / "w", end), expected)
    assert found.exact()
    assert found.tables == ["orders"], "the lines of an order go with it"
    assert not Comparison(world(tmp_path / "w", START), expected).exact()
    assert not Comparison(world(tmp_path / "w", {**end, "orders": []}), expected).exact()
    left = Comparison(world(tmp_path / "w", {**end, "lines": []}), expected)
    assert not left.exact()
    assert left.share("orders") == 1.0


@pytest.mark.parametrize(
    "more",
    ["CREATE VIEW v AS SELECT 1", "CREATE TABLE more (x)", "CREATE INDEX i ON stock (amount)", "DROP TABLE lines"],
)
def test_changed_schema_scores_zero(compared: Callable[..., Comparison], more: str) -> None:
    _unusable(compared(more))


def _unusable(found: Comparison) -> None:
    with pytest.raises(Unusable):
        found.exact()
    with pytest.raises(Unusable):
        found.share("stock")
    assert found.tables == ["orders", "stock"]


def _none(path: Path) -> None:
    path.unlink()


def _text(path: Path) -> None:
    path.write_text("SQLite format 3, or so it says")


def _cut(path: Path) -> None:
    os.truncate(path, 5000)


def _huge(path: Path) -> None:
    with path.open("ab") as file:
        file.truncate(SIZE_CAP + 1)


def _link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _bytes(path: Path) -> None:
    _sql(path, "UPDATE stock SET item = x'00' WHERE item = 'nut'")


def _text_that_is_none(path: Path) -> None:
    _sql(path, "UPDATE stock SET item = CAST(x'ff' AS TEXT) WHERE item = 'nut'")


def _too_many(path: Path) -> None:
    _sql(path, "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 20000) "
         "INSERT INTO stock SELECT 'item ' || i, i FROM n")  # fmt: skip


def _sql(path: Path, sql: str) -> None:
    db = sqlite3.connect(path)
    db.execute(sql)
    db.commit()
    db.close()


@pytest.mark.parametrize(
    "spoil", [_none, _text, _cut, _huge, _link, _folder, _pipe, _bytes, _text_that_is_none, _too_many]
)
def test_damaged_file_scores_zero(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    path = world(tmp_path / "w.sqlite", END)
    spoil(path)
    _unusable(Comparison(path, {"shape": SHAPE, "start": START, "end": END}))


def test_state_file_is_not_written(tmp_path: Path) -> None:
    path = world(tmp_path / "w.sqlite", END)
    before = path.read_bytes()
    assert Comparison(path, {"shape": SHAPE, "start": START, "end": END}).exact()
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["w.sqlite"]
