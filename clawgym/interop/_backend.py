"""One sandbox backend for each event loop, for programs of others that make sandboxes one by one."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator

from clawgym.sandbox import Backend, backend

__all__ = ["loop_backend"]

_held: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[Backend, AsyncGenerator[None]]]
_held = weakref.WeakKeyDictionary()


async def loop_backend() -> Backend:
    """The backend ``auto`` of the running event loop, which ends with the loop."""
    loop = asyncio.get_running_loop()
    if loop not in _held:
        made = backend()
        closing = _until_the_loop_ends(made)
        _held[loop] = made, closing
        await anext(closing)
    return _held[loop][0]


async def _until_the_loop_ends(made: Backend) -> AsyncGenerator[None]:
    """A loop closes its asynchronous generators at its end (``asyncio.run`` does)."""
    try:
        yield
    finally:
        _held.pop(asyncio.get_running_loop(), None)
        await made.aclose()
