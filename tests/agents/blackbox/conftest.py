"""A black box in a real box, before a real gateway with a scripted engine and a real pool."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from clawgym.agents.blackbox import BlackBoxAgent
from clawgym.gateway.server import Gateway
from clawgym.pool import Pool
from clawgym.pool.states import PooledEpisode
from clawgym.records import Episode, Limits, Task
from clawgym.sandbox import Backend

from ...gateway.scripted import ScriptedEngine
from ...verifiers.tasks_for_tests import task as sum_task
from .hands import hands

__all__ = ["Room", "bash", "task"]

from ...rollouts import episode_of


def bash(command: str) -> str:
    """What a model says that calls bash."""
    return "<tool_call>\n" + json.dumps({"name": "bash", "arguments": {"command": command}}) + "\n</tool_call>"


def task(**limits: Any) -> Task:
    """Sum some numbers."""
    return sum_task(limits=Limits(**{"verify_seconds": 10, "memory_mb": 256, "disk_mb": 64, **limits}))


class Room:
    """An agent and everything around it."""

    def __init__(self, agent: BlackBoxAgent, engine: ScriptedEngine, gateway: Gateway, backend: Backend) -> None:
        self.agent, self.engine, self.gateway, self.backend = agent, engine, gateway, backend
        self.pool = gateway.pool

    async def attempt(self, of: Task | None = None, **more: Any) -> Episode:
        return await episode_of(of or task(), self.agent, self.backend, **{"seed": 7, **more})

    @property
    def stored(self) -> PooledEpisode:
        """The one episode of the pool."""
        (episode,) = self.pool.episodes()
        return episode

    @property
    def boxes(self) -> list[str]:
        """Those that are open."""
        return list(self.backend.sandboxes)  # type: ignore[attr-defined]


@pytest.fixture
async def room(backend: Backend, model_folder: Path, tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[Room]]]:
    """``await room(say, claw=..., gateway={...}, engine={...}, **options of the agent)``; ``say`` is a list of answers,
    or as :class:`ScriptedEngine` takes it."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(
            say: Callable[[str, int], Any] | Sequence[Any],
            *,
            claw: Any = None,
            gateway: dict[str, Any] | None = None,
            engine: dict[str, Any] | None = None,
            **options: Any,
        ) -> Room:
            answers = say if callable(say) else lambda _, n: say[min(n, len(say) - 1)]
            how = {"at_once": 64, "context_window": 16384, **(engine or {})}
            scripted = ScriptedEngine(model_folder, answers, **how)
            pool = stack.enter_context(contextlib.closing(Pool(tmp_path / "pool.db")))
            running = await stack.enter_async_context(Gateway(scripted, pool, **(gateway or {})))
            agent = BlackBoxAgent(claw or hands(), gateway=running, **options)
            stack.push_async_callback(agent.aclose)
            return Room(agent, scripted, running, backend)

        yield make
