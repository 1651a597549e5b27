"""Family ``table``: orders to find, change and delete."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

from clawgym.tasks.packs.seeded import FIRST, WORDS, Generator
from clawgym.tasks.packs.seeded import generator as _generator
from clawgym.tasks.worlds.sites.table import STATUSES

from ._build import Action, GuiDraft, choose, click, day, fill, refill, written

TABLE: dict[str, Generator[GuiDraft]] = {}
generator = partial(_generator, family="table", into=TABLE)

_CITIES = (
    *("Lisbon", "Vienna", "Oslo", "Krakow", "Turin", "Ghent", "Riga", "Malaga", "Porto", "Basel", "Bergen", "Cork"),
    *("Graz", "Lyon", "Utrecht", "Zagreb"),
)
_THINGS = (
    *("lamp", "chair", "desk", "shelf", "clock", "vase", "rug", "mirror", "bench", "stool", "pillow", "curtain"),
    *("bowl", "mug", "tray", "basket"),
)
_ID, _CUSTOMER, _CITY, _ITEM, _QUANTITY, _DAY, _STATUS = range(7)
_FIELD = {"city": _CITY, "quantity": _QUANTITY, "status": _STATUS}

Row = list[Any]


def _orders(rng: random.Random, number: int) -> list[Row]:
    """Orders of nine people, from few of the cities, of few of the things."""
    ids = sorted(rng.sample(range(1001, 9999), number))
    people = [f"{first} {last.title()}" for first, last in zip(rng.sample(FIRST, 9), rng.sample(WORDS, 9), strict=True)]
    colours, cities, things = rng.sample(WORDS, 4), rng.sample(_CITIES, 8), rng.sample(_THINGS, 8)
    return [
        [
            *(k, rng.choice(people), rng.choice(cities), f"{rng.choice(colours).title()} {rng.choice(things)}"),
            *(rng.randint(1, 60), day(-rng.randint(1, 90)), rng.choice(STATUSES)),
        ]
        for k in ids
    ]


def _seek(words: str = "", status: str = "") -> list[Action]:
    """Filter the table, from its start page."""
    calls = fill("#words", words) if words else []
    calls += choose("#status", status) if status else []
    return [*calls, *click("#apply")]


def _edit(row: Row, field: str, value: object, save: bool = True) -> list[Action]:
    """Change a cell that is in sight."""
    calls = click(f"#{field}-{row[_ID]}")
    calls += choose("#value", str(value)) if field == "status" else refill("#value", str(value))
    return [*calls, *click("#save" if save else "#cancel")]


def _delete(row: Row) -> list[Action]:
    return click(f"#delete-{row[_ID]}", "#confirm")


def _changed(rows: list[Row], where: Callable[[Row], bool], field: str, value: object) -> list[Row]:
    return [[*row[: _FIELD[field]], value, *row[_FIELD[field] + 1 :]] if where(row) else row for row in rows]


def _draft(rows: list[Row], end: list[Row] | None, **rest: Any) -> GuiDraft:
    return GuiDraft(
        app="table", start={}, tables={"orders": rows}, end=None if end is None else {"orders": end}, **rest
    )


@generator("table-edit", level=1)
def table_edit(rng: random.Random) -> GuiDraft:
    """Change the quantity of one order."""
    return _quantity(rng, there=True)


@generator("table-edit-gone", level=1)
def table_edit_gone(rng: random.Random) -> GuiDraft:
    """Change the quantity of an order that does not exist; infeasible."""
    return _quantity(rng, there=False)


def _quantity(rng: random.Random, there: bool) -> GuiDraft:
    rows = _orders(rng, 24 if there else 25)
    row = rng.choice(rows[1:-1])
    index = rows.index(row)
    number = rng.randint(row[_QUANTITY] + 1, 99)
    near = rows[index + 1]
    end = _changed(rows, lambda r: r is row, "quantity", number)
    if not there:
        rows, end = [r for r in rows if r is not row], None
    seek = _seek(str(row[_ID]))
    instruction = f"Set the quantity of order {row[_ID]} ({row[_ITEM]}, for {row[_CUSTOMER]}) to {number}."
    if not there:
        return _draft(
            rows,
            end,
            instruction=instruction,
            calls=seek,
            wrong={"another-order": [*_first_pages(rows, near), *_edit(near, "quantity", number)]},
            why=f"There is no order {row[_ID]}.",
        )
    return _draft(
        rows,
        end,
        instruction=instruction,
        calls=[*seek, *_edit(row, "quantity", number)],
        wrong={
            "does-not-save": [*seek, *_edit(row, "quantity", number, save=False)],
            "another-order": [*_first_pages(rows, near), *_edit(near, "quantity", number)],
            "adds-to-what-was-there": [*seek, *_edit(row, "quantity", number + row[_QUANTITY])],
        },
    )


def _first_pages(rows: list[Row], row: Row) -> list[Action]:
    """Turn pages until ``row`` is in sight."""
    return click(*["#next"] * (rows.index(row) // 10))


@generator("table-delete", level=2)
def table_delete(rng: random.Random) -> GuiDraft:
    """Delete the cancelled orders of one customer."""
    while True:
        rows = _orders(rng, 36)
        who = rng.choice(rows)[_CUSTOMER]
        gone = [row for row in rows if row[_CUSTOMER] == who and row[_STATUS] == "Cancelled"]
        kept = [row for row in rows if row[_CUSTOMER] == who and row not in gone]
        if 2 <= len(gone) <= 4 and kept:
            break
    seek = _seek(who, "Cancelled")
    right = [call for row in gone for call in _delete(row)]
    return _draft(
        rows,
        [row for row in rows if row not in gone],
        instruction=f"Delete all cancelled orders of {who}, and no others.",
        calls=[*seek, *right],
        wrong={
            "one-is-left": [*seek, *right[:-2]],
            "does-not-confirm": [*seek, *right[:-1]],
            "one-too-many": [*seek, *right, *click("#clear"), *_seek(who), *_delete(kept[0])],
        },
    )


@generator("table-latest", level=2)
def table_latest(rng: random.Random) -> GuiDraft:
    """Find the latest order of an item by sorting, and change its city."""
    while True:
        rows = _orders(rng, 40)
        thing = rng.choice(rows)[_ITEM].split()[1]
        mine = sorted((row for row in rows if row[_ITEM].endswith(f" {thing}")), key=lambda row: row[_DAY])
        if 3 <= len(mine) <= 9 and mine[-1][_DAY] != mine[-2][_DAY]:
            break
    row, before = mine[-1], mine[-2]
    city = f"{rng.choice([city for city in _CITIES if city != row[_CITY]])} {rng.randint(2, 29)}"
    seek = [*_seek(thing), *click("#sort-day", "#sort-day")]
    return _draft(
        rows,
        _changed(rows, lambda r: r is row, "city", city),
        instruction=f"Of all orders of a {thing}, in whatever colour, the latest goes to {city}: change its city.",
        calls=[*seek, *_edit(row, "city", city)],
        wrong={
            "the-one-before": [*seek, *_edit(before, "city", city)],
            "the-earliest": [*seek, *_edit(mine[0], "city", city)],
            "types-behind-the-old-city": [*seek, *_edit(row, "city", f"{row[_CITY]}{city}")],
        },
    )


@generator("table-ship", level=3)
def table_ship(rng: random.Random) -> GuiDraft:
    """Change the status of all orders that meet three conditions, over several pages."""
    while True:
        rows = _orders(rng, 60)
        city, last = rng.choice(rows)[_CITY], day(-rng.randint(30, 60))
        paid = [row for row in rows if row[_CITY] == city and row[_STATUS] == "Paid"]
        mine = [row for row in paid if row[_DAY] <= last]
        later = [row for row in paid if row[_DAY] > last]
        if 2 <= len(mine) <= 3 and later and len(paid) <= 9:
            break
    seek = _seek(city, "Paid")
    *first, rest = (_edit(row, "status", "Shipped") for row in mine)
    some = [call for calls in first for call in calls]
    ship = [*seek, *some, *rest]
    return _draft(
        rows,
        _changed(rows, lambda r: r in mine, "status", "Shipped"),
        instruction=(
            f"All paid orders for {city} up to and including {written(last)} have left the house: set their status to "
            "Shipped. Later ones, and orders with another status, stay as they are."
        ),
        calls=ship,
        wrong={
            "one-is-left": [*seek, *some],
            "later-ones-too": [*ship, *_edit(later[0], "status", "Shipped")],
            "wrong-status": [*seek, *some, *_edit(mine[-1], "status", "Cancelled")],
        },
    )


@generator("table-largest", level=3)
def table_largest(rng: random.Random) -> GuiDraft:
    """Halve the largest order of a customer and delete the smallest."""
    while True:
        rows = _orders(rng, 45)
        who = rng.choice(rows)[_CUSTOMER]
        mine = sorted((row for row in rows if row[_CUSTOMER] == who), key=lambda row: row[_QUANTITY])
        if len(mine) < 4 or len(mine) > 9 or mine[-1][_QUANTITY] % 2:
            continue
        if mine[0][_QUANTITY] < mine[1][_QUANTITY] and mine[-2][_QUANTITY] < mine[-1][_QUANTITY]:
            break
    small, large = mine[0], mine[-1]
    half = large[_QUANTITY] // 2
    seek = [*_seek(who), *click("#sort-quantity")]
    end = [row for row in _changed(rows, lambda r: r is large, "quantity", half) if row is not small]
    return _draft(
        rows,
        end,
        instruction=(
            f"{who} has second thoughts: halve the quantity of their largest order (by quantity), and delete their "
            "smallest one. The status of an order does not matter."
        ),
        calls=[*seek, *_delete(small), *_edit(large, "quantity", half)],
        wrong={
            "the-other-way-round": [*seek, *_delete(large), *_edit(small, "quantity", max(1, small[_QUANTITY] // 2))],
            "deletes-only": [*seek, *_delete(small)],
            "the-second-smallest": [*seek, *_delete(mine[1]), *_edit(large, "quantity", half)],
        },
    )
