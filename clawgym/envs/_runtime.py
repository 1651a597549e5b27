"""One asyncio loop on its own thread drives every sandbox of this process, from scripts, Jupyter and forks alike."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from clawgym.sandbox import Backend
from clawgym.sandbox import backend as make_backend

__all__ = ["Runtime", "runtime"]

T = TypeVar("T")


class Runtime:
    """The loop, and the backends that live on it. Use :func:`runtime`."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self._backends: dict[str, tuple[Backend, int]] = {}
        self._thread = threading.Thread(target=self.loop.run_forever, name="clawgym", daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run ``work`` on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` on the loop and wait. Ctrl-C cancels it."""
        future = self.start(work)
        try:
            return future.result()
        except BaseException:
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
        if self.pid != os.getpid() or self.loop.is_closed():
            return
        for backend, _ in self._backends.values():
            self.run(backend.aclose())
        self._backends.clear()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


_runtime: Runtime | None = None
_lock = threading.Lock()


def runtime() -> Runtime:
    """This process's runtime; made at first use, and again after a fork (a thread does not survive one)."""
    global _runtime
    with _lock:
        if _runtime is None or _runtime.pid != os.getpid():
            _runtime = Runtime()
            atexit.register(_runtime.stop)
        return _runtime


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
