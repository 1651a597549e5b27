"""Rows of Django, SymPy and pytest, whose tests have runners of their own, played and graded in real sandboxes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clawgym.agents import NoopAgent, OracleAgent, ScriptAgent
from clawgym.records import Outcome, Task
from clawgym.sandbox import Backend
from clawgym.tasks import load

from ...rollouts import episode_of
from .real_rows import CASES, Case, bring

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture
def task(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Task:
    monkeypatch.setenv("CLAWGYM_REPOS", str(tmp_path / "repos"))
    (tmp_path / "rows.jsonl").write_text(json.dumps(bring(case, tmp_path / "repos")) + "\n")
    (task,) = load(str(tmp_path / "rows.jsonl")).tasks
    assert task.unsupported is None
    return task


async def test_only_the_patch_solves_it(case: Case, task: Task, backend: Backend) -> None:
    right = await episode_of(task, OracleAgent(), backend)
    assert right.result is not None, right.error
    assert right.outcome is Outcome.SOLVED, (right.error, right.result.cause, right.result.checks, right.result.log)
    untouched = await episode_of(task, NoopAgent(), backend)
    assert untouched.result is not None, untouched.error
    assert untouched.outcome is Outcome.FAILED
    assert (untouched.result.cause, untouched.result.checks) == (
        None,
        {**dict.fromkeys(case.fails, 0.0), **dict.fromkeys(case.passes, 1.0)},
    )
    wrong = await episode_of(task, ScriptAgent(case.solution(case.wrong).encode()), backend)
    assert wrong.outcome is Outcome.FAILED, wrong.result
