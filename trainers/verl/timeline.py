"""Records when each loop of a run was busy: serving, rollouts, judging, training, weights.

Invariant: spans of one loop that overlap or touch are merged; their union stays the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

__all__ = ["Span", "Spans", "merged"]

Span = tuple[str, float, float]
"""Loop, start, end; seconds since 1970."""


class Spans:
    """Collects spans of one process."""

    def __init__(self) -> None:
        self._ended: list[Span] = []

    @contextmanager
    def busy(self, loop: str) -> Iterator[None]:
        """Context manager: ``loop`` is busy inside."""
        started = time.time()
        try:
            yield
        finally:
            self._ended.append((loop, started, time.time()))

    def take(self) -> list[Span]:
        """The spans that ended since the last call."""
        ended, self._ended = self._ended, []
        return merged(ended)


def merged(spans: Iterable[Span]) -> list[Span]:
    """Merge spans of one loop that overlap or touch. Sorted by loop and time."""
    found: list[Span] = []
    for loop, start, end in sorted(spans):
        if found and found[-1][0] == loop and start <= found[-1][2]:
            found[-1] = (loop, found[-1][1], max(end, found[-1][2]))
        else:
            found.append((loop, start, end))
    return found
