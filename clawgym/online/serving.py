"""An engine that samples with the version that answers now.

Invariants: a reply is sampled by one version. A change pauses nothing: replies that run end with the version that they
began with, and the next one has the new version. A change in the log, by any process, holds for the next request. Of
the replies that measure or judge a version (:func:`pinned`), one runs at a time while users wait for theirs.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any, Protocol, cast

from clawgym.engines.protocol import GenerateRequest, TokenEngine, Tokens
from clawgym.errors import EngineError
from clawgym.online.versions import Versions

__all__ = ["AdapterEngine", "VersionedEngine", "pinned"]

KEPT = 4
"""Adapters that stay loaded, so that going back to one takes no time."""


def pinned(number: int) -> str:
    """The ``adapter`` of a session that is answered by this version, whichever answers others."""
    return f"v{number}"


class AdapterEngine(TokenEngine, Protocol):
    """Samples with LoRA adapters that are loaded by name."""

    async def load_adapter(self, name: str, source: str, version: int) -> None:
        """Load the adapter in the folder ``source``. Requests that run keep theirs."""
        ...

    async def unload_adapter(self, name: str) -> None:
        """Remove an adapter. Requests that run with it finish."""
        ...


class VersionedEngine:
    """A :class:`~clawgym.engines.protocol.TokenEngine` over an ``engine`` with the weights of version 0, which samples
    with the adapter of the version that answers in ``versions``."""

    def __init__(self, engine: AdapterEngine, versions: Versions) -> None:
        self._engine = engine
        self._versions = versions
        self._loaded: list[int] = []
        """The versions whose adapters are loaded."""
        self._running = Counter[int]()
        self._changing = asyncio.Lock()
        self._users = self._measurements = 0
        """Replies that run: to users, and of pinned versions."""
        self._waiting = deque[asyncio.Future[None]]()
        """Measurements that wait."""
        self.name = engine.name
        self.context_window = engine.context_window
        self.tokenizer = engine.tokenizer

    @property
    def policy_version(self) -> int:
        """The version that answers."""
        return self._versions.serving.number

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Tokens]:
        """See :class:`~clawgym.engines.protocol.TokenEngine`. A request with an adapter is one of :func:`pinned`.

        Raises :class:`~clawgym.errors.EngineError` for another adapter."""
        number = None if request.adapter is None else self._number(request.adapter)
        async with self._user() if number is None else self._measurement():
            number = await self.ready(number)
            request = replace(request, adapter=pinned(number) if number else None)
            self._running[number] += 1
            try:
                async with aclosing(cast(AsyncGenerator[Tokens], self._engine.generate(request))) as stream:
                    async for tokens in stream:
                        yield tokens
            finally:
                self._running[number] -= 1

    def _number(self, adapter: str) -> int:
        if adapter[:1] == "v" and adapter[1:].isdecimal():
            return int(adapter[1:])
        raise EngineError(f"there is no adapter {adapter!r}: name a version (v0, v1, ...), or none")

    @asynccontextmanager
    async def _user(self) -> AsyncIterator[None]:
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            self._admit()

    @asynccontextmanager
    async def _measurement(self) -> AsyncIterator[None]:
        """Wait until no user waits for a reply, or until this is the only measurement that runs beside users."""
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        self._admit()
        try:
            await place
            yield
        finally:
            if not place.cancelled():
                self._measurements -= 1
            self._admit()

    def _admit(self) -> None:
        while self._waiting and not (self._users and self._measurements):
            place = self._waiting.popleft()
            if not place.cancelled():
                self._measurements += 1
                place.set_result(None)

    async def ready(self, number: int | None = None) -> int:
        """Load a version, by default the one that answers, and return its number."""
        wanted = self._versions.serving if number is None else self._versions[number]
        if wanted.number and wanted.number not in self._loaded:
            async with self._changing:
                if wanted.number not in self._loaded:
                    await self._engine.load_adapter(pinned(wanted.number), os.fspath(wanted.folder), wanted.number)
                    self._loaded.append(wanted.number)
                    for old in self._loaded[:-KEPT]:
                        if not self._running[old] and old != self._versions.serving.number:
                            self._loaded.remove(old)
                            await self._engine.unload_adapter(pinned(old))
        return wanted.number

    def identity(self) -> dict[str, Any]:
        """The entry of the engine in a run manifest, with the version that answers."""
        return {**self._engine.identity(), "version": self.policy_version}

    async def aclose(self) -> None:
        """Close the engine."""
        await self._engine.aclose()
