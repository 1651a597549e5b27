"""Floors of a whole task set, before the run that needs them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from clawgym.errors import GradingError, InfraError
from clawgym.records import Task, TaskSet
from clawgym.sandbox.protocol import Backend
from clawgym.verifiers.floors import known_floor, measure_floor

__all__ = ["measure_floors"]


async def measure_floors(
    task_set: TaskSet, backend: Backend, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, float]:
    """Task id -> floor. Those that are not known yet are measured (four gradings each) and kept for the next time.

    A task whose verifier fails on its own has none, and its corrected score stays unknown.
    """
    floors: dict[str, float] = {}
    unknown: list[Task] = []
    for task in task_set.tasks:
        known = known_floor(task)
        if known is not None:
            floors[task.id] = known
        elif not task.unsupported:
            unknown.append(task)
    turn = asyncio.Semaphore(8)
    done = 0

    async def one(task: Task) -> None:
        nonlocal done
        async with turn:
            try:
                floors[task.id] = await measure_floor(task, backend)
            except (GradingError, InfraError):
                pass
        done += 1
        on_progress(done, len(unknown))

    await asyncio.gather(*(one(task) for task in unknown))
    return floors
