"""Is a task sound? Its solution passes, doing nothing and every wrong solution do not, and grading repeats.

The solution and doing nothing are tried three times each: a test that fails one time in five passes twice in a row on
two tasks of three, and thrice on half.

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
from clawgym.records import Episode, Fault, Outcome, Task
from clawgym.rollout import EpisodeRequest, run_episode
from clawgym.sandbox import Backend

__all__ = ["LEAST_WRONG", "TIMES", "WRONG_BELOW", "Finding", "Status", "validate_solution", "validate_task"]

TIMES = 3
"""How often the solution and doing nothing are tried."""
LEAST_WRONG = 2
"""Wrong solutions that a task needs."""
WRONG_BELOW = 0.995
"""What is wrong gets an official score below this, besides a strict score of 0: from here on a table with two decimals
says 1.00, and nobody who reads it sees that the work was wrong. Partial credit up to there is the task's own affair.
Not asked of work that edits inputs (``tampered``): the official grading does not put them back."""

_NO_SOLUTION = "no reference solution: add solution/solve.sh, or solution= in Python"
_LOG_LINES, _LOG_CHARACTERS = 25, 3000
"""Most of a verifier's output that a finding holds: its last lines, and characters."""

Status = Literal["pass", "fail", "skip", "infra"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was tried on one task."""

    task_id: str
    rule: str
    """``supported``, ``oracle``, ``repeat``, ``noop``, ``repeat-noop``, ``wrong`` (too few) or ``wrong/<script>``."""
    status: Status
    detail: str = ""
    log: str = ""
    """What the verifier printed, the end of it; text of the task and of its checker."""


async def validate_task(task: Task, backend: Backend) -> list[Finding]:
    """Try ``task`` in boxes of ``backend``, one attempt after the other.

    Raises nothing that the task or its scripts can cause: that is a finding.
    """
    if task.unsupported:
        return [Finding(task.id, "supported", "skip", task.unsupported)]
    if task.solution:
        found = await validate_solution(task, backend, times=TIMES)
    else:
        found = [Finding(task.id, "oracle", "fail", f"{_NO_SOLUTION}, so nothing shows that the task can be solved")]
    if len(task.wrong_solutions) < LEAST_WRONG:
        few = f"{len(task.wrong_solutions)} wrong solutions: add {LEAST_WRONG} at least, in wrong/ or as wrong="
        found.append(Finding(task.id, "wrong", "fail", few))
    found += await _several(task, "noop", "repeat-noop", _must_fail, backend, NoopAgent, TIMES)
    for script in task.wrong_solutions:
        episode = await _attempt(task, backend, lambda script=script: ScriptAgent(script.read(), script.path))
        found.append(_must_fail(task, f"wrong/{script.path}", episode))
    return found


async def validate_solution(task: Task, backend: Backend, *, times: int = 2) -> list[Finding]:
    """Run the reference solution ``times`` times, as long as it passes: rules ``oracle`` and ``repeat``."""
    if not task.solution:
        return [Finding(task.id, "oracle", "skip", _NO_SOLUTION)]
    return await _several(task, "oracle", "repeat", _must_pass, backend, OracleAgent, times)


async def _several(
    task: Task,
    rule: str,
    repeat: str,
    judge: Callable[[Task, str, Episode | str], Finding],
    backend: Backend,
    make: Callable[[], Agent],
    times: int,
) -> list[Finding]:
    """Try ``make()``'s agent until it fails the rule, at most ``times`` times; and compare the gradings."""
    first = await _attempt(task, backend, make)
    finding, repeated = judge(task, rule, first), []
    while finding.status == "pass" and len(repeated) < times - 1:
        other = await _attempt(task, backend, make)
        finding = judge(task, rule, other)
        repeated.append(_must_repeat(task, repeat, first, other))
    return [finding, *([f for f in repeated if f.status != "pass"] or repeated)[:1]]


async def _attempt(task: Task, backend: Backend, make: Callable[[], Agent]) -> Episode | str:
    try:
        request = EpisodeRequest(task=task, seed=0, keep_workspace=False)
        return (await run_episode(request, make(), backend)).episode
    except (AgentError, UnsupportedTask) as error:
        return str(error)


def _must_pass(task: Task, rule: str, episode: Episode | str) -> Finding:
    if (broken := _not_graded(task, rule, episode)) is not None:
        return broken
    assert not isinstance(episode, str)
    if episode.outcome is Outcome.SOLVED:
        return Finding(task.id, rule, "pass")
    why = episode.cause or (episode.result and episode.result.cause) or ""
    if not why and episode.result:
        failed = [f"{name}={value:g}" for name, value in episode.result.checks.items() if value < 1]
        why = f"checks not met: {', '.join(failed)}" if failed else f"strict score {episode.result.strict:g}"
    log = "" if episode.result is None else _end_of(episode.result.log)
    return Finding(task.id, rule, "fail", f"{episode.outcome}: {why}: correct the solution or the verifier", log)


def _must_fail(task: Task, rule: str, episode: Episode | str) -> Finding:
    if (broken := _not_graded(task, rule, episode)) is not None:
        return broken
    assert not isinstance(episode, str)
    if episode.outcome is Outcome.SOLVED or (episode.result and episode.result.strict >= 1):
        return Finding(task.id, rule, "fail", "was accepted: add a check that only the right work passes")
    official = episode.result.official if episode.result else 0.0
    tampered = episode.result is not None and episode.result.tampered
    if official >= WRONG_BELOW and not tampered:
        why = f"official score {official:.4f}, which is not below {WRONG_BELOW}: give what it lacks more weight"
        return Finding(task.id, rule, "fail", why)
    return Finding(task.id, rule, "pass", f"official {official:.3f}{', tampered' if tampered else ''}")


def _not_graded(task: Task, rule: str, episode: Episode | str) -> Finding | None:
    """The finding where there are no scores in [0, 1] to look at; None if there are."""
    if isinstance(episode, str):
        return Finding(task.id, rule, "fail", episode)
    if episode.outcome is Outcome.INFRA:
        why, _, log = (episode.error or episode.cause or "").partition("\n")
        return Finding(task.id, rule, "fail" if episode.fault is Fault.TASK else "infra", why, _end_of(log))
    if episode.result is not None and episode.result.out_of_range:
        names = ", ".join(episode.result.out_of_range[:5])
        why = f"scores outside [0, 1], or NaN: {names}: let each check give a number from 0 to 1"
        return Finding(task.id, rule, "fail", why, _end_of(episode.result.log))
    return None


def _end_of(log: str) -> str:
    return "\n".join(log[-_LOG_CHARACTERS:].strip().splitlines()[-_LOG_LINES:])


def _must_repeat(task: Task, rule: str, first: Episode | str, second: Episode | str) -> Finding:
    """Two gradings of the same work give the same checks."""
    if isinstance(first, str) or isinstance(second, str):
        return Finding(task.id, rule, "fail", f"could not be tried again: {second}")
    if second.outcome is Outcome.INFRA or not (first.result and second.result):
        return Finding(task.id, rule, "infra", second.cause or "")
    one, two = first.result, second.result
    if two.judged_by:
        return Finding(task.id, rule, "pass", "judged by a model: not compared")
    changed = sorted(n for n in {*one.checks, *two.checks} if one.checks.get(n) != two.checks.get(n))
    if changed or one.official != two.official:
        what = ", ".join(changed) or f"the official score ({one.official} and {two.official})"
        return Finding(task.id, rule, "fail", f"changed from one run to the next: {what}: take out what varies")
    return Finding(task.id, rule, "pass")
