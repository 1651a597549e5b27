"""Threads that compute parts of a step beside each other, on a CPU.

With several threads torch divides each operation among them. A small model has many operations in a step, most of them
too short for that. So a step with enough tokens is divided instead, and each thread runs the whole forward pass of its
part.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch

__all__ = ["Crew"]

WORTH = 1e9
"""Weights times tokens that a part has at least: with less, reading the weights and Python take most of its time."""

_A = TypeVar("_A")
_B = TypeVar("_B")


class Crew:
    """Threads for the forward pass of ``model``, which together use as many as torch does. Belongs to the thread that
    calls it."""

    def __init__(self, model: torch.nn.Module) -> None:
        weights = [*model.parameters()]
        self._size = sum(weight.numel() for weight in weights)
        self._on_cpu = all(weight.device.type == "cpu" for weight in weights)
        self._pools: dict[int, ThreadPoolExecutor] = {}
        """By the number of threads that torch uses in each of their own."""

    def parts(self, tokens: int, longest: int) -> int:
        """In how many parts, 1 or more, to compute a step of ``tokens`` tokens, of which ``longest`` stay together."""
        most = torch.get_num_threads() if self._on_cpu else 1
        return max(1, min(most, int(tokens * self._size / WORTH), round(tokens / longest)))

    def map(self, do: Callable[[_A], _B], items: Sequence[_A]) -> list[_B]:
        """``do`` with each item, beside each other, in inference mode. There are no more items than torch has threads.

        Raises what ``do`` raises, after all ended.
        """
        own = torch.get_num_threads()
        pool = self._pool(own, own // len(items))

        def run(item: _A) -> _B:
            with torch.inference_mode():
                return do(item)

        running = [pool.submit(run, item) for item in items]
        wait(running)
        return [one.result() for one in running]

    def close(self) -> None:
        """End the threads."""
        for pool in self._pools.values():
            pool.shutdown()
        self._pools.clear()

    def _pool(self, own: int, each: int) -> ThreadPoolExecutor:
        """Threads in which torch uses ``each`` threads, and together ``own``."""
        if each not in self._pools:
            count = own // each
            pool, together = ThreadPoolExecutor(count, "clawgym-forward"), threading.Barrier(count + 1)

            def begin() -> None:
                # This sets the number for the thread that calls it, and for all that have not used torch yet.
                torch.get_num_threads()
                torch.set_num_threads(each)
                together.wait()

            try:
                for _ in range(count):
                    pool.submit(begin)
                together.wait()
            except BaseException:  # a thread could not be started: those that wait for it must end
                together.abort()
                pool.shutdown()
                raise
            finally:
                torch.set_num_threads(own)
            self._pools[each] = pool
        return self._pools[each]
