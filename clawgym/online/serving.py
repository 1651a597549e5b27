"""An engine that samples with the version that answers now.

Invariants: a reply is sampled by one version. A change pauses nothing: replies that run end with the version that they
began with, and the next one has the new version. A change in the log, by any process, holds for the next request.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Protocol, cast

from clawgym.engines.protocol import GenerateRequest, TokenEngine, Tokens
from clawgym.online.versions import Versions

__all__ = ["AdapterEngine", "VersionedEngine"]

KEPT = 4
"""Adapters that stay loaded, so that going back to one takes no time."""


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
        self._running = Counter[int | None]()
        self._changing = asyncio.Lock()
        self.name = engine.name
        self.context_window = engine.context_window
        self.tokenizer = engine.tokenizer

    @property
    def policy_version(self) -> int:
        """The version that answers."""
        return self._versions.serving.number

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Tokens]:
        """See :class:`~clawgym.engines.protocol.TokenEngine`. A request that names an adapter keeps it."""
        if request.adapter is not None:
            number = None
        else:
            number = await self.ready()
            request = replace(request, adapter=_adapter(number))
        self._running[number] += 1
        try:
            async with aclosing(cast(AsyncGenerator[Tokens], self._engine.generate(request))) as stream:
                async for tokens in stream:
                    yield tokens
        finally:
            self._running[number] -= 1

    async def ready(self, number: int | None = None) -> int:
        """Load a version, by default the one that answers, and return its number."""
        wanted = self._versions.serving if number is None else self._versions[number]
        if wanted.number and wanted.number not in self._loaded:
            async with self._changing:
                if wanted.number not in self._loaded:
                    await self._engine.load_adapter(f"v{wanted.number}", os.fspath(wanted.folder), wanted.number)
                    self._loaded.append(wanted.number)
                    for old in self._loaded[:-KEPT]:
                        if not self._running[old] and old != self._versions.serving.number:
                            self._loaded.remove(old)
                            await self._engine.unload_adapter(f"v{old}")
        return wanted.number

    def identity(self) -> dict[str, Any]:
        """The entry of the engine in a run manifest, with the version that answers."""
        return {**self._engine.identity(), "version": self.policy_version}

    async def aclose(self) -> None:
        """Close the engine."""
        await self._engine.aclose()


def _adapter(number: int) -> str | None:
    return f"v{number}" if number else None
