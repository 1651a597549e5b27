"""Is a task sound? Its solution passes, doing nothing and every wrong solution do not, and grading repeats.

Invariant: a task is only called sound by running it; what could not be tried is ``skip`` or ``infra``, never ``pass``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from clawgym.agents.noop import NoopAgent
from clawgym.agents.oracle import OracleAgent
from clawgym.agents.protocol import Agent
from clawgym.agents.script import ScriptAgent
from clawgym.errors import AgentError, UnsupportedTask
from clawgym.records import Episode, Outcome, Task
from clawgym.rollout import run_episode
from clawgym.sandbox import Backend

__all__ = ["Finding", "Status", "validate_solution", "validate_task"]

Status = Literal["pass", "fail", "skip", "infra"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was tried on one task."""

    task_id: str
    rule: str
    """``supported``, ``oracle``, ``repeat``, ``noop`` or ``wrong/<script>``."""
    status: Status
    detail: str = ""


async def validate_task(task: Task, backend: Backend) -> list[Finding]:
    """Try ``task`` in boxes of ``backend``, one attempt after the other.

    Raises nothing that the task or its scripts can cause: that is a finding.
    """
    if task.unsupported:
        return [Finding(task.id, "supported", "skip", task.unsupported)]
    found = await validate_solution(task, backend)
    found.append(_must_fail(task, "noop", await _attempt(task, backend, NoopAgent)))
    for script in task.wrong_solutions:
        episode = await _attempt(task, backend, lambda script=script: ScriptAgent(script.read(), script.path))
        found.append(_must_fail(task, f"wrong/{script.path}", episode))
    return found


async def validate_solution(task: Task, backend: Backend) -> list[Finding]:
    """Run the reference solution, and once more if it passes: rules ``oracle`` and ``repeat``."""
    if not task.solution:
        return [Finding(task.id, "oracle", "skip", "no reference solution: add solution/solve.sh")]
    first = await _attempt(task, backend, OracleAgent)
    found = [_must_pass(task, first)]
    if found[0].status == "pass":
        found.append(_must_repeat(task, first, await _attempt(task, backend, OracleAgent)))
    return found


async def _attempt(task: Task, backend: Backend, make: Callable[[], Agent]) -> Episode | str:
    try:
        return await run_episode(task, make(), backend, seed=0, keep_workspace=False)
    except (AgentError, UnsupportedTask) as error:
        return str(error)


def _must_pass(task: Task, episode: Episode | str) -> Finding:
    if isinstance(episode, str):
        return Finding(task.id, "oracle", "fail", episode)
    if episode.outcome is Outcome.INFRA:
        return Finding(task.id, "oracle", "infra", episode.cause or "")
    if episode.outcome is Outcome.SOLVED:
        return Finding(task.id, "oracle", "pass")
    why = episode.cause or (episode.result and episode.result.cause) or ""
    if not why and episode.result:
        failed = [f"{name}={value:g}" for name, value in episode.result.checks.items() if value < 1]
        why = f"checks not met: {', '.join(failed)}" if failed else f"strict score {episode.result.strict:g}"
    return Finding(task.id, "oracle", "fail", f"{episode.outcome}: {why}: mend solution/ or the verifier")


def _must_fail(task: Task, rule: str, episode: Episode | str) -> Finding:
    if isinstance(episode, str):
        return Finding(task.id, rule, "fail", episode)
    if episode.outcome is Outcome.INFRA:
        return Finding(task.id, rule, "infra", episode.cause or "")
    if episode.outcome is Outcome.SOLVED or (episode.result and episode.result.strict >= 1):
        return Finding(task.id, rule, "fail", "was accepted: add a check that only the right work passes")
    return Finding(task.id, rule, "pass", f"official {episode.result.official:.3f}" if episode.result else "")


def _must_repeat(task: Task, first: Episode | str, second: Episode | str) -> Finding:
    """Two gradings of the same work give the same checks."""
    if isinstance(first, str) or isinstance(second, str):
        return Finding(task.id, "repeat", "fail", f"could be tried only once: {second}")
    if second.outcome is Outcome.INFRA or not (first.result and second.result):
        return Finding(task.id, "repeat", "infra", second.cause or "")
    one, two = first.result, second.result
    changed = sorted(n for n in {*one.checks, *two.checks} if one.checks.get(n) != two.checks.get(n))
    if changed or one.official != two.official:
        what = ", ".join(changed) or f"the official score ({one.official} and {two.official})"
        return Finding(task.id, "repeat", "fail", f"changed from one run to the next: {what}: take out what varies")
    return Finding(task.id, "repeat", "pass")
