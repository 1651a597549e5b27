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

    A task whose verifier fails on its own has none, and its corrected score stays unknown. Raises
    :class:`~clawgym.errors.InfraError` where the host fails three times: a run must not begin without a floor that its
    continuation would find.
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
            for again in (True, True, False):
                try:
                    floors[task.id] = await measure_floor(task, backend)
                except GradingError:
                    pass
                except InfraError as error:
                    if not again:
                        raise InfraError(
                            f"what doing nothing pays on {task.id} could not be measured: {error}"
                        ) from error
                    await asyncio.sleep(1)
                    continue
                break
        done += 1
        on_progress(done, len(unknown))

    await asyncio.gather(*(one(task) for task in unknown))
    return floors
