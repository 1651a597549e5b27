"""Tasks of PinchBench: the Markdown files are made for the test; a clone in CLAWGYM_DATA is read too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clawgym.agents import ScriptAgent, make_agent
from clawgym.errors import TaskError
from clawgym.records import Outcome
from clawgym.rewards._panel import BASE_URL, MODEL
from clawgym.sandbox import Backend
from clawgym.tasks import read
from clawgym.tasks.formats import pinchbench

from ..engines.fake_openai import FakeOpenAI, fake_openai, reply
from ..rollouts import episode_of
from .conftest import published_clone

__all__ = ["fake_openai"]

TASK = """---
id: {id}
name: Notes
category: {category}
grading_type: {kind}
timeout_seconds: 60
{more}workspace_files:
  - path: "in/note.txt"
    content: |
      milk
  - source: list.csv
    dest: list.csv
---

## Prompt

Copy the note to out.txt.

## Grading Criteria

- [ ] The copy is there

## Automated Checks

```python
def grade(transcript: list, workspace_path: str) -> dict:
    from pathlib import Path
    print("grading")
    out = Path(workspace_path) / "out.txt"
    called = [c["name"] for e in transcript if e["message"]["role"] == "assistant"
              for c in e["message"]["content"] if c["type"] == "toolCall"]
    results = [e for e in transcript if e["message"]["role"] == "toolResult"]
    asked = transcript[0]["message"]["content"][0]["text"]
    return {{"copied": out.exists() and out.read_text() == "milk\\n", "tools": bool(called and results) * 1.0,
            "asked": "note" in asked, "comment": "not a number"}}
```

## LLM Judge Rubric

### Criterion 1: Care (Weight: 30%)

**Score 1.0**: With care.
"""


LIBRARY = """
import json
from types import SimpleNamespace
from lib_agent import ensure_agent_exists, run_openclaw_prompt, slugify_model
from lib_tasks import Task
def _parse_judge_response(transcript):
    text = "".join(item["text"] for event in transcript for item in event["message"]["content"])
    return json.loads(text) if text.startswith("{") else {}
def grade_task(*, task: Task, execution_result, skill_dir):
    print("grading")
    agent = ensure_agent_exists(slugify_model("judge"), "judge", skill_dir)
    said = [c["name"] for e in execution_result["transcript"] for c in e["message"]["content"] if "name" in c]
    prompt = "\\n".join([task.prompt, task.expected_behavior, task.llm_judge_rubric, *task.grading_criteria, *said])
    judged = run_openclaw_prompt(agent_id=agent, prompt=prompt, workspace=skill_dir, timeout_seconds=1)
    total = _parse_judge_response(judged["transcript"]).get("total", 0.0)
    names = {}
    exec(task.automated_checks.split("```")[1].removeprefix("python"), names)
    code = names["grade"](execution_result["transcript"], execution_result["workspace"])["copied"]
    weights = task.grading_weights
    return SimpleNamespace(score=weights["automated"] * code + weights["llm_judge"] * total)
"""


def written(folder: Path, kind: str = "automated", category: str = "file_ops", more: str = "") -> Path:
    (folder / "tasks").mkdir(exist_ok=True)
    (folder / "assets").mkdir(exist_ok=True)
    (folder / "assets/list.csv").write_text("a,b\n")
    (folder / "scripts").mkdir(exist_ok=True)
    (folder / "scripts/lib_grading.py").write_text(LIBRARY)
    (folder / "tasks/TASK_TEMPLATE.md").write_text("no task")
    text = TASK.format(id="task_00_sanity", kind=kind, category=category, more=more)
    (folder / "tasks/task_00_sanity.md").write_text(text)
    return folder


async def test_function_of_the_task_grades_transcript_and_workspace(tmp_path: Path, backend: Backend):
    (task,) = read(written(tmp_path)).tasks
    assert {file.path for file in task.inputs} == {"in/note.txt", "list.csv"}
    solved = await episode_of(task, ScriptAgent(b"cp in/note.txt out.txt"), backend)
    assert solved.outcome is Outcome.SOLVED, solved.result
    assert solved.result is not None
    assert solved.result.checks == {"copied": 1.0, "tools": 1.0, "asked": 1.0}
    nothing = await episode_of(task, make_agent("noop"), backend)
    assert nothing.result is not None
    assert nothing.result.checks == {"copied": 0.0, "tools": 0.0, "asked": 1.0}
    assert nothing.result.official == pytest.approx(1 / 3)


async def test_what_code_and_a_model_grade_becomes_two_tasks(
    tmp_path: Path, backend: Backend, fake_openai: FakeOpenAI, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(MODEL, "judge-1")
    monkeypatch.setenv(BASE_URL, fake_openai.base_url)
    more = "grading_weights:\n  automated: 0.4\n  llm_judge: 0.6\n"
    code, judged = read(written(tmp_path, "hybrid", more=more)).tasks
    assert (code.id, judged.id) == ("task_00_sanity", "task_00_sanity.judged")
    assert code.verifier.protocol == "reward_sh"
    assert code.metadata["grading_weights"] == {"automated": 0.4, "llm_judge": 0.6}
    copies = ScriptAgent(b"cp in/note.txt out.txt")
    for answer, score in (('{"total": 0.5}', 0.7), ('{"total": 1}', 1.0)):
        fake_openai.default = reply(answer)
        ended = await episode_of(judged, copies, backend)
        assert ended.result is not None
        assert ended.result.official == pytest.approx(score), "by the weights of the task"
        assert ended.result.judged_by == "questions (judge-1)"
    (asked,) = {request["messages"][0]["content"] for request in fake_openai.requests}
    assert "With care." in asked
    assert "The copy is there" in asked
    assert "bash" in asked, "the transcript in OpenClaw's form"
    fake_openai.default = reply("It is fine.")
    blind = await episode_of(judged, copies, backend)
    assert (blind.outcome, blind.cause) == (Outcome.INFRA, "control-output"), "no vote is not a score of 0"


def test_reasons(tmp_path: Path):
    (task,) = read(written(tmp_path, category="research")).tasks
    assert str(task.unsupported).startswith("network:")
    (task,) = read(written(tmp_path, more="multi_session: true\n")).tasks
    assert str(task.unsupported).startswith("ours:")


@pytest.mark.parametrize("what", ["missing", "link", "outside", "yaml", "kind", "aliases", "date"])
def test_files_that_are_not_to_be_read_are_problems(tmp_path: Path, what: str):
    folder = written(tmp_path)
    (tmp_path / "secret").write_text("secret")
    path = folder / "tasks/task_00_sanity.md"
    text = path.read_text()
    asset = folder / "assets/list.csv"
    if what in ("missing", "link"):
        asset.unlink()
    if what == "link":
        asset.symlink_to(tmp_path / "secret")
    bomb = "".join(f"x{n}: &x{n} [*x{n - 1}, *x{n - 1}, *x{n - 1}]\n" for n in range(1, 31))
    changes = {
        "outside": ("source: list.csv", "source: ../secret"),
        "yaml": ("id: ", "id: ["),
        "kind": ("automated", "x"),
        "aliases": ("id: task_00_sanity", f"x0: &x0 [1]\n{bomb}id: *x30"),
        "date": ("timeout_seconds: 60", "timeout_seconds: 2026-13-45"),
    }
    path.write_text(text.replace(*changes.get(what, ("", "")), 1) if what in changes else text)
    try:
        (task,) = read(folder).tasks
    except TaskError:
        return
    assert what == "link"
    with pytest.raises(TaskError, match="cannot be read"):
        task.frozen()


def test_a_clone_of_the_set_is_read():
    tasks = published_clone("PinchBench", "pinchbench/skill")
    assert len(tasks) >= 29
    assert all("missing: get a whole copy" in why for why in tasks.problems.values())
    reasons = [task for task in tasks.tasks if str(task.unsupported).startswith("ours")]
    assert len(reasons) <= 2
    assert json.dumps(pinchbench._NETWORK)
