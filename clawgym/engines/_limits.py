"""Prices, budgets and rate limits of an engine.

Invariants: a cost is computed from given prices and reported tokens, or it is None. In any 60 seconds no more requests
(and tokens, once their usage is known) are sent than the limits allow.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from clawgym.errors import BudgetExceeded, EngineError
from clawgym.records import Usage

__all__ = ["AnswerBudget", "Prices", "RateLimiter", "RateLimits", "Reservation"]

WINDOW_SECONDS = 60.0


def _check_positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise EngineError(f"{name} must be a positive number, not {value!r}: correct it or leave it out")


@dataclass(frozen=True, slots=True)
class Prices:
    """US dollars per million tokens."""

    prompt: float
    completion: float
    cached: float | None = None
    """Price of prompt tokens read from the endpoint's cache; None: the same as ``prompt``."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise EngineError(f"price {name} must be 0 or more USD per million tokens, not {value!r}: correct it")

    def cost(self, usage: Usage) -> float:
        """The cost of ``usage`` in US dollars."""
        cached = min(usage.cached_tokens, usage.prompt_tokens)
        cached_price = self.prompt if self.cached is None else self.cached
        fresh = (usage.prompt_tokens - cached) * self.prompt
        return (fresh + cached * cached_price + usage.completion_tokens * self.completion) / 1e6


@dataclass(frozen=True, slots=True)
class AnswerBudget:
    """What an engine may spend in total. Checked before each request, so calls in flight may exceed it."""

    tokens: int | None = None
    """Prompt and completion tokens together."""
    cost_usd: float | None = None

    def __post_init__(self) -> None:
        _check_positive(self, *self.__slots__)

    def check(self, spent: Usage) -> None:
        """Raise :class:`~clawgym.errors.BudgetExceeded` if ``spent`` reaches the budget."""
        tokens = spent.prompt_tokens + spent.completion_tokens
        if self.tokens is not None and tokens >= self.tokens:
            raise BudgetExceeded(
                f"the token budget is used up ({tokens} of {self.tokens}): raise it and run again", cause="tokens"
            )
        if self.cost_usd is not None and (spent.cost_usd or 0.0) >= self.cost_usd:
            raise BudgetExceeded(
                f"the cost budget is used up ({spent.cost_usd or 0.0:.4f} of {self.cost_usd:.4f} USD): "
                "raise it and run again",
                cause="cost",
            )


@dataclass(frozen=True, slots=True)
class RateLimits:
    """Limits on requests to an endpoint. None: no limit."""

    concurrent: int = 16
    """Requests in flight."""
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    """Tokens per minute: estimated before a request (a token per four characters, plus ``max_tokens``), then
    corrected."""

    def __post_init__(self) -> None:
        _check_positive(self, *self.__slots__)


@dataclass(slots=True)
class Reservation:
    """One request in the window; ``tokens`` is an estimate until the answer arrives."""

    time: float
    tokens: float


class RateLimiter:
    """A sliding window over the last minute. Callers pass in the order of their arrival."""

    def __init__(
        self,
        limits: RateLimits,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._limits = limits
        self._clock = clock
        self._sleep = sleep
        self._turn = asyncio.Lock()
        self._window: deque[Reservation] = deque()
        self._not_before = 0.0
        self.waited = 0.0
        """Total seconds that requests waited."""

    async def acquire(self, tokens: float) -> Reservation:
        """Wait until a request of about ``tokens`` tokens may be sent, and add it to the window."""
        async with self._turn:
            while (delay := self._delay(tokens)) > 0:
                self.waited += delay
                await self._sleep(delay)
            reservation = Reservation(self._clock(), tokens)
            self._window.append(reservation)
            return reservation

    def pause(self, seconds: float) -> None:
        """Let no request pass for ``seconds``: the endpoint asked one of them to wait, which applies to all."""
        self._not_before = max(self._not_before, self._clock() + seconds)

    def _delay(self, tokens: float) -> float:
        now = self._clock()
        if now < self._not_before:
            return self._not_before - now
        while self._window and self._window[0].time <= now - WINDOW_SECONDS:
            self._window.popleft()
        if not self._window:
            return 0.0  # a request larger than the whole limit passes too
        rpm, tpm = self._limits.requests_per_minute, self._limits.tokens_per_minute
        full = rpm is not None and len(self._window) + 1 > max(1.0, rpm)
        full = full or (tpm is not None and sum(r.tokens for r in self._window) + tokens > tpm)
        return self._window[0].time + WINDOW_SECONDS - now if full else 0.0
