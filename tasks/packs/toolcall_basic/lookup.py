"""Family ``lookup``: questions whose answer needs several parts of the world. Nothing may be changed."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

from clawgym.tasks.packs.seeded import Generator
from clawgym.tasks.packs.seeded import generator as _generator

from ._build import TODAY, ToolCallDraft, call
from ._start import ME, Office, day, ledger, mailbox, people, stock
from .inventory import _lines
from .inventory import _start as _stock_start

LOOKUP: dict[str, Generator[ToolCallDraft]] = {}
generator = partial(_generator, family="lookup", into=LOOKUP)

_END = "Change nothing. End with a line `Answer: ...` that holds the number and nothing else."


def _orders(rng: random.Random, items: list[dict], names: list[str], number: int) -> list:
    states = ("open", "reserved", "shipped", "shipped", "cancelled")
    ids = sorted(rng.sample(range(2_000, 9_000), number))
    return [(n, rng.choice(names), day(-rng.randint(1, 30)), rng.choice(states), _lines(rng, items)) for n in ids]


@generator("lookup-customer", level=1)
def lookup_customer(rng: random.Random) -> ToolCallDraft:
    """Find the account of the customer of an order."""
    group = people(rng, 6)
    names = [name for name, _ in group]
    accounts = ledger(rng, group)
    items = stock(rng, 8)
    orders = _orders(rng, items, names, 12)
    number, customer, *_ = orders[rng.randrange(len(orders))]
    balance = {(row[1], row[2]): row[3] for row in accounts}
    right = balance[customer, "savings"]
    other = next(name for name in names if name != customer)
    look = [call("get_order", order=number), call("list_accounts", owner=customer)]
    savings = next(row[0] for row in accounts if row[1:3] == [customer, "savings"])
    return ToolCallDraft(
        instruction=(
            f"What is the balance, in cents, of the savings account of the customer who made the order {number}? {_END}"
        ),
        parts=("bank", "inventory"),
        start={"accounts": accounts, "bookings": [], **_stock_start(items, orders)},
        calls=look,
        answer=str(right),
        kind="number",
        wrong={
            "the-other-account": (look, str(balance[customer, "checking"])),
            "somebody-else": (look, str(balance[other, "savings"])),
            "right-but-changes-something": (
                [*look, call("deposit", target=savings, cents=1, memo="hello")],
                str(right),
            ),
            "answers-without-acting": ([], str(number)),
        },
    )


@generator("lookup-item", level=2)
def lookup_item(rng: random.Random) -> ToolCallDraft:
    """Find an item by way of an event, a person, a mail and an order."""
    group = people(rng, 7)
    office = Office(rng, [("Me", ME), *group])
    for k in range(12):
        office.anything(1 + k % 7)
    sender = group[3][1]
    title = office.title()
    event = office.anything(rng.randint(1, 7), organizer=sender, title=title)
    items = stock(rng, 9)
    for item in items:
        item["stock"] += rng.randint(60, 900)
    orders = _orders(rng, items, [name for name, _ in group], 14)
    held = [(n, c, d, "reserved", {items[k]["sku"]: 3 + k}) for k, (n, c, d, _, _) in enumerate(orders[:3])]
    orders[:3] = held
    mails = [
        (sender, "archive", 8, "An order", f"I looked at order {held[0][0]}; all is well."),
        (sender, "inbox", 2, "An order", f"Could you look at order {held[1][0]}, please?"),
        (group[4][1], "inbox", 1, "An order", f"Could you look at order {held[2][0]}, please?"),
    ]
    box = mailbox(rng, [person for person in group if person[1] != sender], mails)
    start = {**_stock_start(items, orders), **office.start()}
    start |= {table: rows for table, rows in box.items() if table not in ("numbers", "contacts")}
    start["contacts"] = sorted([address, who] for who, address in group)
    free = {item["sku"]: item["stock"] - item["reserved"] for item in items}
    (sku,) = held[1][4]
    right = free[sku]
    others = {
        "counts-reserved-pieces-too": right + next(i["reserved"] for i in items if i["sku"] == sku),
        "the-older-mail": free[items[0]["sku"]],
        "another-persons-mail": free[items[2]["sku"]],
    }
    look = [
        call("search_events", words=title),
        call("get_event", event=event),
        call("search_mails", words=sender),
        call("read_mail", mail=box["numbers"][1]),
        call("get_order", order=held[1][0]),
        call("get_item", sku=sku),
    ]
    wrong: dict[str, Any] = {what: (look, str(value)) for what, value in others.items() if value != right}
    return ToolCallDraft(
        instruction=(
            f"Whoever organizes the event {title} asks me in a mail to look at an order (one in my inbox, and it is "
            f"{TODAY}). How many pieces of the item in that order are free on stock, that is not reserved? {_END}"
        ),
        parts=("calendar", "inventory", "mail"),
        start=start,
        calls=look,
        answer=str(right),
        kind="number",
        wrong={
            **wrong,
            "right-but-answers-the-mail": (
                [*look, call("reply_mail", mail=box["numbers"][1], body="Yes.")],
                str(right),
            ),
            "answers-without-acting": ([], "0"),
        },
    )


@generator("lookup-customers", level=3)
def lookup_customers(rng: random.Random) -> ToolCallDraft:
    """Collect figures from all orders of an item and from accounts, and calculate with them."""
    group = people(rng, 9)
    names = [name for name, _ in group]
    accounts = ledger(rng, group)
    items = stock(rng, 10)
    balance = {(row[1], row[2]): row[3] for row in accounts}
    while True:
        orders = _orders(rng, items, names, 30)
        item, twin = items[0], items[1]
        buyers = {o[1] for o in orders if item["sku"] in o[4] and o[3] == "shipped"}
        any_state = {o[1] for o in orders if item["sku"] in o[4]}
        twins = {o[1] for o in orders if twin["sku"] in o[4] and o[3] == "shipped"}
        if 2 <= len(buyers) < len(any_state) < 9 and twins and twins != buyers:
            break

    def total(some: set[str], kind: str = "checking") -> int:
        return sum(balance[name, kind] for name in some)

    shipped = [o[0] for o in orders if o[3] == "shipped"]
    several = sum(balance[o[1], "checking"] for o in orders if item["sku"] in o[4] and o[3] == "shipped")
    amounts = [balance[name, "checking"] for name in sorted(buyers)]
    look = [
        call("find_items", words=item["name"]),
        call("list_orders", status="shipped"),
        *(call("get_order", order=n) for n in shipped),
        call("list_accounts"),
        call("code_interpreter", code=f"sum({amounts})"),
    ]
    wrong = {
        "orders-of-any-state": (look, str(total(any_state))),
        "a-similar-item": (look, str(total(twins))),
        "savings": (look, str(total(buyers, "savings"))),
        "right-but-changes-something": ([*look, call("restock_item", sku=item["sku"], quantity=1)], str(total(buyers))),
    }
    if several != total(buyers):
        wrong["counts-customers-twice"] = (look, str(several))
    return ToolCallDraft(
        instruction=(
            f"Take every customer with at least one shipped order in which there is some {item['name']}. What do the "
            f"balances of their checking accounts add up to, in cents? Count each customer once. (It is {TODAY}; the "
            f"store has {len(orders)} orders, from {orders[0][0]} to {orders[-1][0]}.) {_END}"
        ),
        parts=("bank", "inventory"),
        start={"accounts": accounts, "bookings": [], **_stock_start(items, orders)},
        code=True,
        calls=look,
        answer=str(total(buyers)),
        kind="number",
        wrong=wrong,
    )
