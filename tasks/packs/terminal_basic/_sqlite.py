"""Writes SQLite database files whose bytes do not depend on the SQLite library. Tables only, without deletions.

Format: https://www.sqlite.org/fileformat2.html
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["Table", "database"]

Value = int | str | None
Table = tuple[str, Sequence[tuple[int, Sequence[Value]]]]
"""The CREATE TABLE statement, and (rowid, column values) in the order of the rowids. The value of the primary key is
None."""


def database(tables: Mapping[str, Table], page_size: int = 1024) -> tuple[bytes, dict[str, int]]:
    """Return the content of the file, and by table the number of its root page.

    Raises :class:`ValueError` if a table has too many rows for ``page_size`` (in bytes).
    """
    pages: list[bytes] = [b""]
    roots = {name: _btree(pages, rows, page_size) for name, (_, rows) in tables.items()}
    schema = [
        (number, ("table", name, name, roots[name], sql)) for number, (name, (sql, _)) in enumerate(tables.items(), 1)
    ]
    cells = [_cell(pages, rowid, values, page_size) for rowid, values in schema]
    first = _page(13, cells, page_size, skip=100)
    header = (
        b"SQLite format 3\0"
        + page_size.to_bytes(2, "big")
        + bytes([1, 1, 0, 64, 32, 32])
        + b"".join(n.to_bytes(4, "big") for n in (1, len(pages), 0, 0, 1, 4, 0, 0, 1, 0, 0))
        + bytes(24)
        + b"".join(n.to_bytes(4, "big") for n in (1, 3_040_001))
    )
    pages[0] = header.ljust(100, b"\0") + first[100:]
    return b"".join(pages), roots


def _varint(value: int) -> bytes:
    out = [value & 127]
    while value := value >> 7:
        out.append(value & 127 | 128)
    return bytes(reversed(out))


def _record(values: Sequence[Value]) -> bytes:
    kinds, body = b"", b""
    for value in values:
        if value is None:
            kinds += b"\0"
        elif isinstance(value, str):
            data = value.encode()
            kinds, body = kinds + _varint(13 + 2 * len(data)), body + data
        elif value in (0, 1):
            kinds += bytes([8 + value])
        else:
            kind, size = next(
                (k, s) for k, s in enumerate((1, 2, 3, 4, 6, 8), 1) if -(1 << 8 * s - 1) <= value < 1 << 8 * s - 1
            )
            kinds, body = kinds + bytes([kind]), body + value.to_bytes(size, "big", signed=True)
    return _varint(len(kinds) + 1) + kinds + body


def _cell(pages: list[bytes], rowid: int, values: Sequence[Value], page_size: int) -> bytes:
    """One table leaf cell. The end of a long payload goes to a chain of overflow pages."""
    payload = _record(values)
    head = _varint(len(payload)) + _varint(rowid)
    most, least = page_size - 35, (page_size - 12) * 32 // 255 - 23
    if len(payload) <= most:
        return head + payload
    local = least + (len(payload) - least) % (page_size - 4)
    local = local if local <= most else least
    rest = [payload[i : i + page_size - 4] for i in range(local, len(payload), page_size - 4)]
    first = len(pages) + 1
    for k, piece in enumerate(rest, 1):
        following = first + k if k < len(rest) else 0
        pages.append((following.to_bytes(4, "big") + piece).ljust(page_size, b"\0"))
    return head + payload[:local] + first.to_bytes(4, "big")


def _page(kind: int, cells: Sequence[bytes], page_size: int, right: int = 0, skip: int = 0) -> bytes:
    end, pointers, body = page_size, b"", b""
    for cell in cells:
        end -= len(cell)
        pointers, body = pointers + end.to_bytes(2, "big"), cell + body
    head = bytes([kind, 0, 0]) + len(cells).to_bytes(2, "big") + end.to_bytes(2, "big") + b"\0"
    head = bytes(skip) + head + (right.to_bytes(4, "big") if kind == 5 else b"") + pointers
    if len(head) > end:
        raise ValueError("too many cells for one page: take a larger page size")
    return head + bytes(end - len(head)) + body


def _btree(pages: list[bytes], rows: Sequence[tuple[int, Sequence[Value]]], page_size: int) -> int:
    leaves: list[list[tuple[int, bytes]]] = [[]]
    room = page_size - 8
    for rowid, values in rows:
        cell = _cell(pages, rowid, values, page_size)
        if len(cell) + 2 > room:
            leaves.append([])
            room = page_size - 8
        leaves[-1].append((rowid, cell))
        room -= len(cell) + 2
    numbers = []
    for leaf in leaves:
        pages.append(_page(13, [cell for _, cell in leaf], page_size))
        numbers.append(len(pages))
    if len(numbers) == 1:
        return numbers[0]
    cells = [n.to_bytes(4, "big") + _varint(leaf[-1][0]) for n, leaf in zip(numbers, leaves, strict=True)]
    pages.append(_page(5, cells[:-1], page_size, right=numbers[-1]))
    return len(pages)
