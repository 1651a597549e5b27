"""Pass results from the event loop's thread to the caller's thread, and wake the caller once, when enough have arrived.

Waking it for each result would switch the interpreter between the threads each time, which takes longer than a command.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from clawgym.envs._runtime import POLL_SECONDS

__all__ = ["Results"]

T = TypeVar("T")


class Results(Generic[T]):
    """Results by environment: one thread puts them, another waits for them. They stay until they are removed."""

    def __init__(self) -> None:
        self._arrived: dict[int, T | BaseException] = {}
        self._wanted = 1
        self._enough = threading.Event()

    def put(self, env_id: int, result: T | BaseException) -> None:
        """Add a result. An exception counts as a result and wakes the caller at once."""
        self._arrived[env_id] = result
        if len(self._arrived) >= self._wanted or isinstance(result, BaseException):
            self._enough.set()

    def wait(self, count: int, deadline: float | None, ensure: Callable[[], None]) -> dict[int, T | BaseException]:
        """Wait for ``count`` results, or for an exception, and return all that have arrived.

        Calls ``ensure`` every half second. Raises TimeoutError after ``deadline`` (monotonic seconds).
        """
        self._wanted = count
        while True:
            self._enough.clear()  # before the check: a later put() sets it again
            arrived = self._arrived.copy()
            if len(arrived) >= count or any(isinstance(a, BaseException) for a in arrived.values()):
                return arrived
            left = POLL_SECONDS if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"{len(arrived)} of {count} environments answered: call recv() again")
            if not self._enough.wait(min(POLL_SECONDS, left)):
                ensure()

    def remove(self, env_ids: Iterable[int]) -> None:
        for env_id in env_ids:
            del self._arrived[env_id]
