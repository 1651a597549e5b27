"""Family ``inventory``: stock and orders."""

from __future__ import annotations

import random
from functools import partial

from clawgym.tasks.packs.seeded import Generator
from clawgym.tasks.packs.seeded import generator as _generator

from ._build import ToolCallDraft, call
from ._start import day, people, stock

INVENTORY: dict[str, Generator[ToolCallDraft]] = {}
generator = partial(_generator, family="inventory", into=INVENTORY)

_PARTS = ("inventory",)
_ITEM = ("sku", "name", "stock", "reserved", "reorder_below", "price_cents")

Order = tuple[int, str, str, str, dict[str, int]]
"""Number, customer, day, status, sku -> quantity."""


def _start(items: list[dict], orders: list[Order]) -> dict:
    for _, _, _, status, lines in orders:
        for item in items:
            item["reserved"] += lines.get(item["sku"], 0) * (status == "reserved")
    for item in items:
        item["stock"] = max(item["stock"], item["reserved"])
    return {
        "items": [[item[key] for key in _ITEM] for item in items],
        "orders": [[number, customer, date, status] for number, customer, date, status, _ in sorted(orders)],
        "order_lines": [[o[0], sku, quantity] for o in sorted(orders) for sku, quantity in sorted(o[4].items())],
    }


def _lines(rng: random.Random, items: list[dict], most: int = 6) -> dict[str, int]:
    return {item["sku"]: rng.randint(1, most) for item in rng.sample(items, rng.randint(1, 3))}


@generator("inventory-restock", level=1)
def inventory_restock(rng: random.Random) -> ToolCallDraft:
    """Add a delivery of two items to the stock."""
    items = stock(rng, rng.randint(9, 14))
    first, twin, second = items[0], items[1], items[2]
    a, b = rng.sample(range(5, 120), 2)
    orders = [
        (n, name, day(-3), "open", _lines(rng, items))
        for n, (name, _) in enumerate(people(rng, 4), rng.randint(500, 800))
    ]

    def restock(item: dict, quantity: int) -> dict:
        return call("restock_item", sku=item["sku"], quantity=quantity)

    return ToolCallDraft(
        instruction=(
            f"A delivery has come in: {a} pieces of the {first['name']} and {b} of the {second['name']}. Put them on "
            "stock."
        ),
        parts=_PARTS,
        start=_start(items, orders),
        calls=[
            call("find_items", words=first["name"]),
            call("find_items", words=second["name"]),
            restock(first, a),
            restock(second, b),
        ],
        wrong={
            "quantities-swapped": ([restock(first, b), restock(second, a)], ""),
            "a-similar-item": ([restock(twin, a), restock(second, b)], ""),
            "forgets-one": ([restock(first, a)], ""),
            "twice": ([restock(first, a), restock(second, b), restock(second, b)], ""),
        },
    )


@generator("inventory-ship", level=2)
def inventory_ship(rng: random.Random) -> ToolCallDraft:
    """Ship the reserved orders of one customer, and cancel the open orders of another."""
    items = stock(rng, 12)
    buyer, other, third = [name for name, _ in people(rng, 3)]
    ids = iter(rng.sample(range(200, 900), 20))
    plan = [(buyer, "reserved")] * rng.randint(2, 3) + [(buyer, "open"), (buyer, "shipped"), (buyer, "cancelled")]
    plan += [(other, "open")] * 2 + [(other, "reserved"), (third, "reserved"), (third, "open")]
    rng.shuffle(plan)
    orders = [(next(ids), who, day(-k), status, _lines(rng, items)) for k, (who, status) in enumerate(plan)]
    ship = [o[0] for o in orders if o[1:4:2] == (buyer, "reserved")]
    cancel = [o[0] for o in orders if o[1:4:2] == (other, "open")]
    shipped = [call("ship_order", order=n) for n in ship]
    cancelled = [call("cancel_order", order=n) for n in cancel]
    open_one = next(o[0] for o in orders if o[1:4:2] == (buyer, "open"))
    reserved = next(o[0] for o in orders if o[1:4:2] == (other, "reserved"))
    return ToolCallDraft(
        instruction=f"Ship all reserved orders of {buyer}, and cancel the open orders of {other}. The others stay.",
        parts=_PARTS,
        start=_start(items, orders),
        calls=[
            call("list_orders", status="reserved", customer=buyer),
            call("list_orders", status="open", customer=other),
            *shipped,
            *cancelled,
        ],
        wrong={
            "forgets-one": (shipped[1:] + cancelled, ""),
            "ships-only": (shipped, ""),
            "ships-the-open-one-too": (
                [*shipped, *cancelled, call("reserve_order", order=open_one), call("ship_order", order=open_one)],
                "",
            ),
            "cancels-the-reserved-one-too": ([*shipped, *cancelled, call("cancel_order", order=reserved)], ""),
        },
    )


@generator("inventory-allocate", level=3)
def inventory_allocate(rng: random.Random) -> ToolCallDraft:
    """Give scarce stock to the oldest orders first, then reorder what runs low."""
    while True:
        items = stock(rng, 6)
        for item in items:
            item["stock"] = rng.randint(6, 16)
        names = [name for name, _ in people(rng, 6)]
        days = [day(-rng.randint(1, 9)) for _ in range(9)]
        orders = [
            (n, rng.choice(names), date, "open", _lines(rng, items, 8))
            for n, date in zip(rng.sample(range(300, 900), 9), days, strict=True)
        ]
        by_age = sorted(orders, key=lambda o: (o[2], o[0]))
        right, by_number = _allocate(items, by_age), _allocate(items, sorted(orders))
        if 2 <= len(right[1]) <= 6 and right[0] != by_number[0] and 2 <= len(right[2]) < 6:
            break
    given, refused, low = right

    def calls(given: list[int], refused: list[int], low: dict[str, int]) -> list:
        status = {**dict.fromkeys(given, "reserve_order"), **dict.fromkeys(refused, "cancel_order")}
        steps = [call(status[o[0]], order=o[0]) for o in by_age if o[0] in status]
        return [*steps, *(call("restock_item", sku=sku, quantity=n) for sku, n in low.items())]

    start = _start(items, orders)
    reorder = {item["sku"]: item["reorder_below"] for item in items}
    return ToolCallDraft(
        instruction=(
            "Go through the open orders from the oldest to the newest day, those of one day by number. Reserve each "
            "order for which enough is free at that moment, and cancel each for which it is not. When all are done, "
            "restock every item whose free quantity (stock less reserved) is then below its reorder level, so that "
            f"its free quantity is three times that level. There are {len(orders)} open orders today, the newest of "
            f"{max(days)}, and the first one by number is {min(o[0] for o in orders)}."
        ),
        parts=_PARTS,
        start=start,
        code=True,
        calls=[
            call("find_items"),
            call("list_orders", status="open"),
            *(call("get_order", order=o[0]) for o in by_age),
            *calls(given, refused, low),
        ],
        wrong={
            "by-number": (calls(*by_number), ""),
            "leaves-them-open": (calls(given, [], low), ""),
            "forgets-to-restock": (calls(given, refused, {}), ""),
            "restocks-to-the-level": (
                calls(given, refused, {sku: max(1, n - 2 * reorder[sku]) for sku, n in low.items()}),
                "",
            ),
        },
    )


def _allocate(items: list[dict], orders: list[Order]) -> tuple[list[int], list[int], dict[str, int]]:
    """Orders that are reserved, orders that are cancelled, and what is restocked: sku -> pieces."""
    free = {item["sku"]: item["stock"] for item in items}
    given, refused = [], []
    for number, _, _, _, lines in orders:
        if all(free[sku] >= quantity for sku, quantity in lines.items()):
            given.append(number)
            for sku, quantity in lines.items():
                free[sku] -= quantity
        else:
            refused.append(number)
    low = {i["sku"]: 3 * i["reorder_below"] - free[i["sku"]] for i in items if free[i["sku"]] < i["reorder_below"]}
    return given, refused, low
