"""A table of orders: sorted, filtered, page by page; cells are edited, rows deleted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple
from urllib.parse import urlencode

from ._fields import Fields
from ._page import Again, App, e, hidden, option_list, page

__all__ = ["STATUSES", "Table"]

STATUSES = ("New", "Paid", "Shipped", "Cancelled")
_COLUMNS = {
    "id": "No.",
    "customer": "Customer",
    "city": "City",
    "item": "Item",
    "quantity": "Quantity",
    "day": "Day",
    "status": "Status",
}
_EDITABLE = ("city", "quantity", "status")
_PAGE = 10


class _View(NamedTuple):
    """What of the table is shown."""

    words: str = ""
    status: str = ""
    sort: str = "id"
    down: int = 0
    page: int = 1

    def address(self, **other: object) -> str:
        """The address of this view but for ``other``."""
        values = {**self._asdict(), **other}
        kept = {name: value for name, value in values.items() if value != self._field_defaults.get(name)}
        return f"/?{urlencode(kept)}" if kept else "/"


class Table(App):
    """One table, ``orders``, filled by the start. Numbers, customers, items and days cannot be changed."""

    TABLES: ClassVar = {
        "orders": "id INTEGER PRIMARY KEY, customer TEXT NOT NULL, city TEXT NOT NULL, item TEXT NOT NULL, "
        "quantity INTEGER NOT NULL CHECK (quantity BETWEEN 1 AND 999), day TEXT NOT NULL, status TEXT NOT NULL",
    }
    PAGES: ClassVar = {"/": "table", "/delete": "ask"}
    ACTIONS: ClassVar = {"/save": "save", "/delete": "delete"}

    def _page(self, title: str, body: str, notice: str = "") -> str:
        nav = [("nav-orders", "/", "Orders")]
        return page(title, body, brand="Order desk", nav=nav, here="nav-orders", notice=notice)

    @staticmethod
    def _view(fields: Fields) -> _View:
        """What the fields ask to see; a field that is not there is as in an empty view."""
        return _View(
            fields.text("words", 60) if fields.has("words") else "",
            fields.choice("status", ("", *STATUSES)) if fields.has("status") else "",
            fields.choice("sort", _COLUMNS) if fields.has("sort") else "id",
            fields.number("down", 0, 1) if fields.has("down") else 0,
            fields.number("page", 1, 1000) if fields.has("page") else 1,
        )

    # -- pages

    def table(self, query: Fields) -> str:
        """A part of the table, perhaps with one cell to be edited."""
        notice = self.note(query, {"saved": "The order was saved.", "deleted": "The order was deleted."})
        cell: tuple[int, str] | None = None
        if query.has("edit"):
            cell = (query.number("edit"), query.choice("field", _EDITABLE))
        return self._shown(self._view(query), cell, notice)

    def _shown(self, view: _View, cell: tuple[int, str] | None, notice: str = "", wrong: str = "") -> str:
        where, values = "1", []
        if view.words:
            where = "instr(lower(id || char(10) || customer || char(10) || city || char(10) || item), lower(?))"
            values.append(view.words)
        if view.status:
            where += " AND status = ?"
            values.append(view.status)
        ((number,),) = self.rows(f"SELECT count(*) FROM orders WHERE {where}", *values)
        pages = max(1, -(-number // _PAGE))
        view = view._replace(page=min(view.page, pages))
        found = self.rows(
            f"SELECT * FROM orders WHERE {where} ORDER BY {view.sort} {'DESC' if view.down else 'ASC'}, id "
            f"LIMIT {_PAGE} OFFSET ?",
            *values,
            (view.page - 1) * _PAGE,
        )
        head = "".join(self._head(view, name, text) for name, text in _COLUMNS.items())
        rows = "".join(self._row(view, row, cell) for row in found)
        rows = rows or '<tr><td colspan="8" class="quiet" id="none">No orders match.</td></tr>'
        told = f'<p class="problem" id="problem">{e(wrong)}</p>' if wrong else ""
        before, after = view.page > 1, view.page < pages
        body = (
            f'<h1>Orders</h1>{told}<form class="row filters" method="get" action="/" autocomplete="off">'
            f'<input type="text" id="words" name="words" value="{e(view.words)}" aria-label="Search">'
            f'<select id="status" name="status" aria-label="Status">'
            f"{option_list({'': 'Any status', **{s: s for s in STATUSES}}, view.status)}</select>"
            f"{hidden(sort=view.sort, down=view.down)}"
            '<button id="apply">Filter</button><a class="button" id="clear" href="/">Clear</a></form>'
            f"<table><tr>{head}<th></th></tr>{rows}</table>"
            '<div class="row between pager"><div class="row">'
            f'<a class="button{"" if before else " off"}" id="previous" href="{e(view.address(page=view.page - 1))}">'
            "Previous</a>"
            f'<a class="button{"" if after else " off"}" id="next" href="{e(view.address(page=view.page + 1))}">'
            f'Next</a></div><span class="quiet" id="count">{number} orders, page {view.page} of {pages}</span></div>'
        )
        return self._page("Orders", body, notice)

    @staticmethod
    def _head(view: _View, name: str, text: str) -> str:
        sorted_by = view.sort == name
        arrow = (" &#9660;" if view.down else " &#9650;") if sorted_by else ""
        to = view.address(sort=name, down=0 if view.down or not sorted_by else 1, page=1)
        kind = ' class="number"' if name == "quantity" else ""
        return f'<th{kind}><a id="sort-{name}" href="{e(to)}">{text}{arrow}</a></th>'

    def _row(self, view: _View, row: Mapping[str, Any], cell: tuple[int, str] | None) -> str:
        cells = []
        for name in _COLUMNS:
            kind = ' class="number"' if name == "quantity" else ""
            if cell == (row["id"], name):
                cells.append(f"<td{kind}>{self._editor(view, row, name)}</td>")
            elif name in _EDITABLE:
                to = view.address(edit=row["id"], field=name)
                link = f'<a class="cell" id="{name}-{row["id"]}" href="{e(to)}">{e(row[name])}</a>'
                cells.append(f"<td{kind}>{link}</td>")
            else:
                cells.append(f"<td{kind}>{e(row[name])}</td>")
        to = f"/delete?{urlencode({'id': row['id'], **view._asdict()})}"
        return f'<tr>{"".join(cells)}<td><a id="delete-{row["id"]}" href="{e(to)}">Delete</a></td></tr>'

    @staticmethod
    def _editor(view: _View, row: Mapping[str, Any], name: str) -> str:
        if name == "status":
            control = f'<select id="value" name="value">{option_list({s: s for s in STATUSES}, row[name])}</select>'
        else:
            size = 4 if name == "quantity" else 10
            control = f'<input type="text" id="value" name="value" size="{size}" value="{e(row[name])}" autofocus>'
        seen = {f"view_{key}": value for key, value in view._asdict().items()}
        return (
            f'<form class="row" method="post" action="/save" autocomplete="off">{hidden(id=row["id"], field=name)}'
            f'{hidden(**seen)}{control}<button class="main" id="save">Save</button>'
            f'<a class="button" id="cancel" href="{e(view.address())}">Cancel</a></form>'
        )

    def ask(self, query: Fields) -> str:
        """Whether a row is really to go."""
        row = self.row("order", "SELECT * FROM orders WHERE id = ?", query.number("id"))
        view = self._view(query)
        seen = {f"view_{key}": value for key, value in view._asdict().items()}
        body = (
            f'<h1>Delete order {row["id"]}?</h1><div class="panel"><p>{row["quantity"]} x {e(row["item"])} for '
            f"{e(row['customer'])} in {e(row['city'])}, {e(row['day'])}, {e(row['status'])}.</p>"
            f'<form method="post" action="/delete">{hidden(id=row["id"], **seen)}<div class="buttons">'
            '<button class="danger" id="confirm">Delete</button>'
            f'<a class="button" id="keep" href="{e(view.address())}">Keep</a></div></form></div>'
        )
        return self._page("Delete an order", body)

    # -- what they do

    @staticmethod
    def _seen(fields: Fields) -> _View:
        return _View(
            fields.text("view_words", 60),
            fields.choice("view_status", ("", *STATUSES)),
            fields.choice("view_sort", _COLUMNS),
            fields.number("view_down", 0, 1),
            fields.number("view_page", 1, 1000),
        )

    def save(self, fields: Fields) -> str:
        """Change one cell."""
        view = self._seen(fields)
        row = self.row("order", "SELECT id FROM orders WHERE id = ?", fields.number("id"))
        name = fields.choice("field", _EDITABLE)
        value: object
        if name == "status":
            value = fields.choice("value", STATUSES)
        else:
            value = text = fields.text("value", 60)
            if name == "quantity":
                if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 999):
                    raise Again(self._shown(view, (row["id"], name), wrong="A quantity is a number from 1 to 999."))
                value = int(text)
            elif not text:
                raise Again(self._shown(view, (row["id"], name), wrong="A city is needed."))
        self.change(f"UPDATE orders SET {name} = ? WHERE id = ?", value, row["id"])
        return view.address(note="saved")

    def delete(self, fields: Fields) -> str:
        """Delete one row."""
        view = self._seen(fields)
        row = self.row("order", "SELECT id FROM orders WHERE id = ?", fields.number("id"))
        self.change("DELETE FROM orders WHERE id = ?", row["id"])
        return view.address(note="deleted")
