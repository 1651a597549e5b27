"""Tasks of PinchBench: the Markdown files are made for the test; a clone in CLAWGYM_DATA is read too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clawgym.agents import ScriptAgent, make_agent
from clawgym.errors import TaskError
from clawgym.records import Outcome
from clawgym.sandbox import Backend
from clawgym.tasks import read
from clawgym.tasks.formats import pinchbench

from ..rollouts import episode_of
from .conftest import published_clone

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


def written(folder: Path, kind: str = "automated", category: str = "file_ops", more: str = "") -> Path:
    (folder / "tasks").mkdir(exist_ok=True)
    (folder / "assets").mkdir(exist_ok=True)
    (folder / "assets/list.csv").write_text("a,b\n")
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


def test_what_code_and_a_model_grade_becomes_two_tasks(tmp_path: Path):
    more = "grading_weights:\n  automated: 0.4\n  llm_judge: 0.6\n"
    code, judged = read(written(tmp_path, "hybrid", more=more)).tasks
    assert (code.id, judged.id) == ("task_00_sanity", "task_00_sanity.judged")
    assert code.verifier.protocol == "reward_sh"
    rubric = judged.verifier.grader_options["rubric"]
    assert (judged.verifier.grader, rubric) == (
        "rubric",
        {"Criterion 1: Care (Weight: 30%)": "**Score 1.0**: With care."},
    )
    assert code.metadata["grading_weights"] == {"automated": 0.4, "llm_judge": 0.6}


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
