"""Reader of PinchBench: Markdown files with a front matter, a prompt, a rubric and a Python function that grades.

The path is a clone of the set, with ``tasks/task_*.md`` and ``assets/``. The function is run as it is, in the grading
sandbox, on the transcript in OpenClaw's form and the workspace. A task that a model judges gets the grader ``rubric``.
A task that both grade becomes two: the one that code grades, and with the ending ``.judged`` the other.
"""

from __future__ import annotations

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
_MOST_CRITERIA, _CRITERION = 20, 2000
_NETWORK = {"research": "network: it asks for current facts of the web", "creative": "network: it needs an image model"}
"""Category -> why its tasks cannot run."""

_CHECK_PY = '''\
"""Runs the grading function of a PinchBench task: prints its scores as one JSON object."""

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
with open(os.path.join(FOLDER, "grade.txt"), encoding="utf-8") as file:
    code = compile(file.read(), "grade.txt", "exec")
names = {}
with contextlib.redirect_stdout(sys.stderr):
    exec(code, names)
    scores = names["grade"](transcript, sys.argv[1])
scores = scores if isinstance(scores, dict) else {}
kept = {str(name): float(score) for name, score in scores.items() if isinstance(score, (int, float))}
print(json.dumps(kept or {"no scores": 0.0}))
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
        verifier = _judged(sections, name) if by_model else _automated(sections, name)
        category = head.get("category", "")
        unsupported = "ours: it has several sessions" if head.get("multi_session") else _NETWORK.get(category)
        weights = {str(part): float(weight) for part, weight in (head.get("grading_weights") or {}).items()}
        return Task(
            id=task_id,
            instruction=prompt,
            verifier=replace(verifier, mutable_inputs=("*",)) if not by_model else verifier,
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


def _judged(sections: Mapping[str, str], name: str) -> VerifierSpec:
    """A rubric: the criteria under 'LLM Judge Rubric', or the list under 'Grading Criteria'."""
    _title, *pieces = re.split(r"^###[ \t]+(.+)$", f"\n{sections.get('LLM Judge Rubric', '')}", flags=re.MULTILINE)
    rubric = {pieces[n].strip(): pieces[n + 1].strip()[:_CRITERION] for n in range(0, len(pieces), 2)}
    rubric = {key: text for key, text in rubric.items() if key.startswith("Criterion") and text}
    if not rubric:
        listed = re.findall(r"^-\s+\[[ x]\]\s+(.+)$", sections.get("Grading Criteria", ""), re.MULTILINE)
        rubric = {f"criterion {n}": text[:_CRITERION] for n, text in enumerate(listed, start=1)}
    if not 0 < len(rubric) <= _MOST_CRITERIA:
        raise TaskError(f"{name}: has {len(rubric)} criteria, not 1 to {_MOST_CRITERIA}: restore the file")
    return VerifierSpec("grader", grader="rubric", grader_options={"rubric": rubric})


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
