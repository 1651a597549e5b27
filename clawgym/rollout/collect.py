"""Run episodes whose model calls go through a gateway and are recorded in the pool with exact tokens.

Invariant: each attempt has its own session, which is always closed with the outcome of the attempt, also after an
infrastructure error. So a group in the pool never waits for a lost episode.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from clawgym.agents.protocol import Agent, ResidentAgent
from clawgym.engines.protocol import Engine
from clawgym.errors import ClawGymError
from clawgym.gateway.request import SessionCredentials, SessionRequest
from clawgym.gateway.server import Gateway
from clawgym.gateway.session_engine import SessionEngine
from clawgym.pool import EpisodeEnd
from clawgym.records import Outcome
from clawgym.rollout import Graded, run_episode
from clawgym.rollout.request import Ended, EpisodeRequest
from clawgym.sandbox.protocol import Backend

__all__ = ["AgentMaker", "collect_episode", "in_process", "over_http"]

AgentMaker = Callable[[Gateway, SessionCredentials], Agent]
"""Makes the agent of one episode; its model calls go to this session. The agent is closed after the episode."""


def over_http(make: Callable[[str, str], Agent]) -> AgentMaker:
    """Make an agent from a ``base_url`` and an API key, as any client of an OpenAI-compatible endpoint takes them."""
    return lambda gateway, opened: make(gateway.base_url(opened), opened.secret)


def in_process(make: Callable[[Engine], Agent]) -> AgentMaker:
    """Make an agent from an engine that calls the gateway in this process, without HTTP. The records are the same."""
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

    Args:
        request: the task, the seed, and how the episode is rewarded and recorded.
        agent: makes the agent of this episode, or is a :class:`ResidentAgent` that uses ``gateway``. The latter serves
            many episodes and is not closed.
        backend: makes the sandboxes.
        gateway: records the model calls.
        opening: awaited before the session opens; for a :class:`ResidentAgent`, after its program has started.
        graded: awaited before the episode is closed.

    Returns:
        The episode with its turns, and its reward.

    Raises as :func:`~clawgym.rollout.run_episode` does, after the session was closed as ``infra``.

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
        made = agent(gateway, opened)
        try:
            ended = await run_episode(request, made, backend)
        finally:
            await made.aclose()
    except BaseException as error:
        await gateway.close_session(opened.id, EpisodeEnd(outcome=Outcome.INFRA, cause=type(error).__name__))
        raise
    ended = await _close(gateway, opened.id, ended, graded)
    try:
        turns = await gateway.in_pool(lambda pool: pool.turns(opened.id))
    except ClawGymError:
        turns = ()
    return replace(ended, episode=replace(ended.episode, turns=turns, session=opened.id))


async def _collect_resident(
    request: EpisodeRequest,
    agent: ResidentAgent,
    backend: Backend,
    gateway: Gateway,
    opening: Callable[[], Awaitable[None]] | None,
    graded: Graded | None,
) -> Ended:
    opened_session = False

    async def before_session() -> None:
        nonlocal opened_session
        if opening is not None:
            await opening()
        opened_session = True

    ended = await run_episode(request, agent, backend, opening=before_session, graded=graded)
    if not opened_session:  # the program never started: its group must not wait for this episode
        if opening is not None:
            await opening()
        opened = await gateway.open_session(request.session_of(agent.name))
        ended = await _close(gateway, opened.id, ended, graded)
    return ended


async def _close(gateway: Gateway, session: str, ended: Ended, graded: Graded | None) -> Ended:
    """Close the session. If ``graded`` fails, its error is raised afterwards."""
    try:
        if graded is not None:
            ended = replace(ended, penalties=await graded(session, ended))
    finally:
        await gateway.close_session(session, ended.end())
    return ended
