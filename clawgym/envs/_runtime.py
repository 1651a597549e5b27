"""One asyncio event loop in its own thread drives all environments of this process, in scripts, Jupyter and forks.

Invariant: a caller never waits for a loop that has ended. A loop that was stopped continues on a new thread. For a loop
that was closed, or that belongs to the parent of a fork, the caller gets an error.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures.thread  # noqa: F401  # see the last lines
import contextlib
import os
import threading
import weakref
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from clawgym.errors import ClawGymError
from clawgym.sandbox import Backend
from clawgym.sandbox import backend as make_backend

__all__ = ["Runtime", "runtime"]

T = TypeVar("T")
POLL_SECONDS = 0.5
"""Interval at which a waiting caller checks that the loop still runs."""


class Closable(Protocol):
    async def shut_down(self) -> None:
        """End the running episodes and close their sandboxes. Runs on the loop."""
        ...


class Runtime:
    """The loop and its sandbox backends. :func:`runtime` returns the one of this process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self._backends: dict[str, tuple[Backend, int]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.users: weakref.WeakSet[Closable] = weakref.WeakSet()
        """Environments that are not closed: shut down before the backends when the process ends."""
        self._reviving = threading.Lock()
        self._counting = threading.RLock()  # collecting garbage in between may close an environment
        self._thread = self._new_thread()

    def _new_thread(self) -> threading.Thread:
        thread = threading.Thread(target=self.loop.run_forever, name="clawgym", daemon=True)
        thread.start()
        return thread

    @property
    def usable(self) -> bool:
        """Whether :meth:`ensure` would succeed."""
        return self.pid == os.getpid() and not self.loop.is_closed()

    def ensure(self) -> None:
        """Start the loop's thread again if it has ended. Raises :class:`ClawGymError` if that is impossible."""
        if self.pid != os.getpid():
            raise ClawGymError("this environment belongs to the process that was forked: make one in this process")
        if self.loop.is_closed():
            raise ClawGymError("the event loop of this environment was closed from outside: make the environment again")
        with self._reviving:
            if not self._thread.is_alive():
                self._thread = self._new_thread()

    def start(self, works: Sequence[Coroutine[Any, Any, None]]) -> None:
        """Start all ``works`` on the loop, with a single wake-up. Raises as :meth:`ensure` does."""

        def begin() -> None:
            for work in works:
                task = self.loop.create_task(work)
                self._tasks.add(task)  # the loop keeps only a weak reference
                task.add_done_callback(self._tasks.discard)

        try:
            self.ensure()
            self.loop.call_soon_threadsafe(begin)
        except BaseException:
            for work in works:
                work.close()
            raise

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` on the loop and return its result. Ctrl-C cancels it."""
        try:
            self.ensure()
            future = asyncio.run_coroutine_threadsafe(work, self.loop)
        except BaseException:
            work.close()
            raise
        try:
            while True:
                try:
                    return future.result(timeout=POLL_SECONDS)
                except TimeoutError:
                    if future.done():  # raised by the work itself
                        raise
                    self.ensure()
        except BaseException:
            if self.usable:
                future.cancel()
            raise

    def acquire(self, name: str) -> Backend:
        """Return the shared backend ``name``, probed. Call :meth:`release` when done."""

        async def make() -> Backend:
            made = make_backend(name)
            try:
                await made.probe()
            except BaseException:
                await made.aclose()
                raise
            return made

        with self._counting:
            backend, users = self._backends.get(name) or (self.run(make()), 0)
            self._backends[name] = (backend, users + 1)
        return backend

    def release(self, name: str) -> None:
        """Release a backend of :meth:`acquire`. The last release closes it."""
        with self._counting:
            backend, users = self._backends.pop(name)
            if users > 1:
                self._backends[name] = (backend, users - 1)
            else:
                self.run(backend.aclose())

    def stop(self) -> None:
        """Shut down all environments, close all backends and end the thread."""
        if not self.usable:
            return
        for user in list(self.users):
            with contextlib.suppress(Exception):  # the backends close their sandboxes in any case
                self.run(user.shut_down())
        for backend, _ in self._backends.values():
            self.run(backend.aclose())
        self._backends.clear()
        self.run(self._end_tasks())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    async def _end_tasks(self) -> None:
        """Cancel what still runs on the loop, such as the boot of a spare desktop."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=5)

    def abandon(self) -> None:
        """Drop the backends of an unusable loop. Their supervisors end when they are no longer referenced."""
        self._backends.clear()


_runtime: Runtime | None = None
_lock = threading.Lock()


def runtime() -> Runtime:
    """Return this process's runtime; created at first use, and again after a fork, which threads do not survive."""
    global _runtime
    with _lock:
        if _runtime is None or not _runtime.usable:
            if _runtime is not None and _runtime.pid == os.getpid():
                _runtime.abandon()
            _runtime = Runtime()
        return _runtime


def _stop() -> None:
    if _runtime is not None:
        _runtime.stop()


# Closing sandboxes needs worker threads. They end before atexit runs, but after functions that are registered here,
# once concurrent.futures.thread is imported.
getattr(threading, "_register_atexit", atexit.register)(_stop)


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
