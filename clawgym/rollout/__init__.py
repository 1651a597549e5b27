"""The one episode loop: a box, an agent, a verifier. Environments and evaluation are faces of it."""

from __future__ import annotations

from clawgym.agents.protocol import Agent, AgentContext
from clawgym.errors import EngineError, InfraError, TaskError
from clawgym.records import Episode, Task
from clawgym.rollout._attempt import Attempt, transcript_payload
from clawgym.sandbox.protocol import Backend

__all__ = ["Attempt", "run_episode", "transcript_payload"]


async def run_episode(
    task: Task,
    agent: Agent,
    backend: Backend,
    *,
    seed: int,
    sample: int = 0,
    floor: float | None = None,
    keep_workspace: bool = True,
) -> Episode:
    """Let ``agent`` attempt ``task`` once in a fresh box of ``backend`` and grade what is left.

    ``floor`` is the task's best cheap-policy score, for the corrected score. A bad rollout is data: whatever the
    agent does ends in an :class:`Episode`. Raises :class:`~clawgym.errors.AgentError` if the agent cannot work on
    this task at all and :class:`~clawgym.errors.UnsupportedTask` if the task cannot run here.
    """
    attempt = Attempt(task, backend, agent.name, seed=seed, sample=sample)
    try:
        await attempt.open()
    except InfraError as error:
        attempt.fail_infra(f"setup: {error}")
        return await attempt.abandon()
    except TaskError as error:
        attempt.fail_infra(f"task: {error}")
        return await attempt.abandon()
    context = AgentContext(
        task=task,
        sandbox=attempt.box,
        seed=seed,
        sample=sample,
        record=attempt.steps.append,
        record_turn=attempt.turns.append,
    )

    async def work() -> None:
        report = await agent.run(context)
        attempt.stop, attempt.cause = report.stop, report.cause
        attempt.final_message, attempt.usage = report.final_message, report.usage

    try:
        await attempt.work(work)
    except EngineError as error:
        attempt.fail_infra(f"engine: {error}")
    except InfraError as error:
        attempt.fail_infra(f"host: {error}")
    except TaskError as error:
        attempt.fail_infra(f"task: {error}")
    except BaseException:
        await attempt.abandon()
        raise
    if attempt.failed_infra:
        return await attempt.abandon()
    return await attempt.finish(floor=floor, keep_workspace=keep_workspace)
