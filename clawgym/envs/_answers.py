"""Results on their way from the loop's thread to the caller's, which is woken once: when enough of them are there.

Waking it for each would hand the interpreter to and fro between the two threads, which costs more than a command does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from clawgym.envs._runtime import LOOK_SECONDS

__all__ = ["Answers"]

T = TypeVar("T")


class Answers(Generic[T]):
    """One thread puts, another waits, looks and drops: what was not dropped is there for the next look."""

    def __init__(self) -> None:
        self._arrived: dict[int, T | BaseException] = {}
        self._wanted = 1
        self._enough = threading.Event()

    def put(self, env_id: int, answer: T | BaseException) -> None:
        """An exception is an answer too, and worth waking for."""
        self._arrived[env_id] = answer
        if len(self._arrived) >= self._wanted or isinstance(answer, BaseException):
            self._enough.set()

    def wait(self, count: int, deadline: float | None, ensure: Callable[[], None]) -> dict[int, T | BaseException]:
        """All that have arrived, ``count`` at least, or fewer with an exception among them.

        Calls ``ensure`` now and then. Raises TimeoutError past the deadline (monotonic seconds).
        """
        self._wanted = count
        while True:
            self._enough.clear()  # before looking: who puts after the look sets it again
            arrived = self._arrived.copy()
            if len(arrived) >= count or any(isinstance(a, BaseException) for a in arrived.values()):
                return arrived
            left = LOOK_SECONDS if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"{len(arrived)} of {count} environments answered: call recv() again")
            if not self._enough.wait(min(LOOK_SECONDS, left)):
                ensure()

    def drop(self, env_ids: Iterable[int]) -> None:
        for env_id in env_ids:
            del self._arrived[env_id]
