"""Prices, rate limits and retry delays, with a clock of our own."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym.engines._limits import Prices, RateLimiter, RateLimits
from clawgym.engines._retry import backoff, is_retryable, retry_after
from clawgym.records import Usage


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


def limiter(**limits: float) -> tuple[RateLimiter, Clock]:
    clock = Clock()
    return RateLimiter(RateLimits(**limits), clock=clock, sleep=clock.sleep), clock  # type: ignore[arg-type]


async def test_no_minute_holds_more_requests_than_allowed():
    rate, _ = limiter(requests_per_minute=5)
    times = [(await rate.acquire(0)).time for _ in range(23)]
    for t in times:
        assert sum(t <= u < t + 60 for u in times) <= 5
    assert times[-1] - times[0] == pytest.approx(240.0)


async def test_no_minute_holds_more_tokens_than_allowed():
    rate, _ = limiter(tokens_per_minute=100)
    taken = []
    for _ in range(6):
        reservation = await rate.acquire(80)
        reservation.tokens = 40  # the answer was shorter than feared
        taken.append(reservation.time)
    assert [t - taken[0] for t in taken] == pytest.approx([0, 60, 120, 180, 240, 300])
    rate, _ = limiter(tokens_per_minute=100)
    assert (await rate.acquire(1e9)).tokens == 1e9  # larger than the limit: alone, but not stuck


async def test_pause_delays_all_requests():
    rate, clock = limiter()
    rate.pause(7)
    rate.pause(3)
    assert (await rate.acquire(0)).time == pytest.approx(1007)
    assert clock.now == pytest.approx(1007)
    assert rate.waited == pytest.approx(7)


def test_cost():
    assert Prices(2.0, 8.0).cost(Usage(1_000_000, 500_000, 400_000)) == pytest.approx(6.0)
    assert Prices(2.0, 8.0, cached=0.5).cost(Usage(1_000_000, 0, 400_000)) == pytest.approx(1.4)
    assert Prices(0.0, 0.0).cost(Usage(5, 5)) == 0.0


def test_retry_after_in_every_form():
    now = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
    assert retry_after({"retry-after": "3"}) == 3.0
    assert retry_after({"retry-after-ms": "250", "retry-after": "3"}) == 0.25
    assert retry_after({"retry-after": "Thu, 01 Jan 2026 12:00:30 GMT"}, now) == 30.0
    assert retry_after({"retry-after": "Thu, 01 Jan 2026 11:00:00 GMT"}, now) == 0.0
    of_another_day = {"retry-after": "Mon, 05 Mar 2001 12:00:30 GMT", "date": "Mon, 05 Mar 2001 12:00:00 GMT"}
    assert retry_after(of_another_day) == 30.0, "by the server's clock"
    for useless in ("soon", "nan", "inf", "", "-"):
        assert retry_after({"retry-after": useless}) is None
    assert retry_after({}) is None


@given(st.integers(0, 10_000), st.none() | st.floats(0, 1e6))
def test_backoff_is_bounded_and_never_short(attempt: int, asked: float | None):
    delay = backoff(attempt, asked)
    if asked is None:
        assert 0.2 <= delay <= 60
    else:
        assert asked <= delay <= asked + 0.5


def test_what_is_retried():
    assert [s for s in (400, 401, 403, 404, 408, 409, 413, 422, 429, 500, 503, 529) if is_retryable(s)] == [
        408,
        409,
        429,
        500,
        503,
        529,
    ]
