"""Server-sent events, read as they come.

Source: WHATWG HTML, "Server-sent events", section "Interpreting an event stream". Invariant: the events depend on
the bytes alone, never on how they were cut into pieces.
"""

from __future__ import annotations

from clawgym.bounds import LARGEST_EVENT
from clawgym.errors import EngineError

__all__ = ["EventReader"]

_LEAST = 64
"""Bytes that a line counts for at least: an object of Python's is not smaller."""


class EventReader:
    """Turns pieces of a stream into the ``data`` of its events. Comments, ids and names are left out."""

    def __init__(self) -> None:
        self._rest = bytearray()
        """Of a line that has not ended."""
        self._data: list[bytes] = []
        self._size = 0
        self._after_return = False
        self._first = True

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of every event that ``piece`` ends. Raises :class:`EngineError` for one that is too large."""
        if self._after_return and piece:
            self._after_return = False
            if piece.startswith(b"\n"):  # the second half of a line end that was cut in two
                piece = piece[1:]
        if b"\r" in piece:
            self._after_return = piece.endswith(b"\r")
            piece = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = piece.split(b"\n")
        events: list[bytes] = []
        if len(lines) > 1:
            lines[0] = bytes(self._rest + lines[0])
            self._rest.clear()
        self._rest += lines.pop()
        for line in lines:
            if self._first:
                self._first = False
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line:
                self._take(line)
            elif self._data:
                events.append(b"\n".join(self._data))
                self._data, self._size = [], 0
        if self._size + len(self._rest) > LARGEST_EVENT:
            raise EngineError(
                f"an event of more than {LARGEST_EVENT >> 20} MiB in the stream (LARGEST_EVENT): no answer of a "
                "model; check base_url",
                status=502,
            )
        return events

    def _take(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
            self._size += max(len(value), _LEAST)
