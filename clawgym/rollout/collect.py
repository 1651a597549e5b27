"""Tasks, an agent behind a gateway: episodes with exact tokens in the pool.

Invariant: each attempt has a session of its own, closed with the outcome that the verifier gave (``infra`` included, so
that its group does not wait for it), whatever happens to the agent.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from clawgym.agents.protocol import Agent, ResidentAgent
from clawgym.engines.protocol import Engine
from clawgym.errors import ClawGymError
from clawgym.gateway.here import SessionEngine
from clawgym.gateway.server import Gateway
from clawgym.gateway.sessions import Opened
from clawgym.records import Episode, Outcome, Task
from clawgym.rollout import run_episode
from clawgym.sandbox.protocol import Backend

__all__ = ["collect_episode", "collect_here", "collect_resident"]

Finished = Callable[[str, Episode], Awaitable[None]]
Opening = Callable[[], Awaitable[None]]


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
    keep_workspace: bool = True,
    finished: Finished | None = None,
    **session: Any,
) -> Episode:
    """One attempt at ``task`` by ``agent(base_url, api_key)``, recorded by ``gateway``; its reward is the strict score.

    ``group`` is one of the pool's (:meth:`~clawgym.pool.Pool.open_group`); ``session`` is what
    :meth:`~clawgym.gateway.server.Gateway.open_session` takes. ``finished`` is awaited with the session's id and the
    graded episode before the episode is closed, for rewards that training must wait for. Returns the episode with its
    turns. Raises as :func:`~clawgym.rollout.run_episode` does, after the session was closed as ``infra``.
    """
    return await _collect(
        task,
        lambda opened: agent(gateway.base_url(opened), opened.secret),
        backend,
        gateway,
        keep_workspace,
        finished,
        {"seed": seed, "sample": sample, "group": group, "channel": channel, **session},
    )


async def collect_here(
    task: Task,
    agent: Callable[[Engine], Agent],
    backend: Backend,
    gateway: Gateway,
    *,
    seed: int,
    sample: int = 0,
    group: str | None = None,
    channel: str = "train",
    keep_workspace: bool = True,
    finished: Finished | None = None,
    **session: Any,
) -> Episode:
    """:func:`collect_episode` for an agent of this process, ``agent(engine)``, which needs no wire to the gateway."""
    return await _collect(
        task,
        lambda opened: agent(SessionEngine(gateway, opened)),
        backend,
        gateway,
        keep_workspace,
        finished,
        {"seed": seed, "sample": sample, "group": group, "channel": channel, **session},
    )


async def collect_resident(
    task: Task,
    agent: ResidentAgent,
    backend: Backend,
    gateway: Gateway,
    *,
    opening: Opening | None = None,
    finished: Finished | None = None,
    seed: int,
    sample: int = 0,
    keep_workspace: bool = True,
    **session: Any,
) -> Episode:
    """:func:`collect_episode` for a program that lives in the boxes of ``agent`` and speaks to ``gateway``. The agent
    serves many episodes and stays the caller's to close.

    The session opens when the program is up and its work begins; ``opening`` is awaited just before. Where that never
    came, the attempt has a session all the same, closed as ``infra``, so that its group does not wait for it."""
    came = False

    async def opens() -> None:
        nonlocal came
        if opening is not None:
            await opening()
        came = True

    about = {"channel": "train", **session}
    episode = await run_episode(
        task, agent, backend, seed=seed, sample=sample, keep_workspace=keep_workspace,
        session={**about, "opening": opens, "finished": finished},
    )  # fmt: skip
    if not came:
        if opening is not None:
            await opening()
        about |= {"task_id": task.id, "task_hash": task.content_hash, "seed": seed, "sample": sample}
        opened = await gateway.open_session(**about)
        await _settle(gateway, opened.id, episode, finished)
    return episode


async def _collect(
    task: Task,
    agent: Callable[[Opened], Agent],
    backend: Backend,
    gateway: Gateway,
    keep_workspace: bool,
    finished: Finished | None,
    about: dict[str, Any],
) -> Episode:
    opened = await gateway.open_session(task_id=task.id, task_hash=task.content_hash, **about)
    worker = agent(opened)
    try:
        episode = await run_episode(
            task, worker, backend, seed=about["seed"], sample=about["sample"], keep_workspace=keep_workspace
        )
    except BaseException as error:
        await gateway.close_session(opened.id, outcome=Outcome.INFRA, cause=type(error).__name__)
        raise
    finally:
        await worker.aclose()
    await _settle(gateway, opened.id, episode, finished)
    try:
        turns = await gateway.run_in_pool("turns", opened.id)
    except ClawGymError:
        turns = ()
    return replace(episode, turns=turns)


async def _settle(gateway: Gateway, session: str, episode: Episode, finished: Finished | None) -> None:
    """Close the session as the episode ended, also where ``finished`` failed; then its error is raised."""
    try:
        if finished is not None:
            await finished(session, episode)
    except Exception:
        await gateway.settle(session, episode)
        raise
    await gateway.settle(session, episode)
