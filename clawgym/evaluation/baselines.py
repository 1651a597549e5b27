"""No-model baselines of a whole task set, measured before the run that needs them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from clawgym.errors import GradingError, InfraError
from clawgym.records import Task, TaskSet
from clawgym.sandbox.protocol import Backend
from clawgym.verifiers.baselines import known_baseline, measure_baseline

__all__ = ["measure_baselines"]

_CONCURRENCY = 8
_ATTEMPTS = 3


async def measure_baselines(
    task_set: TaskSet, backend: Backend, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, float]:
    """The no-model baseline of each task, by task id, in [0, 1].

    Baselines that are not known yet are measured (four gradings each) and cached. ``on_progress`` gets the number of
    tasks measured so far and of all tasks to measure. A task whose verifier fails without an agent's work has no
    baseline, so its baseline-adjusted score stays unknown.

    Raises :class:`~clawgym.errors.InfraError` if a task ends three times by an infrastructure error: a run that starts
    without a baseline could not be resumed once the baseline is known.
    """
    baselines: dict[str, float] = {}
    unknown: list[Task] = []
    for task in task_set.tasks:
        known = known_baseline(task)
        if known is not None:
            baselines[task.id] = known
        elif not task.unsupported:
            unknown.append(task)
    slots = asyncio.Semaphore(_CONCURRENCY)
    done = 0

    async def measure(task: Task) -> None:
        nonlocal done
        async with slots:
            for attempt in range(_ATTEMPTS):
                try:
                    baselines[task.id] = await measure_baseline(task, backend)
                except GradingError:
                    pass
                except InfraError as error:
                    if attempt == _ATTEMPTS - 1:
                        raise InfraError(f"cannot measure the no-model baseline of {task.id}: {error}") from error
                    await asyncio.sleep(1)
                    continue
                break
        done += 1
        on_progress(done, len(unknown))

    await asyncio.gather(*(measure(task) for task in unknown))
    return baselines
