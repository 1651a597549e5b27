"""Pages as text, and what every app has."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any, ClassVar

from ._fields import Fields, Refused

__all__ = ["Again", "App", "e", "hidden", "option_list", "page"]


def e(value: object) -> str:
    """Text for HTML, inside of quotes too."""
    return escape(str(value), quote=True)


def page(
    title: str,
    body: str,
    *,
    brand: str,
    nav: Iterable[tuple[str, str, str]] = (),
    here: str = "",
    scripts: Iterable[str] = (),
    notice: str = "",
) -> str:
    """A whole page. ``nav`` has (id, address, text) of each link; ``here`` is the id of the one for this page."""
    links = "".join(
        f'<a id="{e(i)}" href="{e(to)}"{" class=here" if i == here else ""}>{e(text)}</a>' for i, to, text in nav
    )
    told = f'<p class="notice" id="notice" role="status">{e(notice)}</p>' if notice else ""
    loaded = "".join(f'<script src="{e(script)}" defer></script>' for script in scripts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<title>{e(title)} - {e(brand)}</title><link rel="stylesheet" href="/style.css">{loaded}</head><body>'
        f'<header><span class="brand">{e(brand)}</span><nav>{links}</nav></header>'
        f"<main>{told}{body}</main></body></html>"
    )


def hidden(**fields: object) -> str:
    """Hidden fields of a form."""
    return "".join(f'<input type="hidden" name="{e(name)}" value="{e(value)}">' for name, value in fields.items())


def option_list(options: Mapping[str, str], chosen: str) -> str:
    """The options of a select: value -> what is shown."""
    return "".join(
        f'<option value="{e(value)}"{" selected" if value == chosen else ""}>{e(text)}</option>'
        for value, text in options.items()
    )


class Again(Exception):
    """What was filled in is not right: the same page again, which says so."""

    def __init__(self, html: str) -> None:
        super().__init__("the form is shown again")
        self.html = html


class App:
    """An app over one database. ``start`` is what it began as, and what of it never changes."""

    TABLES: ClassVar[Mapping[str, str]] = {}
    """Table -> its columns, in SQL."""
    PART_OF: ClassVar[Mapping[str, list[str]]] = {}
    """Table whose rows belong to another's -> [column, table]."""
    PAGES: ClassVar[Mapping[str, str]] = {}
    """Path -> method that makes the page of it from its query."""
    ACTIONS: ClassVar[Mapping[str, str]] = {}
    """Path -> method that carries out a form, and returns the address to go on to. It runs in one transaction."""

    def __init__(self, db: sqlite3.Connection, start: Mapping[str, Any]) -> None:
        self.db, self.start = db, start
        self.today = str(start["today"])

    def rows(self, sql: str, *values: object) -> list[Any]:
        """What a query finds."""
        return self.db.execute(sql, values).fetchall()

    def row(self, what: str, sql: str, *values: object) -> Any:
        """The one row that a query finds, or :class:`Refused`: there is no such ``what``."""
        found = self.db.execute(sql, values).fetchone()
        if found is None:
            raise Refused(f"There is no such {what}.", 404)
        return found

    def change(self, sql: str, *values: object) -> int:
        """Carry out a statement; the number of the row that it made."""
        return self.db.execute(sql, values).lastrowid or 0

    @staticmethod
    def note(query: Fields, notes: Mapping[str, str]) -> str:
        """What a page tells about the form before it, by its field ``note``."""
        return notes[query.choice("note", notes)] if query.has("note") else ""
