"""``validate_task`` passes correct tasks and finds each kind of mistake, in real sandboxes."""

from __future__ import annotations

import dataclasses

import pytest

from clawgym.evaluation import validate
from clawgym.evaluation.validate import validate_task
from clawgym.records import Episode, Outcome, Task, TaskFile, VerifierResult
from clawgym.rollout import Ended
from clawgym.sandbox import Backend
from clawgym.tasks.scaffold import starter
from clawgym.verifiers.protocols.reward_sh import standard_reward_sh


def statuses(findings) -> dict[str, str]:
    return {finding.rule: finding.status for finding in findings}


def graded_by(check: str, **changes) -> Task:
    files = (TaskFile("check.py", check.encode()), TaskFile("reward.sh", standard_reward_sh(), executable=True))
    verifier = dataclasses.replace(starter("t").verifier, files=files)
    return dataclasses.replace(starter("t"), verifier=verifier, **changes)


async def test_starter_task_is_valid(backend: Backend):
    found = statuses(await validate_task(starter("t"), backend))
    assert found.pop("wrong/tampers.sh") == "pass"
    assert found == {
        "oracle": "pass",
        "repeat": "pass",
        "noop": "pass",
        "repeat-noop": "pass",
        "wrong/no-refunds.sh": "pass",
        "wrong/text-numbers.sh": "pass",
    }


async def test_checker_that_accepts_everything_fails(backend: Backend):
    found = await validate_task(graded_by("print('{\"ok\": 1.0}')\n"), backend)
    assert statuses(found)["noop"] == "fail"
    assert {status for rule, status in statuses(found).items() if rule.startswith("wrong/")} == {"fail"}
    assert all("add a check" in finding.detail for finding in found if finding.status == "fail")


async def test_failing_solution_fails(backend: Backend):
    bad = dataclasses.replace(starter("t"), solution=(TaskFile("solve.sh", b"true\n"),), wrong_solutions=())
    found = {finding.rule: finding for finding in await validate_task(bad, backend)}
    assert found["oracle"].status == "fail"
    assert "totals" in found["oracle"].detail
    assert "repeat" not in found


async def test_nondeterministic_checker_fails(backend: Backend):
    check = "import json, time\nprint(json.dumps({'same': 1.0, f'at_{time.time_ns()}': 1.0}))\n"
    found = {f.rule: f for f in await validate_task(graded_by(check, wrong_solutions=()), backend)}
    assert found["repeat"].status == "fail"
    assert "at_" in found["repeat"].detail


async def test_checker_that_is_nondeterministic_for_no_op_fails(backend: Backend):
    check = "import json, time\nprint(json.dumps({'wrong': 0.0, 'odd': float(time.time_ns() % 7919)/ 7919}))\n"
    task = graded_by(check)
    found = {f.rule: f for f in await validate_task(task, backend)}
    assert (found["noop"].status, found["repeat-noop"].status) == ("pass", "fail")
    assert "odd" in found["repeat-noop"].detail


async def test_wrong_solution_with_score_near_one_fails(backend: Backend):
    check = "import json\nprint(json.dumps({str(n): float(n > 0) for n in range(250)}))\n"
    found = {f.rule: f for f in await validate_task(graded_by(check, solution=(), wrong_solutions=()), backend)}
    assert found["noop"].status == "fail"
    assert "0.9960 is not below 0.995" in found["noop"].detail


@pytest.mark.parametrize("passes", [1, 2])
async def test_flaky_solution_fails(monkeypatch, passes: int):
    made = []

    async def run_episode(request, agent, backend):
        task = request.task
        made.append(agent.name)
        right = agent.name == "oracle" and len(made) <= passes
        result = VerifierResult({"a": float(right)}, float(right), float(right), None)
        outcome = Outcome.SOLVED if right else Outcome.FAILED
        episode = Episode(task.id, task.content_hash, 0, 0, agent.name, outcome, result=result)
        return Ended(episode=episode, reward=None, truncated=False)

    monkeypatch.setattr(validate, "run_episode", run_episode)
    task = dataclasses.replace(starter("t"), wrong_solutions=())
    found = statuses(await validate_task(task, backend=None))  # type: ignore[arg-type]
    assert found == {"oracle": "fail", "repeat": "fail", "wrong": "fail", "noop": "pass", "repeat-noop": "pass"}
    assert made == ["oracle"] * (passes + 1) + ["noop"] * 3


async def test_unsupported_task_is_skipped_and_task_without_solutions_fails(backend: Backend):
    unsupported = dataclasses.replace(starter("t"), unsupported="needs a printer")
    assert statuses(await validate_task(unsupported, backend)) == {"supported": "skip"}
    bare = dataclasses.replace(starter("t"), solution=(), wrong_solutions=())
    found = {f.rule: f for f in await validate_task(bare, backend)}
    assert statuses(found.values()) == {"oracle": "fail", "wrong": "fail", "noop": "pass", "repeat-noop": "pass"}
    assert "no reference solution" in found["oracle"].detail
    assert "0 wrong solutions: add at least 2" in found["wrong"].detail


@pytest.mark.parametrize("value", ["1.5", "-0.5", "float('nan')", "float('inf')"])
async def test_scores_outside_of_the_range_are_found(value: str, backend: Backend):
    found = await validate_task(graded_by(f"import json\nprint(json.dumps({{'a': 0.0, 'b': {value}}}))\n"), backend)
    assert {f.status for f in found} == {"fail"}
    assert all("scores outside [0, 1], or NaN: b" in f.detail for f in found)


async def test_crash_of_a_checker_is_the_fault_of_the_task_and_shows_its_line(backend: Backend):
    found = await validate_task(graded_by("import json\n\nraise KeyError('gone')\n"), backend)
    assert {f.status for f in found} == {"fail"}
    assert all('check.py", line 3' in f.log and "KeyError: 'gone'" in f.log for f in found)
    found = await validate_task(graded_by("print('x\\n' * 100_000)\n"), backend)
    assert all(len(f.log) <= 3000 and f.log.count("\n") < 25 for f in found)


async def test_a_wrong_solution_that_is_no_text_is_a_finding(backend: Backend):
    task = dataclasses.replace(starter("t"), solution=(), wrong_solutions=(TaskFile("w.sh", b"\xff"),))
    assert statuses(await validate_task(task, backend))["wrong/w.sh"] == "fail"


@pytest.mark.parametrize("outcome", [Outcome.INFRA, Outcome.TRUNCATED])
async def test_a_host_failure_is_never_a_pass(monkeypatch, outcome):
    async def run_episode(request, agent, backend):
        task = request.task
        result = None if outcome is Outcome.INFRA else VerifierResult({"a": 1.0}, 1.0, 1.0, None)
        episode = Episode(task.id, task.content_hash, 0, 0, agent.name, outcome, cause="disk gone", result=result)
        return Ended(episode=episode, reward=None, truncated=False)

    monkeypatch.setattr(validate, "run_episode", run_episode)
    found = await validate_task(starter("t"), backend=None)  # type: ignore[arg-type]
    assert {f.status for f in found} == ({"infra"} if outcome is Outcome.INFRA else {"fail"})
