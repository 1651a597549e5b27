"""What a request brings, checked: each field is taken by its handler with what it may be; nothing else gets in.

Invariants: text is decoded strictly; a field that is missing, given twice, too long, of another kind, or not asked for
ends in :class:`Refused`, and then nothing of the request is kept.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from datetime import date
from typing import Any
from urllib.parse import parse_qsl

__all__ = ["Fields", "Refused", "amount", "day"]

_MOST_FIELDS = 64
_NUMBER = re.compile(r"[0-9]{1,9}")


class Refused(Exception):
    """The request asks for what no page offers."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class Fields:
    """The fields of a query or of a form (``application/x-www-form-urlencoded``)."""

    def __init__(self, text: str) -> None:
        try:
            text.encode("ascii")
            options: Any = {"keep_blank_values": True, "strict_parsing": True, "errors": "strict"}
            pairs = parse_qsl(text, max_num_fields=_MOST_FIELDS, **options) if text else []
        except ValueError as error:
            raise Refused("The fields cannot be read.") from error
        self._left: dict[str, list[str]] = {}
        for name, value in pairs:
            self._left.setdefault(name, []).append(value.replace("\r\n", "\n"))

    def has(self, name: str) -> bool:
        """Whether the field is there and was not taken yet."""
        return name in self._left

    def many(self, name: str, most: int = 20) -> list[str]:
        """All values of a field, in their order; none if it is not there."""
        values = self._left.pop(name, [])
        if len(values) > most:
            raise Refused(f"The field {name} is given too often.")
        return values

    def text(self, name: str, longest: int = 200, lines: bool = False) -> str:
        """One value without spaces around it, of at most ``longest`` characters; may be empty."""
        values = self.many(name, 1)
        if not values:
            raise Refused(f"The field {name} is missing.")
        value = values[0].strip()
        if len(value) > longest:
            raise Refused(f"The field {name} is longer than {longest} characters.")
        if any(not c.isprintable() and not (lines and c == "\n") for c in value):
            raise Refused(f"The field {name} has characters that cannot be typed.")
        return value

    def number(self, name: str, least: int = 0, most: int = 999_999_999) -> int:
        """A whole number from ``least`` to ``most``."""
        text = self.text(name, 12)
        if not _NUMBER.fullmatch(text) or not least <= int(text) <= most:
            raise Refused(f"The field {name} is no number from {least} to {most}.")
        return int(text)

    def maybe(self, name: str) -> int | None:
        """A whole number, or None where the field is empty."""
        if self._left.get(name) != [""]:
            return self.number(name)
        del self._left[name]
        return None

    def choice(self, name: str, allowed: Collection[str]) -> str:
        """One of ``allowed``."""
        value = self.text(name)
        if value not in allowed:
            raise Refused(f"The field {name} has a value that is not offered.")
        return value

    def done(self) -> None:
        """Refuse what nobody asked for."""
        if self._left:
            raise Refused(f"There is no field {min(self._left)[:40]!r}.")


def day(text: str) -> bool:
    """Whether ``text`` is a day, ``YYYY-MM-DD``."""
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def amount(text: str) -> str | None:
    """An amount of money with two decimals, or None: ``7`` and ``7,5`` are ``7.00`` and ``7.50``."""
    found = re.fullmatch(r"([0-9]{1,6})(?:[.,]([0-9]{1,2}))?", text)
    return f"{int(found[1])}.{(found[2] or '').ljust(2, '0')}" if found else None
