"""Episodes of an agent behind a gateway, recorded in the pool with exact tokens.

Invariant: each attempt has a session of its own, which is closed with the outcome of the grading, whatever happens to
the agent. Infrastructure errors are no exception, so that a group never waits for an episode that is lost.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from clawgym.agents.protocol import Agent, ResidentAgent
from clawgym.engines.protocol import Engine
from clawgym.errors import ClawGymError
from clawgym.gateway.here import SessionEngine
from clawgym.gateway.server import Gateway
from clawgym.gateway.sessions import Opened, SessionRequest
from clawgym.pool import EpisodeEnd
from clawgym.records import Outcome
from clawgym.rollout import Graded, run_episode
from clawgym.rollout.request import Ended, EpisodeRequest
from clawgym.sandbox.protocol import Backend

__all__ = ["AgentMaker", "collect_episode", "in_process", "over_http"]

AgentMaker = Callable[[Gateway, Opened], Agent]
"""Makes the agent of one episode, whose model calls go to this session. It is closed after the episode."""


def over_http(make: Callable[[str, str], Agent]) -> AgentMaker:
    """An agent that takes a ``base_url`` and an API key, as any client of an OpenAI-compatible endpoint does."""
    return lambda gateway, opened: make(gateway.base_url(opened), opened.secret)


def in_process(make: Callable[[Engine], Agent]) -> AgentMaker:
    """An agent of this process, which reaches the gateway without HTTP. What is recorded is the same."""
    return lambda gateway, opened: make(SessionEngine(gateway, opened))


async def collect_episode(
    request: EpisodeRequest,
    agent: AgentMaker | ResidentAgent,
    backend: Backend,
    gateway: Gateway,
    *,
    opening: Callable[[], Awaitable[None]] | None = None,
    graded: Graded | None = None,
) -> Ended:
    """Run one episode whose model calls ``gateway`` records, and close it in the pool with its reward.

    ``agent`` is made for the episode and closed after it, or it is a program with sandboxes of its own that speaks to
    ``gateway``; that one serves many episodes and stays the caller's. ``opening`` is awaited before the session opens:
    for a program, that is when it has started. ``graded`` is awaited before the episode is closed.
    Returns the end of the episode, with its turns. Raises as :func:`~clawgym.rollout.run_episode` does, after the
    session was closed as ``infra``.

    >>> ended = await collect_episode(  # doctest: +SKIP
    ...     EpisodeRequest(task=task, seed=0, session=SessionRequest(group=group)),
    ...     over_http(lambda base_url, key: MyAgent(base_url, key)),
    ...     backend,
    ...     gateway,
    ... )
    """
    request = replace(request, session=request.session or SessionRequest())
    if isinstance(agent, ResidentAgent):
        return await _collect_resident(request, agent, backend, gateway, opening, graded)
    if opening is not None:
        await opening()
    opened = await gateway.open_session(request.session_of(""))
    try:
        worker = agent(gateway, opened)
        try:
            ended = await run_episode(request, worker, backend)
        finally:
            await worker.aclose()
    except BaseException as error:
        await gateway.close_session(opened.id, EpisodeEnd(outcome=Outcome.INFRA, cause=type(error).__name__))
        raise
    ended = await _close(gateway, opened.id, ended, graded)
    try:
        turns = await gateway.in_pool(lambda pool: pool.turns(opened.id))
    except ClawGymError:
        turns = ()
    return replace(ended, episode=replace(ended.episode, turns=turns))


async def _collect_resident(
    request: EpisodeRequest,
    agent: ResidentAgent,
    backend: Backend,
    gateway: Gateway,
    opening: Callable[[], Awaitable[None]] | None,
    graded: Graded | None,
) -> Ended:
    began = False

    async def begins() -> None:
        nonlocal began
        if opening is not None:
            await opening()
        began = True

    ended = await run_episode(request, agent, backend, opening=begins, graded=graded)
    if not began:  # the program never started: its group must not wait for this episode
        if opening is not None:
            await opening()
        opened = await gateway.open_session(request.session_of(agent.name))
        ended = await _close(gateway, opened.id, ended, graded)
    return ended


async def _close(gateway: Gateway, session: str, ended: Ended, graded: Graded | None) -> Ended:
    """Close the session; also if ``graded`` fails, whose error is raised afterwards."""
    try:
        if graded is not None:
            ended = replace(ended, penalties=await graded(session, ended.episode))
    finally:
        await gateway.close_session(session, ended.end())
    return ended
