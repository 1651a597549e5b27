"""Runs episodes for tests."""

from __future__ import annotations

from typing import Any

from clawgym.agents.protocol import Agent
from clawgym.records import Episode, Task
from clawgym.rollout import EpisodeRequest, run_episode
from clawgym.sandbox import Backend


async def episode_of(task: Task, agent: Agent, backend: Backend, **request: Any) -> Episode:
    """Run one episode of ``agent``; ``request``: fields of :class:`~clawgym.rollout.EpisodeRequest`, the seed is 0."""
    ended = await run_episode(EpisodeRequest(task=task, **{"seed": 0, **request}), agent, backend)
    return ended.episode
