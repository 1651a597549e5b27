"""Parse server-sent events incrementally.

Source: WHATWG HTML, "Server-sent events", section "Interpreting an event stream". Invariant: the events depend only on
the bytes, not on how they were split into pieces.
"""

from __future__ import annotations

from clawgym.bounds import LARGEST_EVENT, OutOfBounds

__all__ = ["EventReader"]

_LEAST = 64
"""Least bytes that a line counts for: the size of a Python object."""


class EventReader:
    """Extracts the ``data`` of events. Comments, ids and event names are ignored."""

    def __init__(self) -> None:
        self._rest = bytearray()
        """The beginning of an unfinished line."""
        self._data: list[bytes] = []
        self._size = 0
        self._after_return = False
        self._first = True

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of all events completed by ``piece``. Raises :class:`OutOfBounds` for an event that is too large."""
        if self._after_return and piece:
            self._after_return = False
            if piece.startswith(b"\n"):  # the second half of a split CRLF
                piece = piece[1:]
        if b"\r" in piece:
            self._after_return = piece.endswith(b"\r")
            piece = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = piece.split(b"\n")
        if len(lines) > 1 and self._rest:
            lines[0] = bytes(self._rest + lines[0])
            self._rest.clear()
        self._rest += lines.pop()
        if self._first and lines:
            self._first = False
            lines[0] = lines[0].removeprefix(b"\xef\xbb\xbf")
        events: list[bytes] = []
        data = self._data
        for line in lines:
            if line.startswith(b"data:") or line == b"data":
                value = line[6:] if line.startswith(b" ", 5) else line[5:]
                self._size += max(len(value), _LEAST)
                data.append(value)
            elif not line and data:
                events.append(b"\n".join(data))
                data.clear()
                self._size = 0
        if self._size + len(self._rest) > LARGEST_EVENT:
            raise OutOfBounds(f"an event of more than {LARGEST_EVENT >> 20} MiB in the stream (LARGEST_EVENT)")
        return events
