"""When to try again: what the endpoint asks for, or exponential backoff with jitter.

Invariant: nothing is tried again once a piece of the answer has been given away.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from clawgym.errors import EngineError

__all__ = ["backoff", "is_retryable", "persist", "persist_call", "retry_after"]

FIRST_SECONDS = 0.5
LONGEST_SECONDS = 60.0
POLL_SECONDS = 5.0
"""Longest wait of :func:`persist`, unless the endpoint asks for more: an upstream that returns is soon found."""

_log = logging.getLogger("clawgym.engines")
_T = TypeVar("_T")


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


def backoff(attempt: int, asked: float | None = None, longest: float | None = None) -> float:
    """Seconds to wait before try ``attempt + 1`` (``attempt`` counts from 0): never less than ``asked``, and
    spread out, so that callers who failed together do not come back together."""
    if asked is not None:
        return asked + random.uniform(0.0, FIRST_SECONDS)
    longest = min(longest or LONGEST_SECONDS, FIRST_SECONDS * 2 ** min(attempt, 16))
    return random.uniform(longest / 2, longest)


async def persist(
    attempt: Callable[[], AsyncGenerator[_T, None]],
    patience: float,
    failed: Callable[[EngineError], Any] = lambda _: None,
) -> AsyncGenerator[_T, None]:
    """What ``attempt()`` yields; begun again after a retryable :class:`~clawgym.errors.EngineError` that came before
    its first item, until ``patience`` seconds after the first of them. ``failed`` is told of each.

    An error that comes later is passed on as not retryable: the same call cannot be made again."""
    count, give_up = 0, 0.0
    while True:
        begun = False
        try:
            async with aclosing(attempt()) as items:
                async for item in items:
                    begun = True
                    yield item
            return
        except EngineError as error:
            failed(error)
            if begun:
                error.retryable = False
            if not error.retryable:
                raise
            now = time.monotonic()
            give_up = give_up or now + patience
            delay = backoff(count, error.retry_after, POLL_SECONDS)
            if now + delay > give_up:
                raise
            count += 1
            _log.info("%s: try %d in %.1f s", error, count + 1, delay)
        await asyncio.sleep(delay)


async def persist_call(call: Callable[[], Awaitable[_T]], patience: float) -> _T:
    """:func:`persist` for a call with one answer."""

    async def attempt() -> AsyncGenerator[_T, None]:
        yield await call()

    async with aclosing(persist(attempt, patience)) as answers:
        async for answer in answers:
            return answer
    raise AssertionError("unreachable")
