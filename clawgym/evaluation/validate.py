"""Validate a task: its solution passes, no-op and every wrong solution fail, and gradings are reproducible.

The solution and the no-op agent run three times each, to find flaky verifiers. A check that fails one time in five
passes two runs in 64 % of the cases and three runs in 51 %.

Invariant: a finding is ``pass`` only if the agent ran. Otherwise it is ``skip`` or ``infra``.
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

__all__ = [
    "MAX_WRONG_SCORE",
    "MIN_WRONG_SOLUTIONS",
    "RUNS",
    "Finding",
    "Status",
    "validate_solution",
    "validate_task",
]

RUNS = 3
"""How often the solution and the no-op agent are run."""
MIN_WRONG_SOLUTIONS = 2
"""How many wrong solutions a task needs."""
MAX_WRONG_SCORE = 0.995
"""A wrong solution needs an official score below this, besides a strict score of 0. A table with two decimals would
show a higher score as 1.00. Partial credit below it is allowed. Does not apply to agents that edit inputs
(``tampered``), because the original grader does not restore inputs."""

_NO_SOLUTION = "no reference solution: add solution/solve.sh, or solution= in Python"
_LOG_LINES, _LOG_CHARACTERS = 25, 3000
"""How much of the end of a verifier's output a finding keeps."""

Status = Literal["pass", "fail", "skip", "infra"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one rule on one task."""

    task_id: str
    rule: str
    """``supported``, ``oracle``, ``repeat``, ``noop``, ``repeat-noop``, ``wrong`` (there are too few wrong solutions)
    or ``wrong/<script>``."""
    status: Status
    detail: str = ""
    log: str = ""
    """The end of the verifier's output. Untrusted: written by the task's checker."""


async def validate_task(task: Task, backend: Backend) -> list[Finding]:
    """Apply all rules to ``task`` in sandboxes of ``backend``, one episode after the other.

    Errors of the task or its scripts are findings, never exceptions.
    """
    if task.unsupported:
        return [Finding(task.id, "supported", "skip", task.unsupported)]
    if task.solution:
        found = await validate_solution(task, backend, runs=RUNS)
    else:
        found = [Finding(task.id, "oracle", "fail", f"{_NO_SOLUTION}, to show that the task can be solved")]
    if len(task.wrong_solutions) < MIN_WRONG_SOLUTIONS:
        few = f"{len(task.wrong_solutions)} wrong solutions: add at least {MIN_WRONG_SOLUTIONS}, in wrong/ or as wrong="
        found.append(Finding(task.id, "wrong", "fail", few))
    found += await _run_repeatedly(task, "noop", "repeat-noop", _must_fail, backend, NoopAgent, RUNS)
    for script in task.wrong_solutions:
        episode = await _run(task, backend, lambda script=script: ScriptAgent(script.read(), script.path))
        found.append(_must_fail(task, f"wrong/{script.path}", episode))
    return found


async def validate_solution(task: Task, backend: Backend, *, runs: int = 2) -> list[Finding]:
    """Apply the rules ``oracle`` and ``repeat``: run the reference solution at most ``runs`` times, until it fails."""
    if not task.solution:
        return [Finding(task.id, "oracle", "skip", _NO_SOLUTION)]
    return await _run_repeatedly(task, "oracle", "repeat", _must_pass, backend, OracleAgent, runs)


async def _run_repeatedly(
    task: Task,
    rule: str,
    repeat: str,
    check: Callable[[Task, str, Episode | str], Finding],
    backend: Backend,
    make_agent: Callable[[], Agent],
    runs: int,
) -> list[Finding]:
    """Run an agent until it fails ``rule``, at most ``runs`` times, and compare the gradings (rule ``repeat``)."""
    first = await _run(task, backend, make_agent)
    finding, repeated = check(task, rule, first), []
    while finding.status == "pass" and len(repeated) < runs - 1:
        other = await _run(task, backend, make_agent)
        finding = check(task, rule, other)
        repeated.append(_must_repeat(task, repeat, first, other))
    return [finding, *([f for f in repeated if f.status != "pass"] or repeated)[:1]]


async def _run(task: Task, backend: Backend, make_agent: Callable[[], Agent]) -> Episode | str:
    """The episode, or the message of the error if it could not run."""
    try:
        request = EpisodeRequest(task=task, seed=0, keep_workspace=False)
        return (await run_episode(request, make_agent(), backend)).episode
    except (AgentError, UnsupportedTask) as error:
        return str(error)


def _must_pass(task: Task, rule: str, episode: Episode | str) -> Finding:
    if (ungraded := _not_graded(task, rule, episode)) is not None:
        return ungraded
    assert not isinstance(episode, str)
    if episode.outcome is Outcome.SOLVED:
        return Finding(task.id, rule, "pass")
    why = episode.cause or (episode.result and episode.result.cause) or ""
    if not why and episode.result:
        failed = [f"{name}={value:g}" for name, value in episode.result.checks.items() if value < 1]
        why = f"failed checks: {', '.join(failed)}" if failed else f"strict score {episode.result.strict:g}"
    log = "" if episode.result is None else _end_of(episode.result.log)
    return Finding(task.id, rule, "fail", f"{episode.outcome}: {why}: correct the solution or the verifier", log)


def _must_fail(task: Task, rule: str, episode: Episode | str) -> Finding:
    if (ungraded := _not_graded(task, rule, episode)) is not None:
        return ungraded
    assert not isinstance(episode, str)
    if episode.outcome is Outcome.SOLVED or (episode.result and episode.result.strict >= 1):
        return Finding(task.id, rule, "fail", "was accepted: add a check that only a correct solution passes")
    official = episode.result.official if episode.result else 0.0
    tampered = episode.result is not None and episode.result.tampered
    if official >= MAX_WRONG_SCORE and not tampered:
        why = f"official score {official:.4f} is not below {MAX_WRONG_SCORE}: give the checks that fail more weight"
        return Finding(task.id, rule, "fail", why)
    return Finding(task.id, rule, "pass", f"official {official:.3f}{', tampered' if tampered else ''}")


def _not_graded(task: Task, rule: str, episode: Episode | str) -> Finding | None:
    """The finding for an episode without scores in [0, 1]; None if it has them."""
    if isinstance(episode, str):
        return Finding(task.id, rule, "fail", episode)
    if episode.outcome is Outcome.INFRA:
        why, _, log = (episode.error or episode.cause or "").partition("\n")
        return Finding(task.id, rule, "fail" if episode.fault is Fault.TASK else "infra", why, _end_of(log))
    if episode.result is not None and episode.result.out_of_range:
        names = ", ".join(episode.result.out_of_range[:5])
        why = f"scores outside [0, 1], or NaN: {names}: make each check return a number from 0 to 1"
        return Finding(task.id, rule, "fail", why, _end_of(episode.result.log))
    return None


def _end_of(log: str) -> str:
    return "\n".join(log[-_LOG_CHARACTERS:].strip().splitlines()[-_LOG_LINES:])


def _must_repeat(task: Task, rule: str, first: Episode | str, second: Episode | str) -> Finding:
    """Require that two runs of the same agent get the same checks and official score."""
    if isinstance(first, str) or isinstance(second, str):
        return Finding(task.id, rule, "fail", f"could not be run again: {second}")
    if second.outcome is Outcome.INFRA or not (first.result and second.result):
        return Finding(task.id, rule, "infra", second.cause or "")
    one, two = first.result, second.result
    if two.judged_by:
        return Finding(task.id, rule, "pass", "judged by a model: not compared")
    changed = sorted(n for n in {*one.checks, *two.checks} if one.checks.get(n) != two.checks.get(n))
    if changed or one.official != two.official:
        what = ", ".join(changed) or f"the official score ({one.official} and {two.official})"
        return Finding(task.id, rule, "fail", f"differs between two runs: {what}: make the verifier deterministic")
    return Finding(task.id, rule, "pass")
