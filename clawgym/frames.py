"""The look of results in notebooks, and results as pandas data frames.

Invariants: a notebook shows at most :data:`MOST_ROWS` rows, however many there are, and a part of each text. Texts are
data, never markup: they are escaped, and mathematics in them is not typeset. Nothing has a colour of its own, so that
light and dark notebooks show it alike. pandas is imported when a frame is made.
"""

from __future__ import annotations

import html
import itertools
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clawgym.errors import MissingDependency
from clawgym.visible import visible

if TYPE_CHECKING:
    import pandas

__all__ = ["MOST_ROWS", "Preview", "Table", "Tabular", "frame"]

MOST_ROWS = 20
"""Most rows, and most lines of text above them, that a notebook shows."""
_COLUMNS, _CELL, _LINE = 16, 160, 400
"""Most columns, characters of a cell, and characters of a line."""
_STYLE = "vertical-align: top; text-align: "


@dataclass(frozen=True)
class Table:
    """Named columns, and rows with a value for each."""

    columns: Sequence[str]
    rows: Iterable[Sequence[Any]]

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> Table:
        """The table of some records; a field that a record lacks is None."""
        return cls(columns, ([row.get(name) for name in columns] for row in rows))


@dataclass(frozen=True)
class Preview:
    """What a notebook shows of a result."""

    title: str
    lines: Sequence[str] = ()
    table: Table | None = None
    count: int = 0
    """How many rows there are in all."""


class Tabular:
    """A result that has tables: notebooks show the first rows, and :meth:`to_pandas` makes frames of all rows."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._repr_pretty_ = Tabular._repr_pretty_  # IPython prefers the __repr__ of a class to what it inherits

    def _tables(self) -> Mapping[str, Callable[[], Table]]:
        """Name -> what makes the table. The first is the one that :meth:`to_pandas` makes by default."""
        raise NotImplementedError

    def _preview(self) -> Preview:
        raise NotImplementedError

    def to_pandas(self, table: str | None = None) -> pandas.DataFrame:
        """A table of this result as a data frame; ``polars.from_pandas`` makes one of Polars.

        ``table``: a name of ``docs/how-to/notebooks.md``; by default the main table. Raises ValueError for a table that
        this result does not have, and :class:`~clawgym.errors.MissingDependency` without pandas.
        """
        tables = self._tables()
        name = next(iter(tables)) if table is None else table
        if name not in tables:
            raise ValueError(f"there is no table {name!r}: choose {' or '.join(map(repr, tables))}")
        return frame(tables[name]())

    def _repr_html_(self) -> str:
        return _html(self._preview())

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What IPython shows where it shows no HTML, and stores beside it."""
        shown = self._preview()
        printer.text("\n".join(_short(line, _LINE) for line in (shown.title, *shown.lines[:MOST_ROWS])))


def frame(table: Table) -> pandas.DataFrame:
    """A data frame of all rows. Raises :class:`~clawgym.errors.MissingDependency` without pandas."""
    try:
        import pandas
    except ImportError as error:
        raise MissingDependency(f"data frames need pandas ({error}): pip install 'clawgym[notebook]'") from error
    return pandas.DataFrame([tuple(row) for row in table.rows], columns=list(table.columns))


def _html(shown: Preview) -> str:
    parts = [f"<div><strong>{_text(shown.title, _LINE)}</strong></div>"]
    parts += [f"<div>{_text(line, _LINE)}</div>" for line in shown.lines[:MOST_ROWS]]
    if shown.table is not None:
        columns = list(shown.table.columns)[:_COLUMNS]
        rows = [list(row)[:_COLUMNS] for row in itertools.islice(shown.table.rows, MOST_ROWS)]
        right = [bool(rows) and all(row[n] is None or _is_number(row[n]) for row in rows) for n in range(len(columns))]
        style = [_STYLE + ("right" if it else "left") for it in right]
        head = "".join(f'<th style="{style[n]}">{_text(name, _CELL)}</th>' for n, name in enumerate(columns))
        parts.append(f"<table><thead><tr>{head}</tr></thead><tbody>")
        for row in rows:
            cells = (f'<td style="{style[n]}">{_text(_plain(value), _CELL)}</td>' for n, value in enumerate(row))
            parts.append(f"<tr>{''.join(cells)}</tr>")
        parts.append("</tbody></table>")
        if shown.count > len(rows):
            parts.append(f"<div>{len(rows)} of {shown.count:,} rows; to_pandas() has all</div>")
    # The classes keep MathJax away, as those of pandas do.
    return f'<div class="clawgym tex2jax_ignore mathjax_ignore">{"".join(parts)}</div>'


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _plain(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else str(value)


def _short(text: str, most: int) -> str:
    """The beginning of ``text`` on one line, without control characters."""
    shown = visible(" ".join(text[: most + 1].split()))
    return shown if len(text) <= most and len(shown) <= most else f"{shown[: most - 1]}…"


def _text(text: str, most: int) -> str:
    return html.escape(_short(text, most))
