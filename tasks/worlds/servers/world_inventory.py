"""A store room: items on stock, and customers' orders."""

from __future__ import annotations

import sqlite3
from typing import Annotated, Any, ClassVar, Literal

from . import _text as check
from .clawgym_tools import ToolError

__all__ = ["Inventory"]

_PAGE = 40


class Inventory:
    """An order is open, then reserved (its items are set aside), then shipped (they are gone); or cancelled."""

    TABLES: ClassVar = {
        "items": "sku TEXT PRIMARY KEY, name TEXT NOT NULL, stock INTEGER NOT NULL CHECK (stock >= 0), "
        "reserved INTEGER NOT NULL CHECK (reserved >= 0), reorder_below INTEGER NOT NULL, "
        "price_cents INTEGER NOT NULL CHECK (price_cents > 0), CHECK (reserved <= stock)",
        "orders": "id INTEGER PRIMARY KEY, customer TEXT NOT NULL, day TEXT NOT NULL, "
        "status TEXT NOT NULL CHECK (status IN ('open', 'reserved', 'shipped', 'cancelled'))",
        "order_lines": "order_id INTEGER NOT NULL REFERENCES orders, sku TEXT NOT NULL REFERENCES items, "
        "quantity INTEGER NOT NULL CHECK (quantity > 0), PRIMARY KEY (order_id, sku)",
    }
    TOOLS = (
        *("find_items", "get_item", "list_orders", "get_order"),
        *("reserve_order", "ship_order", "cancel_order", "restock_item"),
    )

    def __init__(self, db: sqlite3.Connection, today: str) -> None:
        self._db = db

    def find_items(
        self, words: Annotated[str, "part of the name, in any case; leave out for all"] = "", offset: int = 0
    ) -> dict:
        """Items with stock, how much of it is reserved, and the level below which it is to be ordered; 40 at a time."""
        return self._page(
            "items", "sku, name, stock, reserved, reorder_below, price_cents", "instr(lower(name), lower(?))",
            (words,) if words else ("",), "sku", offset,
        )  # fmt: skip

    def get_item(self, sku: str) -> dict:
        """One item."""
        return self._item(sku)

    def list_orders(
        self,
        status: Literal["open", "reserved", "shipped", "cancelled"],
        customer: Annotated[str, "the whole name; leave out for all"] = "",
        offset: int = 0,
    ) -> dict:
        """Orders of a status, oldest first; at most 40 at a time."""
        where, values = ("status = ? AND customer = ?", (status, customer)) if customer else ("status = ?", (status,))
        return self._page("orders", "id, customer, day, status", where, values, "day, id", offset)

    def get_order(self, order: Annotated[int, "its id"]) -> dict:
        """One order with its lines."""
        return {**self._order(order), "lines": self._lines(order)}

    def reserve_order(self, order: Annotated[int, "its id"]) -> dict:
        """Set aside the items of an open order; all of them or none."""
        self._in(order, ("open",), "reserved")
        for line in self._lines(order):
            item = self._item(line["sku"])
            free = item["stock"] - item["reserved"]
            if free < line["quantity"]:
                raise ToolError(
                    f"order {order} needs {line['quantity']} of {line['sku']}, and {free} are free: nothing is "
                    "reserved; restock the item, or leave the order open"
                )
            self._change(line["sku"], reserved=line["quantity"])
        return self._set(order, "reserved")

    def ship_order(self, order: Annotated[int, "its id"]) -> dict:
        """Send out a reserved order."""
        self._in(order, ("reserved",), "shipped")
        for line in self._lines(order):
            self._change(line["sku"], stock=-line["quantity"], reserved=-line["quantity"])
        return self._set(order, "shipped")

    def cancel_order(self, order: Annotated[int, "its id"]) -> dict:
        """Cancel an open or reserved order; what was set aside is free again."""
        if self._in(order, ("open", "reserved"), "cancelled") == "reserved":
            for line in self._lines(order):
                self._change(line["sku"], reserved=-line["quantity"])
        return self._set(order, "cancelled")

    def restock_item(self, sku: str, quantity: Annotated[int, "pieces that came in"]) -> dict:
        """Add to an item's stock."""
        self._item(sku)
        self._change(sku, stock=check.amount(quantity, "quantity", 100_000))
        return self._item(sku)

    def _page(self, table: str, columns: str, where: str, values: tuple, by: str, offset: int) -> dict:
        if offset < 0:
            raise ToolError("offset must not be negative: call it again")
        rows = self._db.execute(
            f"SELECT {columns} FROM {table} WHERE {where} ORDER BY {by} LIMIT {_PAGE} OFFSET ?", (*values, offset)
        ).fetchall()
        (number,) = self._db.execute(f"SELECT count(*) FROM {table} WHERE {where}", values).fetchone()
        found = [dict(zip(columns.split(", "), row)) for row in rows]
        return {table: found, "more": max(0, number - offset - len(rows))}

    def _item(self, sku: str) -> dict[str, Any]:
        columns = "sku, name, stock, reserved, reorder_below, price_cents"
        row = self._db.execute(f"SELECT {columns} FROM items WHERE sku = ?", (sku,)).fetchone()
        if row is None:
            raise ToolError(f"there is no item {sku[:40]!r}: find its sku with find_items")
        return dict(zip(columns.split(", "), row))

    def _order(self, order: int) -> dict[str, Any]:
        row = self._db.execute("SELECT id, customer, day, status FROM orders WHERE id = ?", (order,)).fetchone()
        if row is None:
            raise ToolError(f"there is no order {order}: see list_orders")
        return dict(zip(("id", "customer", "day", "status"), row))

    def _lines(self, order: int) -> list[dict]:
        rows = self._db.execute("SELECT sku, quantity FROM order_lines WHERE order_id = ? ORDER BY sku", (order,))
        return [{"sku": sku, "quantity": quantity} for sku, quantity in rows]

    def _in(self, order: int, before: tuple, after: str) -> str:
        status = self._order(order)["status"]
        if status not in before:
            raise ToolError(f"order {order} is {status}, and only {' or '.join(before)} orders can be {after}")
        return status

    def _change(self, sku: str, *, stock: int = 0, reserved: int = 0) -> None:
        self._db.execute(
            "UPDATE items SET stock = stock + ?, reserved = reserved + ? WHERE sku = ?", (stock, reserved, sku)
        )

    def _set(self, order: int, status: str) -> dict:
        self._db.execute("UPDATE orders SET status = ? WHERE id = ?", (status, order))
        return self._order(order)
