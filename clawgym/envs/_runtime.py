"""One asyncio loop on its own thread drives every sandbox of this process, from scripts, Jupyter and forks alike.

Invariant: whoever waits for the loop learns of its end. A loop that was stopped goes on where it was, on a new thread;
one that was closed, or that belongs to the process before a fork, is an error that says so.
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
LOOK_SECONDS = 0.5
"""How often somebody who waits for the loop looks whether it still runs."""


class Droppable(Protocol):
    async def drop(self) -> None:
        """Give up what runs."""
        ...


class Runtime:
    """The loop, and the backends that live on it. Use :func:`runtime`."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self._backends: dict[str, tuple[Backend, int]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.users: weakref.WeakSet[Droppable] = weakref.WeakSet()
        """Environments that are not closed: dropped before the backends, where a process just ends."""
        self._reviving = threading.Lock()
        self._thread = self._new_thread()

    def _new_thread(self) -> threading.Thread:
        thread = threading.Thread(target=self.loop.run_forever, name="clawgym", daemon=True)
        thread.start()
        return thread

    @property
    def usable(self) -> bool:
        """Whether :meth:`ensure` would not raise."""
        return self.pid == os.getpid() and not self.loop.is_closed()

    def ensure(self) -> None:
        """Start the loop's thread again if something ended it. Raises :class:`ClawGymError` where that cannot be."""
        if self.pid != os.getpid():
            raise ClawGymError("this environment belongs to the process that was forked: make one in this process")
        if self.loop.is_closed():
            raise ClawGymError("the event loop of this environment was closed from outside: make the environment again")
        with self._reviving:
            if not self._thread.is_alive():
                self._thread = self._new_thread()

    def start(self, works: Sequence[Coroutine[Any, Any, None]]) -> None:
        """Begin all ``works`` on the loop, which is woken once for them. Raises as :meth:`ensure` does."""

        def begin() -> None:
            for work in works:
                task = self.loop.create_task(work)
                self._tasks.add(task)  # the loop itself holds a task but weakly
                task.add_done_callback(self._tasks.discard)

        try:
            self.ensure()
            self.loop.call_soon_threadsafe(begin)
        except BaseException:
            for work in works:
                work.close()
            raise

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` on the loop and wait. Ctrl-C cancels it."""
        try:
            self.ensure()
            future = asyncio.run_coroutine_threadsafe(work, self.loop)
        except BaseException:
            work.close()
            raise
        try:
            while True:
                try:
                    return future.result(timeout=LOOK_SECONDS)
                except TimeoutError:
                    if future.done():  # it is the work's own
                        raise
                    self.ensure()
        except BaseException:
            if self.usable:
                future.cancel()
            raise

    def acquire(self, name: str) -> Backend:
        """The shared, probed backend ``name``; give it back with :meth:`release`."""
        held = self._backends.get(name)
        if held is None:

            async def make() -> Backend:
                made = make_backend(name)
                try:
                    await made.probe()
                except BaseException:
                    await made.aclose()
                    raise
                return made

            held = (self.run(make()), 0)
        self._backends[name] = (held[0], held[1] + 1)
        return held[0]

    def release(self, name: str) -> None:
        """The last release closes the backend."""
        backend, users = self._backends.pop(name)
        if users > 1:
            self._backends[name] = (backend, users - 1)
        else:
            self.run(backend.aclose())

    def stop(self) -> None:
        """Close every backend and end the thread."""
        if not self.usable:
            return
        for user in list(self.users):
            with contextlib.suppress(Exception):  # the backends close their sandboxes in any case
                self.run(user.drop())
        for backend, _ in self._backends.values():
            self.run(backend.aclose())
        self._backends.clear()
        self.run(self._end_tasks())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    async def _end_tasks(self) -> None:
        """Whatever still runs on the loop, such as a desktop that is being made ahead for nobody."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=5)

    def abandon(self) -> None:
        """Let go of a loop that can do nothing any more: its supervisors end when nobody holds them."""
        self._backends.clear()


_runtime: Runtime | None = None
_lock = threading.Lock()


def runtime() -> Runtime:
    """This process's runtime; made at first use, and again after a fork (a thread does not survive one)."""
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


# Closing sandboxes needs worker threads: atexit comes after their end, and so does what registers before their module.
getattr(threading, "_register_atexit", atexit.register)(_stop)


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
