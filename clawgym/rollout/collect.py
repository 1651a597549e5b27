"""Tasks, any agent that speaks OpenAI's protocol, a gateway: episodes with exact tokens in the pool.

Invariant: each attempt has a session of its own, closed with the outcome that the verifier gave (``infra`` included, so
that its group does not wait for it), whatever happens to the agent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from clawgym.agents.protocol import Agent
from clawgym.errors import ClawGymError
from clawgym.gateway.server import Gateway
from clawgym.records import Episode, Outcome, Task
from clawgym.rollout import run_episode
from clawgym.sandbox.protocol import Backend

__all__ = ["collect_episode"]


async def collect_episode(
    task: Task,
    agent: Callable[[str, str], Agent],
    backend: Backend,
    gateway: Gateway,
    *,
    seed: int,
    sample: int = 0,
    group: str | None = None,
    channel: str = "train",
    **session: Any,
) -> Episode:
    """One attempt at ``task`` by ``agent(base_url, api_key)``, recorded by ``gateway``; its reward is the strict score.

    ``group`` is one of the pool's (:meth:`~clawgym.pool.Pool.open_group`); ``session`` is what
    :meth:`~clawgym.gateway.server.Gateway.open_session` takes. Returns the episode with its turns. Raises as
    :func:`~clawgym.rollout.run_episode` does, after the session was closed as ``infra``.
    """
    opened = await gateway.open_session(
        channel=channel, task_id=task.id, task_hash=task.content_hash, group=group, sample=sample, seed=seed, **session
    )
    worker = agent(gateway.base_url(opened), opened.secret)
    try:
        episode = await run_episode(task, worker, backend, seed=seed, sample=sample)
    except BaseException as error:
        await gateway.close_session(opened.id, outcome=Outcome.INFRA, cause=type(error).__name__)
        raise
    finally:
        await worker.aclose()
    await gateway.settle(opened.id, episode)
    try:
        turns = await gateway.run_in_pool("turns", opened.id)
    except ClawGymError:
        turns = ()
    return replace(episode, turns=turns)
