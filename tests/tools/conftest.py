"""Tools of a task, opened as an attempt opens them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from clawgym.records import Task
from clawgym.sandbox import Backend, Sandbox
from clawgym.tools import Tools, box_spec, open_tools

from ..sandbox.conftest import docker_engine

__all__ = ["Opened", "boxes", "docker_engine", "leaves_nothing", "opened"]


@dataclass
class Opened:
    box: Sandbox
    tools: Tools

    async def __call__(self, *calls: object, timeout: float | None = None) -> list[str]:
        """The texts of the observations of ``calls``."""
        return [seen.content for seen in await self.tools.call_all(calls, timeout=timeout)]  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def opened(task: Task, backend: Backend) -> AsyncIterator[Opened]:
    """The tools of ``task``, with the episode's box."""
    box = await backend.create(box_spec(task))
    try:
        if task.inputs:
            await box.put(task.inputs, task.workspace)
        tools = await open_tools(task, box, backend)
        try:
            yield Opened(box, tools)
        finally:
            await tools.aclose()
    finally:
        await box.close()


def boxes(backend: Backend) -> set[str]:
    """Those that are open."""
    return set(backend.boxes)  # type: ignore[attr-defined]


async def leaves_nothing(backend: Backend, begin: Callable[[], Coroutine[Any, Any, Any]], *delays: float) -> None:
    """Cancelled after each of ``delays`` seconds, what ``begin`` does leaves no box."""
    for delay in delays:
        running = asyncio.ensure_future(begin())
        await asyncio.sleep(delay)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        async with asyncio.timeout(10):
            while boxes(backend):  # noqa: ASYNC110  # a box that was being made ends in the background
                await asyncio.sleep(0.02)
