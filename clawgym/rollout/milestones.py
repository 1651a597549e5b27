"""Progress of an episode after each of the agent's turns, by the task's own verifier.

Phi is the mean score of the verifier's plain checks on a copy of the workspace, in [0, 1]. It is measured in a
grading sandbox while the agent waits for its next reply. Nothing of it can be seen in the agent's sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from clawgym.errors import InfraError, SandboxError
from clawgym.records import GradingMode, Observation, Task, ToolCall
from clawgym.sandbox.protocol import Archive, Backend, Sandbox, Snapshot
from clawgym.tools.protocol import Tools, ignore
from clawgym.verifiers.grading import Subject, progress
from clawgym.verifiers.reuse import Grades, is_pure

__all__ = ["Milestones", "MilestonesState", "can_measure"]

_LARGEST = 32 * 2**20
"""Bytes of a workspace; a larger one is not measured."""


MilestonesState = tuple[dict[str, "asyncio.Task[float | None]"], tuple["asyncio.Task[float | None]", ...]]
"""Finished measurements: by workspace, and in the order of the turns."""


def can_measure(task: Task) -> bool:
    """Whether the progress of ``task`` can be measured: its verifier is code, and needs no running program."""
    return task.verifier.mode is not GradingMode.LIVE and not task.verifier.grader


class Milestones:
    """Measures one episode. Wrap its tools with :meth:`measured`; :meth:`values` gives the result."""

    def __init__(self, task: Task, sandbox: Sandbox, backend: Backend, grades: Grades | None = None) -> None:
        self._task = task
        self._sandbox = sandbox
        self._backend = backend
        self._grades = grades
        self._known: dict[str, asyncio.Task[float | None]] = {}
        self._points: list[asyncio.Task[float | None]] = []

    def measured(self, tools: Tools) -> Tools:
        """The same tools; after each reply whose calls they ran, the progress is measured."""
        return _MeasuredTools(tools, self)

    async def take(self) -> None:
        """Copy the files as they are, and start to measure them. Waits for the measurement before the last one."""
        if len(self._points) > 1:
            await asyncio.wait([self._points[-2]])
        forks = self._task.verifier.mode is GradingMode.FORK
        try:
            archive = await self._sandbox.get_archive(self._task.workspace, max_bytes=_LARGEST)
            snapshot = await self._sandbox.snapshot() if forks else None
        except SandboxError:  # too large, or no folder any more: the agent may cause that
            self._points.append(asyncio.create_task(_nothing()))
            return
        key = _key(archive)
        if key not in self._known or forks:  # a fork grades files outside of the workspace too
            self._known[key] = asyncio.create_task(self._measure(archive, snapshot, [*self._points[-1:]]))
        self._points.append(self._known[key])

    async def values(self) -> tuple[float | None, ...]:
        """Phi before the first turn, and after each turn; None where it could not be measured."""
        return tuple(await asyncio.gather(*self._points))

    async def unstable(self, final: Subject) -> bool:
        """Whether two measurements of the final workspace differ, so that none of them can be relied on. False if it
        could not be measured, and without a measurement for a pure verifier."""
        await self.values()
        if is_pure(self._task.verifier):
            return False
        try:
            known = None if final.snapshot is not None else self._known.get(_key(final.workspace))
            first = await (progress(self._task, final, self._backend) if known is None else known)
            return first is not None and first != await progress(self._task, final, self._backend)
        except (InfraError, SandboxError):
            return False

    async def save(self) -> MilestonesState:
        """Wait for the measurements so far, and return them."""
        await asyncio.gather(*self._points)
        return dict(self._known), tuple(self._points)

    def load(self, state: MilestonesState) -> None:
        """Continue after the measurements of :meth:`save`."""
        known, points = state
        self._known, self._points = dict(known), list(points)

    async def aclose(self) -> None:
        """End all measurements."""
        for point in self._points:
            point.cancel()
        await asyncio.gather(*self._points, return_exceptions=True)

    async def _measure(
        self, archive: Archive, snapshot: Snapshot | None, before: list[asyncio.Task[float | None]]
    ) -> float | None:
        try:
            if before:  # one grading sandbox for each episode at a time
                await asyncio.wait(before)
            return await progress(self._task, Subject(archive, snapshot), self._backend, grades=self._grades)
        except (InfraError, SandboxError):
            return None
        finally:
            if snapshot is not None:
                with contextlib.suppress(InfraError):
                    await self._backend.drop(snapshot)


class _MeasuredTools:
    """Tools that measure the progress after each reply."""

    def __init__(self, tools: Tools, milestones: Milestones) -> None:
        self._tools = tools
        self._milestones = milestones

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tools, name)

    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]:
        return self._tools.schemas

    async def call_all(
        self,
        calls: Sequence[ToolCall],
        *,
        timeout: float | None = None,
        on_observation: Callable[[Observation], None] = ignore,
    ) -> list[Observation]:
        found = await self._tools.call_all(calls, timeout=timeout, on_observation=on_observation)
        await self._milestones.take()
        return found

    async def aclose(self) -> None:
        await self._tools.aclose()


def _key(archive: Archive) -> str:
    return hashlib.sha256(archive.tar).hexdigest()


async def _nothing() -> None:
    return None
