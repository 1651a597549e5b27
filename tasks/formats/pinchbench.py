"""Reader of PinchBench: Markdown files with a front matter, a prompt, a rubric and a Python function that grades.

The path is a clone of the set, with ``tasks/task_*.md`` and ``assets/``. The function is run as it is, in the grading
sandbox, on the transcript in OpenClaw's form and the workspace. Where a model judges, the set's own
``scripts/lib_grading.py`` runs there, and our grader ``questions`` gets its answers from the host. A task that both
grade becomes two: one with what code grades, and with the ending ``.judged`` the whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from clawgym.errors import TaskError
from clawgym.records import Limits, Task, TaskFile, VerifierSpec
from clawgym.registry import formats
from clawgym.tasks.formats._files import check_files, check_task_id, malformed_as_task_error, read_text
from clawgym.tasks.formats.protocol import Reader, TaskFormat
from clawgym.verifiers.protocols.reward_sh import standard_reward_sh

__all__ = ["PinchBenchFormat"]

_LONGEST = 4 * 2**20
_NETWORK = {"research": "network: it asks for current facts of the web", "creative": "network: it needs an image model"}
"""Category -> why its tasks cannot run."""

_EVENTS = '''\
import contextlib
import json
import os
import sys

FOLDER = os.path.dirname(os.path.abspath(__file__))


def event(role, *content):
    return {"type": "message", "message": {"role": role, "content": list(content)}}


def events(transcript):
    """The transcript as OpenClaw stores it."""
    for message in transcript:
        text = {"type": "text", "text": message.get("content") or ""}
        if message["role"] == "assistant":
            calls = message.get("tool_calls") or ()
            made = ({"type": "toolCall", "name": c["name"], "arguments": c["arguments"]} for c in calls)
            yield event("assistant", *([text] if text["text"] else []), *made)
            for result in message.get("results") or ():
                yield event("toolResult", {"type": "text", "text": result["content"]})
        elif message["role"] == "user":
            yield event("user", text)


with open(os.environ["OPENCLAW_REWARD_PAYLOAD"], encoding="utf-8", errors="replace") as file:
    transcript = list(events(json.load(file)["transcript"]))
'''
_CHECK_PY = f'''\
"""Runs the grading function of a PinchBench task: prints its scores as one JSON object."""

{_EVENTS}\
with open(os.path.join(FOLDER, "grade.txt"), encoding="utf-8") as file:
    code = compile(file.read(), "grade.txt", "exec")
names = {{}}
with contextlib.redirect_stdout(sys.stderr):
    exec(code, names)
    scores = names["grade"](transcript, sys.argv[1])
scores = scores if isinstance(scores, dict) else {{}}
kept = {{str(name): float(score) for name, score in scores.items() if isinstance(score, (int, float))}}
print(json.dumps(kept or {{"no scores": 0.0}}))
'''
_JUDGED_PY = f'''\
"""Runs the set's own grading of a PinchBench task that a model judges: prints the score, or what the model is asked."""

{_EVENTS}\
import pathlib
import types

sys.path.insert(0, FOLDER)
import asking

model = asking.KnownAnswers(asking.answers() or {{}})


def ask(*, prompt, **_):
    answer = model.answer([{{"role": "user", "content": prompt}}])
    said = [event("assistant", {{"type": "text", "text": answer}})]
    if not lib_grading._parse_judge_response(said):  # the set gives 0, as if the work were bad
        raise SystemExit("the model's answer has no score")
    return {{"transcript": said}}


openclaw = types.ModuleType("lib_agent")
openclaw.ensure_agent_exists = lambda *_, **__: None
openclaw.slugify_model = str
openclaw.run_openclaw_prompt = ask
tasks = types.ModuleType("lib_tasks")
tasks.Task = object
sys.modules.update(lib_agent=openclaw, lib_tasks=tasks)
import lib_grading

with open(os.path.join(FOLDER, "task.json"), encoding="utf-8") as file:
    task = types.SimpleNamespace(**json.load(file))
with contextlib.redirect_stdout(sys.stderr):
    try:
        work = {{"transcript": transcript, "workspace": sys.argv[1]}}
        graded = lib_grading.grade_task(task=task, execution_result=work, skill_dir=pathlib.Path(FOLDER))
        said = {{"score": graded.score}}
    except asking.Asks as asks:
        said = {{"questions": asks.questions}}
print(json.dumps(said))
'''


@formats.register("pinchbench")
class PinchBenchFormat(TaskFormat):
    """PinchBench: a clone of the set with ``tasks/task_*.md`` and ``assets/``."""

    def holds(self, path: Path) -> bool:
        return (path / "tasks/TASK_TEMPLATE.md").is_file() and (path / "tasks/task_00_sanity.md").is_file()

    def iter_tasks(self, path: Path) -> Iterator[tuple[str, Reader]]:
        for file in sorted((path / "tasks").glob("task_*.md")):
            yield file.name, partial(_read, path, file.name, judged=False)
            if _kind(path, file.name) == "hybrid":
                yield f"{file.name}: judged", partial(_read, path, file.name, judged=True)


def _parts(path: Path, name: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Front matter and sections of a file. Raises :class:`TaskError`."""
    import yaml

    text = read_text(path / "tasks", name)
    if len(text) > _LONGEST or not (found := re.match(r"---\s*\n(.*?)\n---\s*\n(.*)\Z", text, re.DOTALL)):
        raise TaskError(f"{name}: has no front matter, or more than {_LONGEST >> 20} MiB: restore the file")
    try:
        head = yaml.safe_load(found[1])
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise TaskError(f"{name}: its front matter is not YAML ({str(error)[:200]}): restore the file") from error
    if not isinstance(head, dict):
        raise TaskError(f"{name}: its front matter is no object: restore the file")
    # As text, a value of nested aliases would take all memory.
    if odd := [key for key in ("id", "category", "grading_type") if not isinstance(head.get(key, ""), str)]:
        raise TaskError(f"{name}: field {odd[0]}: is no text: restore the file")
    _title, *pieces = re.split(r"^##[ \t]+(.+)$", f"\n{found[2]}", flags=re.MULTILINE)
    return head, {pieces[n].strip(): pieces[n + 1].strip() for n in range(0, len(pieces), 2)}


def _kind(path: Path, name: str) -> str:
    try:
        return _parts(path, name)[0].get("grading_type", "")
    except TaskError:
        return ""


def _read(path: Path, name: str, *, judged: bool) -> Task:
    with malformed_as_task_error(name, "task of PinchBench"):
        head, sections = _parts(path, name)
        kind = head.get("grading_type", "automated")
        prompt = sections.get("Prompt", "")
        seconds = head.get("timeout_seconds", 120)
        if not prompt or kind not in ("automated", "llm_judge", "hybrid") or not isinstance(seconds, int | float):
            raise TaskError(f"{name}: needs a prompt, grading_type and timeout_seconds: restore the file")
        by_model = judged or kind == "llm_judge"
        task_id = check_task_id(f"{head.get('id')}{'.judged' * judged}", f"{name}: field id")
        weights = {str(part): float(weight) for part, weight in (head.get("grading_weights") or {}).items()}
        about = {"task_id": head.get("id"), "grading_type": kind, "grading_weights": weights}
        verifier = _judged(path, about, sections) if by_model else _automated(sections, name)
        category = head.get("category", "")
        unsupported = "ours: it has several sessions" if head.get("multi_session") else _NETWORK.get(category)
        return Task(
            id=task_id,
            instruction=prompt,
            verifier=replace(verifier, mutable_inputs=("*",)),
            inputs=check_files(_inputs(path, head, name), name),
            metadata={"category": category, "grading_type": kind, **({"grading_weights": weights} if weights else {})},
            limits=Limits(agent_seconds=float(seconds)),
            unsupported=unsupported,
            origin=name,
        )


def _automated(sections: Mapping[str, str], name: str) -> VerifierSpec:
    found = re.search(r"```python\s*(.*?)\s*```", sections.get("Automated Checks", ""), re.DOTALL)
    if not found:
        raise TaskError(f"{name}: has no Python function under 'Automated Checks': restore the file")
    files = (
        TaskFile("reward.sh", standard_reward_sh(), executable=True),
        TaskFile("check.py", _CHECK_PY.encode()),
        TaskFile("grade.txt", found[1].encode()),
    )
    return VerifierSpec("reward_sh", files)


def _judged(path: Path, about: Mapping[str, Any], sections: Mapping[str, str]) -> VerifierSpec:
    """The set's own grading, with the fields of a task that it reads: ``about`` and those of the sections."""
    criteria = sections.get("Grading Criteria", "").split("\n")
    listed = (re.match(r"-\s+\[[ x]\]\s+(.+)$", line.strip()) for line in criteria)
    task = {
        **about,
        "prompt": sections.get("Prompt", ""),
        "expected_behavior": sections.get("Expected Behavior", ""),
        "grading_criteria": [found[1] for found in listed if found],
        "llm_judge_rubric": sections.get("LLM Judge Rubric"),
        "automated_checks": sections.get("Automated Checks"),
    }
    files = (
        TaskFile("check.py", _JUDGED_PY.encode()),
        TaskFile("task.json", json.dumps(task, ensure_ascii=False).encode()),
        TaskFile("asking.py", Path(__file__).with_name("_asking.py")),
        TaskFile("lib_grading.py", path / "scripts/lib_grading.py", within=path),
    )
    return VerifierSpec("grader", files, grader="questions")


def _inputs(path: Path, head: Mapping[str, Any], name: str) -> Iterator[TaskFile]:
    for entry in head.get("workspace_files") or ():
        if not isinstance(entry, dict):
            raise TaskError(f"{name}: field workspace_files: is no list of objects: restore the file")
        if isinstance(entry.get("content"), str) and isinstance(entry.get("path"), str):
            yield TaskFile(entry["path"], entry["content"].encode())
        elif isinstance(entry.get("source"), str) and isinstance(entry.get("dest"), str):
            source = TaskFile(entry["source"].removeprefix("assets/"), b"").path  # a plain relative path
            if not (path / "assets" / source).is_file():
                raise TaskError(f"{name}: its file assets/{source} is missing: get a whole copy of the set")
            yield TaskFile(entry["dest"], path / "assets" / source, within=path)
        else:
            raise TaskError(f"{name}: field workspace_files: needs path and content, or source and dest: restore it")
