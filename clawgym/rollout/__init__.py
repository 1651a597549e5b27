"""The one episode loop: a box, an agent, a verifier. Environments and evaluation are faces of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clawgym.agents.protocol import Agent, AgentContext, ResidentAgent
from clawgym.errors import EngineError, InfraError, TaskError
from clawgym.records import Episode, Task
from clawgym.rollout.attempt import Attempt, fault_of, transcript_payload
from clawgym.sandbox.protocol import Backend

__all__ = ["Attempt", "fault_of", "run_episode", "transcript_payload"]


async def run_episode(
    task: Task,
    agent: Agent,
    backend: Backend,
    *,
    seed: int,
    sample: int = 0,
    floor: float | None = None,
    keep_workspace: bool = True,
    session: Mapping[str, Any] | None = None,
) -> Episode:
    """Let ``agent`` attempt ``task`` once in a fresh box of ``backend`` and grade what is left.

    ``floor`` is the task's best cheap-policy score, for the corrected score; ``session`` goes to an agent that has a
    gateway (:attr:`~clawgym.agents.protocol.AgentContext.session`). A bad rollout is data: whatever the
    agent does ends in an :class:`Episode`. Raises :class:`~clawgym.errors.AgentError` if the agent cannot work on
    this task at all and :class:`~clawgym.errors.UnsupportedTask` if the task cannot run here.
    """
    resident = agent if isinstance(agent, ResidentAgent) else None
    attempt = Attempt(task, backend, agent.name, seed=seed, sample=sample, resident=resident)
    try:
        episode = await _attempt_it(attempt, agent, session or {}, floor, keep_workspace)
    except BaseException:
        if resident is not None and attempt.opened is not None:
            await resident.settle(attempt.opened, await attempt.abandon())
        raise
    if resident is not None and attempt.opened is not None:
        episode = await resident.settle(attempt.opened, episode)
    return episode


async def _attempt_it(
    attempt: Attempt, agent: Agent, session: Mapping[str, Any], floor: float | None, keep_workspace: bool
) -> Episode:
    try:
        await attempt.open()
    except InfraError as error:
        attempt.fail_infra(f"setup: {error}", fault=fault_of(error))
        return await attempt.abandon()
    except TaskError as error:
        attempt.fail_infra(f"task: {error}", fault=fault_of(error))
        return await attempt.abandon()
    context = AgentContext(
        task=attempt.task,
        sandbox=attempt.box,
        tools=attempt.tools,
        seed=attempt.seed,
        sample=attempt.sample,
        record=attempt.steps.append,
        record_turn=attempt.turns.append,
        session=session,
    )

    async def work() -> None:
        report = await agent.run(context)
        attempt.stop, attempt.cause = report.stop, report.cause
        attempt.final_message, attempt.usage = report.final_message, report.usage

    try:
        await attempt.work(work)
    except EngineError as error:
        attempt.fail_infra(f"engine: {error}", fault=fault_of(error))
    except InfraError as error:
        attempt.fail_infra(f"host: {error}", fault=fault_of(error))
    except TaskError as error:
        attempt.fail_infra(f"task: {error}", fault=fault_of(error))
    except BaseException:
        await attempt.abandon()
        raise
    if attempt.failed_infra:
        return await attempt.abandon()
    return await attempt.finish(floor=floor, keep_workspace=keep_workspace)
