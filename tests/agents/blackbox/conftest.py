"""Fixtures: a black-box agent in a real sandbox, with a real gateway and pool and a scripted engine."""

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

__all__ = ["Setup", "bash", "task"]

from ...rollouts import episode_of


def bash(command: str) -> str:
    """A model's reply that calls bash."""
    return "<tool_call>\n" + json.dumps({"name": "bash", "arguments": {"command": command}}) + "\n</tool_call>"


def task(**limits: Any) -> Task:
    """A task to sum some numbers."""
    return sum_task(limits=Limits(**{"verify_seconds": 10, "memory_mb": 256, "disk_mb": 64, **limits}))


class Setup:
    """An agent with its backend, gateway, engine and pool."""

    def __init__(self, agent: BlackBoxAgent, engine: ScriptedEngine, gateway: Gateway, backend: Backend) -> None:
        self.agent, self.engine, self.gateway, self.backend = agent, engine, gateway, backend
        self.pool = gateway.pool

    async def attempt(self, of: Task | None = None, **more: Any) -> Episode:
        return await episode_of(of or task(), self.agent, self.backend, **{"seed": 7, **more})

    @property
    def stored(self) -> PooledEpisode:
        """The only episode in the pool."""
        (episode,) = self.pool.episodes()
        return episode

    @property
    def sandboxes(self) -> list[str]:
        """The open sandboxes."""
        return list(self.backend.sandboxes)  # type: ignore[attr-defined]


@pytest.fixture
async def black_box(
    backend: Backend, model_folder: Path, tmp_path: Path
) -> AsyncIterator[Callable[..., Awaitable[Setup]]]:
    """``await black_box(say, claw=..., gateway={...}, engine={...}, **options)`` makes a :class:`Setup`.

    ``say`` is a list of replies, or the ``say`` of :class:`ScriptedEngine`; ``options`` are those of the agent.
    """
    async with contextlib.AsyncExitStack() as stack:

        async def make(
            say: Callable[[str, int], Any] | Sequence[Any],
            *,
            claw: Any = None,
            gateway: dict[str, Any] | None = None,
            engine: dict[str, Any] | None = None,
            **options: Any,
        ) -> Setup:
            answers = say if callable(say) else lambda _, n: say[min(n, len(say) - 1)]
            how = {"at_once": 64, "context_window": 16384, **(engine or {})}
            scripted = ScriptedEngine(model_folder, answers, **how)
            pool = stack.enter_context(contextlib.closing(Pool(tmp_path / "pool.db")))
            running = await stack.enter_async_context(Gateway(scripted, pool, **(gateway or {})))
            agent = BlackBoxAgent(claw or hands(), gateway=running, **options)
            stack.push_async_callback(agent.aclose)
            return Setup(agent, scripted, running, backend)

        yield make
