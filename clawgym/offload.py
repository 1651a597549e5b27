"""Run slow work in a limited number of threads, and updates of models in one.

A thread that runs Python code can hold the interpreter lock for 5 ms at a time, and the event loop waits for each
thread. So the number of threads bounds the pauses of the loop, however many episodes end at once.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

__all__ = ["in_update_thread", "offloaded", "offloaded_if_large"]

_T = TypeVar("_T")
_AT_ONCE = min(8, max(2, (os.cpu_count() or 2) // 2))
_SMALL = 64 * 1024
"""Bytes that are worked on in less time than a thread needs to take over and hand back."""
_updates = ThreadPoolExecutor(1, "clawgym-updates")
_gates: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()


async def offloaded(function: Callable[..., _T], *args: Any) -> _T:
    """Run ``function(*args)`` in a thread and return its result. It is not interrupted if the caller is cancelled."""
    gate = _gates.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(_AT_ONCE))

    async def work() -> _T:
        async with gate:
            return await asyncio.to_thread(function, *args)

    task = asyncio.ensure_future(work())
    task.add_done_callback(
        lambda done: done.cancelled() or done.exception()
    )  # mark as retrieved: the caller may have been cancelled
    return await asyncio.shield(task)


async def offloaded_if_large(size: int, function: Callable[..., _T], *args: Any) -> _T:
    """Like :func:`offloaded` for work on ``size`` bytes; a small amount is worked on here."""
    return function(*args) if size <= _SMALL else await offloaded(function, *args)


async def in_update_thread(function: Callable[..., _T], *args: Any) -> _T:
    """Run ``function(*args)`` in the only thread that updates models, after what was given to it before.

    malloc keeps freed memory for the thread that used it: with several threads, each would hold the activations of an
    update.
    """
    return await asyncio.get_running_loop().run_in_executor(_updates, function, *args)
