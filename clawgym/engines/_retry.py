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

__all__ = ["Patience", "backoff", "is_retryable", "persist", "persist_call", "retry_after"]

FIRST_SECONDS = 0.5
LONGEST_SECONDS = 60.0
POLL_SECONDS = 5.0
"""Longest wait of :class:`Patience`, unless the endpoint asks for more, so that a returning endpoint is soon used."""

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


class Patience:
    """Decides about retries: of retryable errors, until ``seconds`` after the first one.

    ``failed`` is called with each error.
    """

    def __init__(self, seconds: float, failed: Callable[[EngineError], Any] = lambda _: None) -> None:
        self._seconds = seconds
        self._failed = failed
        self._give_up = 0.0

    def __call__(self, error: EngineError, retries: int) -> float:
        """Seconds to wait before the next try. Raises ``error`` where there is none."""
        self._failed(error)
        now = time.monotonic()
        self._give_up = self._give_up or now + self._seconds
        delay = backoff(retries, error.retry_after, POLL_SECONDS)
        if not error.retryable or now + delay > self._give_up:
            raise error
        _log.info("%s: try %d in %.1f s", error, retries + 2, delay)
        return delay


async def persist(
    attempt: Callable[[], AsyncGenerator[_T, None]], pause: Callable[[EngineError, int], float | None]
) -> AsyncGenerator[_T, None]:
    """Yield the items of ``attempt()``, which is called again after an :class:`~clawgym.errors.EngineError`.

    ``pause`` is called with the error and the number of retries so far. It returns the seconds to wait, or None to try
    again at once without counting it as a retry, or raises. An error after the first item is not retryable.
    """
    retries = 0
    while True:
        begun = False
        try:
            async with aclosing(attempt()) as items:
                async for item in items:
                    begun = True
                    yield item
            return
        except EngineError as error:
            failed = error
        # Outside of the handler, so that an error that ``pause`` raises has no context.
        if begun:
            failed.retryable = False
        delay = pause(failed, retries)
        if delay is not None:
            retries += 1
            await asyncio.sleep(delay)


async def persist_call(call: Callable[[], Awaitable[_T]], pause: Callable[[EngineError, int], float | None]) -> _T:
    """:func:`persist` for a call with a single result."""

    async def attempt() -> AsyncGenerator[_T, None]:
        yield await call()

    async with aclosing(persist(attempt, pause)) as answers:
        async for answer in answers:
            return answer
    raise AssertionError("unreachable")
