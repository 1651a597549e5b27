"""When to try again: what the endpoint asks for, or exponential backoff with jitter."""

from __future__ import annotations

import random
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

__all__ = ["backoff", "is_retryable", "retry_after"]

FIRST_SECONDS = 0.5
LONGEST_SECONDS = 60.0


def is_retryable(status: int) -> bool:
    """Whether the same request may succeed later."""
    return status in (408, 409, 425, 429) or status >= 500


def retry_after(headers: Mapping[str, str], now: datetime | None = None) -> float | None:
    """Seconds that the response asks to wait (``retry-after-ms``, ``retry-after`` as seconds or date), or ``None``.

    A date is taken by the server's own clock, its ``date`` header: ours may be wrong, or have jumped.
    """
    for name, unit in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        value = headers.get(name)
        if value is None:
            continue
        try:
            seconds = float(value) / unit
        except ValueError:
            when = _date(value)
            if when is None:
                continue
            seconds = (when - (now or _date(headers.get("date", "")) or datetime.now(UTC))).total_seconds()
        if seconds == seconds and seconds != float("inf"):
            return max(0.0, seconds)
    return None


def _date(value: str) -> datetime | None:
    try:
        when = parsedate_to_datetime(value)
    except ValueError:
        return None
    return when if when.tzinfo else when.replace(tzinfo=UTC)


def backoff(attempt: int, asked: float | None = None) -> float:
    """Seconds to wait before try ``attempt + 1`` (``attempt`` counts from 0): never less than ``asked``, and
    spread out, so that callers who failed together do not come back together."""
    if asked is not None:
        return asked + random.uniform(0.0, FIRST_SECONDS)
    longest = min(LONGEST_SECONDS, FIRST_SECONDS * 2 ** min(attempt, 16))
    return random.uniform(longest / 2, longest)
