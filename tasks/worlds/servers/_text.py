"""What the worlds check of text, dates and amounts: returns the value in its one form, or raises ``ToolError``."""

from __future__ import annotations

import re
from datetime import datetime

from .clawgym_tools import ToolError

__all__ = ["address", "amount", "date", "moment", "text"]

_ADDRESS = re.compile(r"[A-Za-z0-9._+-]{1,64}@[A-Za-z0-9.-]{1,100}")


def text(value: str, what: str, most: int = 200) -> str:
    """``value`` without spaces around it."""
    value = value.strip()
    if not value or len(value) > most or "\0" in value:
        raise ToolError(f"{what} must have from 1 to {most} characters: call it again")
    return value


def amount(value: int, what: str, most: int = 10**11) -> int:
    """A positive whole number."""
    if not 1 <= value <= most:
        raise ToolError(f"{what} must be from 1 to {most}, not {value}: call it again")
    return value


def date(value: str, what: str) -> str:
    """``YYYY-MM-DD``."""
    return _time(value, what, "%Y-%m-%d", "2031-03-04")


def moment(value: str, what: str) -> str:
    """``YYYY-MM-DDTHH:MM``."""
    return _time(value, what, "%Y-%m-%dT%H:%M", "2031-03-04T09:30")


def address(value: str) -> str:
    """An e-mail address in lower case."""
    value = value.strip().lower()
    if not _ADDRESS.fullmatch(value):
        raise ToolError(f"{value[:80]!r} is no e-mail address: use one like ada@example.org")
    return value


def _time(value: str, what: str, form: str, example: str) -> str:
    try:
        return datetime.strptime(value.strip(), form).strftime(form)  # noqa: DTZ007 local times, all of one place
    except ValueError:
        raise ToolError(f"{what} must look like {example}, not {value[:40]!r}: call it again") from None
