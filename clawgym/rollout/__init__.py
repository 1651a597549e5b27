"""The episode loop shared by environments, evaluation and training.

:func:`run_episode` takes an :class:`EpisodeRequest` and returns :class:`Ended`; :class:`Attempt` has its phases.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Protocol

from clawgym.agents.protocol import Agent, AgentContext, ResidentAgent
from clawgym.errors import EngineError, InfraError, TaskError
from clawgym.rollout.attempt import Attempt, SavedAttempt, Stop, fault_of, transcript_payload
from clawgym.rollout.request import Ended, EpisodeRequest, RewardName, reward_of
from clawgym.sandbox.protocol import Backend

__all__ = [
    "Attempt",
    "Ended",
    "EpisodeRequest",
    "Graded",
    "RewardName",
    "SavedAttempt",
    "Stop",
    "fault_of",
    "reward_of",
    "run_episode",
    "transcript_payload",
]


class Graded(Protocol):
    """A callback between grading and closing an episode in the pool. Training gets the episode only after that."""

    async def __call__(self, session: str, ended: Ended) -> Mapping[str, float]:
        """Store process rewards for the turns of ``session``, if any, and return the penalties of the episode by name,
        each 0 or less."""
        ...


async def run_episode(
    request: EpisodeRequest,
    agent: Agent,
    backend: Backend,
    *,
    opening: Callable[[], Awaitable[None]] | None = None,
    graded: Graded | None = None,
) -> Ended:
    """Let ``agent`` attempt the task once in a new sandbox of ``backend``, and grade the workspace.

    Args:
        request: the task, the seed, and how the episode is rewarded and recorded.
        agent: the agent; it is not closed.
        backend: makes the sandboxes.
        opening: awaited before the gateway session of a :class:`ResidentAgent` opens.
        graded: awaited before the episode of a :class:`ResidentAgent` is closed in the pool.

    Returns:
        The episode and its reward, whatever the agent did.

    Raises:
        AgentError: the agent cannot work on this task at all.
        UnsupportedTask: the task cannot run here.
    """
    resident = agent if isinstance(agent, ResidentAgent) else None
    attempt = Attempt(request, backend, agent.name, resident=resident)
    try:
        ended = await _attempt_it(attempt, agent, opening)
    except BaseException:
        if resident is not None and attempt.opened is not None:
            await _settle(resident, attempt, await attempt.abandon(), graded)
        raise
    if resident is not None and attempt.opened is not None:
        ended = await _settle(resident, attempt, ended, graded)
    return ended


async def _settle(agent: ResidentAgent, attempt: Attempt, ended: Ended, graded: Graded | None) -> Ended:
    """Let the agent close its session. If ``graded`` fails, its error is raised afterwards."""
    assert attempt.opened is not None
    session = agent.session_of(attempt.opened)
    try:
        if session is not None and graded is not None:
            ended = replace(ended, penalties=await graded(session, ended))
    finally:
        artifacts = await agent.close_session(attempt.opened, ended.end())
    files = {**ended.episode.files, **artifacts.files}
    return replace(ended, episode=replace(ended.episode, usage=artifacts.usage, files=files, session=session))


async def _attempt_it(attempt: Attempt, agent: Agent, opening: Callable[[], Awaitable[None]] | None) -> Ended:
    try:
        await attempt.open()
    except (InfraError, TaskError) as error:
        attempt.fail_by(error, host="setup")
        return await attempt.abandon()
    request = attempt.request
    context = AgentContext(
        task=attempt.task,
        sandbox=attempt.opened or attempt.sandbox,
        tools=attempt.tools,
        seed=request.seed,
        sample=request.sample,
        record=attempt.steps.append,
        record_turn=attempt.turns.append,
        user=attempt.user,
        session=request.session_of(agent.name),
        opening=opening,
    )

    async def work() -> Stop:
        report = await agent.run(context)
        attempt.final_message, attempt.usage = report.final_message, report.usage
        return Stop(report.stop, report.cause)

    try:
        await attempt.work(work)
    except (EngineError, InfraError, TaskError) as error:
        attempt.fail_by(error)
    except BaseException:
        await attempt.abandon()
        raise
    if attempt.stop is not None and attempt.stop.kind == "infra":
        return await attempt.abandon()
    return await attempt.finish()
