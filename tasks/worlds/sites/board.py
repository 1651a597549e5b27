"""A board: cards in columns, dragged from place to place."""

from __future__ import annotations

from typing import ClassVar

from ._fields import Fields, Refused
from ._page import App, e, hidden, page

__all__ = ["Board"]


class Board(App):
    """``title`` and ``columns`` (id -> title) of the start. ``place`` counts from 1 in each column."""

    TABLES: ClassVar = {
        "cards": "id INTEGER PRIMARY KEY, stack TEXT NOT NULL, place INTEGER NOT NULL, title TEXT NOT NULL, "
        "owner TEXT NOT NULL, due TEXT NOT NULL",
    }
    PAGES: ClassVar = {"/": "board"}
    ACTIONS: ClassVar = {"/move": "move"}

    # -- pages

    def board(self, query: Fields) -> str:
        """All cards."""
        del query
        columns = "".join(self._column(name, title) for name, title in self.start["columns"].items())
        body = (
            f'<h1>{e(self.start["title"])}</h1><div class="board" id="board">{columns}</div>'
            f'<form id="moving" method="post" action="/move">{hidden(card="", column="", before="")}</form>'
        )
        nav = [("nav-board", "/", "Board")]
        loaded = ["/board.js"]
        return page("Board", body, brand="Planning", nav=nav, here="nav-board", scripts=loaded)

    def _column(self, name: str, title: str) -> str:
        rows = self.rows("SELECT * FROM cards WHERE stack = ? ORDER BY place", name)
        cards = "".join(
            f'<div class="card" id="card-{row["id"]}" data-card="{row["id"]}"><b>{e(row["title"])}</b>'
            f'<span class="quiet small">{e(row["owner"])}, due {e(row["due"])}</span></div>'
            for row in rows
        )
        return (
            f'<section id="column-{e(name)}" data-column="{e(name)}"><h2>{e(title)} <span class="quiet">{len(rows)}'
            f'</span></h2>{cards}<div class="end quiet small" id="end-{e(name)}">last</div></section>'
        )

    # -- what they do

    def move(self, fields: Fields) -> str:
        """Put a card into a column, right above the card ``before``, or at its end."""
        card = self.row("card", "SELECT id, stack FROM cards WHERE id = ?", fields.number("card"))
        column = fields.choice("column", self.start["columns"])
        before = fields.maybe("before")
        order = [row["id"] for row in self.rows("SELECT id FROM cards WHERE stack = ? ORDER BY place", column)]
        if before is not None and before not in order:
            raise Refused("The card below is not in this column.")
        if before != card["id"]:
            order = [number for number in order if number != card["id"]]
            order.insert(len(order) if before is None else order.index(before), card["id"])
            self.change("UPDATE cards SET stack = ? WHERE id = ?", column, card["id"])
            self._number(order)
        if card["stack"] != column:
            self._number(
                [row["id"] for row in self.rows("SELECT id FROM cards WHERE stack = ? ORDER BY place", card["stack"])]
            )
        return "/"

    def _number(self, order: list[int]) -> None:
        for place, number in enumerate(order, 1):
            self.change("UPDATE cards SET place = ? WHERE id = ?", place, number)
