"""Retries: the wait that the endpoint asks for, or exponential backoff with jitter.

Invariant: a request is not retried once a piece of its answer has been yielded.
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
"""Longest wait of :func:`persist`, unless the endpoint asks for more, so that a returning endpoint is soon used."""

_log = logging.getLogger("clawgym.engines")
_T = TypeVar("_T")


def is_retryable(status: int) -> bool:
    """Whether the same request may succeed later."""
    return status in (408, 409, 425, 429) or status >= 500


def retry_after(headers: Mapping[str, str], now: datetime | None = None) -> float | None:
    """The seconds that a response asks to wait (``retry-after-ms``, or ``retry-after`` in seconds or as a date), or
    None.

    Dates are relative to the server's ``date`` header, as this machine's clock may be wrong.
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
    """Seconds to wait after the failed ``attempt`` (from 0): at least ``asked``, with jitter to spread callers out."""
    if asked is not None:
        return asked + random.uniform(0.0, FIRST_SECONDS)
    longest = min(longest or LONGEST_SECONDS, FIRST_SECONDS * 2 ** min(attempt, 16))
    return random.uniform(longest / 2, longest)


async def persist(
    attempt: Callable[[], AsyncGenerator[_T, None]],
    patience: float,
    failed: Callable[[EngineError], Any] = lambda _: None,
) -> AsyncGenerator[_T, None]:
    """Yield the items of ``attempt()``, which is retried after errors before its first item.

    Only a retryable :class:`~clawgym.errors.EngineError` is retried, until ``patience`` seconds after the first one.
    ``failed`` is called with each. An error after the first item is raised as not retryable.
    """
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
    """:func:`persist` for a call with a single result."""

    async def attempt() -> AsyncGenerator[_T, None]:
        yield await call()

    async with aclosing(persist(attempt, patience)) as answers:
        async for answer in answers:
            return answer
    raise AssertionError("unreachable")
