"""The tools of a task, opened as in an attempt."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from clawgym.records import Task
from clawgym.sandbox import Backend, Sandbox
from clawgym.tools import Tools, open_tools, sandbox_spec

from ..sandbox.conftest import docker_engine

__all__ = ["Opened", "sandboxes", "docker_engine", "leaves_nothing", "opened"]


@dataclass
class Opened:
    sandbox: Sandbox
    tools: Tools

    async def __call__(self, *calls: object, timeout: float | None = None) -> list[str]:
        """The texts of the observations of ``calls``."""
        return [seen.content for seen in await self.tools.call_all(calls, timeout=timeout)]  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def opened(task: Task, backend: Backend) -> AsyncIterator[Opened]:
    """The tools of ``task``, with the episode's sandbox."""
    sandbox = await backend.create(sandbox_spec(task))
    try:
        if task.inputs:
            await sandbox.put(task.inputs, task.workspace)
        tools = await open_tools(task, sandbox, backend)
        try:
            yield Opened(sandbox, tools)
        finally:
            await tools.aclose()
    finally:
        await sandbox.close()


def sandboxes(backend: Backend) -> set[str]:
    """Those that are open."""
    return set(backend.sandboxes)  # type: ignore[attr-defined]


async def leaves_nothing(backend: Backend, begin: Callable[[], Coroutine[Any, Any, Any]], *delays: float) -> None:
    """Cancelled after each of ``delays`` seconds, what ``begin`` does leaves no sandbox."""
    for delay in delays:
        running = asyncio.ensure_future(begin())
        await asyncio.sleep(delay)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        async with asyncio.timeout(10):
            while sandboxes(backend):  # noqa: ASYNC110  # a sandbox that was being made ends in the background
                await asyncio.sleep(0.02)
