"""Cheap policies: workspaces that are made without doing the work.

``nothing`` leaves the inputs as they are, ``empty`` deletes them, ``touch`` creates an empty file at each output path
in the instruction, and ``echo`` writes the instruction into each. Their best score is a task's no-model baseline
(:mod:`clawgym.verifiers.baselines`). A verifier that fails on them has a flaw (``clawgym tasks audit``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from clawgym.errors import GradingError
from clawgym.records import Task, TaskFile
from clawgym.sandbox.protocol import Archive, Backend
from clawgym.verifiers.grading import Subject, empty_archive, grade, untouched
from clawgym.verifiers.scores import plain_mean
from clawgym.verifiers.workspace import compose

__all__ = [
    "CHEAP_POLICIES",
    "CheapGrade",
    "cheap_workspace",
    "grade_cheaply",
    "output_files",
    "output_paths",
    "with_files",
]

CHEAP_POLICIES = ("nothing", "empty", "touch", "echo")

_EXTENSIONS = (
    "json|jsonl|csv|tsv|txt|md|html|htm|yaml|yml|py|sh|js|ts|xml|ini|toml|log|svg|sql|ics|cfg|conf|css|env|patch|diff|"
    "geojson|ndjson|rst|tex|bib|sha256|db|sqlite|zip|gz|tar|png|jpg|pdf|xlsx|r|R"
)
_PATH = re.compile(
    rf"(?<![\w/.-])((?:/root/\.openclaw/workspace/|\./)?[A-Za-z0-9_][\w./-]*\.(?:{_EXTENSIONS}))(?![\w-])"
)


def output_paths(task: Task) -> list[str]:
    """Paths below the workspace that the instruction names and that are not inputs, in order."""
    inputs = {f.path for f in task.inputs}
    found: list[str] = []
    for match in _PATH.finditer(task.instruction):
        path = match[1].removeprefix("/root/.openclaw/workspace/").removeprefix("./")
        if "/" in path and ".." not in path and path not in found and path not in inputs:
            found.append(path)
    return found


def output_files(task: Task, content: Callable[[str], bytes]) -> list[TaskFile]:
    """A file with ``content(path)`` at each output path. Impossible paths are skipped: those below or above another
    file, and those with an empty component."""
    taken: set[str] = {f.path for f in task.inputs}
    files: list[TaskFile] = []
    for path in output_paths(task):
        parents = {"/".join(path.split("/")[:i]) for i in range(1, path.count("/") + 1)}
        if parents & taken or any(t.startswith(path + "/") for t in taken) or "//" in path:
            continue
        taken.add(path)
        files.append(TaskFile(path, content(path)))
    return files


def cheap_workspace(task: Task, policy: str) -> Archive:
    """The workspace of ``policy`` (one of :data:`CHEAP_POLICIES`)."""
    if policy == "empty":
        return empty_archive()
    if policy == "nothing":
        return untouched(task)
    content = task.instruction.encode() if policy == "echo" else b""
    return with_files(task, output_files(task, lambda _: content))


def with_files(task: Task, files: Sequence[TaskFile]) -> Archive:
    """The initial workspace with ``files`` added."""
    return Archive(compose(untouched(task).tar, put=files))


@dataclass(frozen=True)
class CheapGrade:
    """The scores of a workspace that was made without work."""

    official: float | None
    """``None`` if the verifier gave no score (see ``cause``); it counts as 0."""
    mean: float
    """Mean of the non-composite checks of the strict grading, as in the baseline-adjusted score."""
    strict: float
    checks: Mapping[str, float] = field(default_factory=dict)
    """The checks of the strict grading."""
    cause: str | None = None
    seconds: float = 0.0
    """Wall time of the grading, including its sandbox."""


async def grade_cheaply(task: Task, workspace: Archive, backend: Backend) -> CheapGrade:
    """Grade ``workspace``. If the verifier fails on the initial workspace too, the grade has no score.

    Raises :class:`~clawgym.errors.InfraError` if the host fails.
    """
    try:
        result = await grade(task, Subject(workspace), backend)
    except GradingError as error:
        return CheapGrade(None, 0.0, 0.0, cause=error.cause)
    # If the verifier fails only after inputs were restored, the official score is valid.
    crashed = result.cause is not None and not result.tampered
    return CheapGrade(
        None if crashed else result.official,
        0.0 if crashed else plain_mean(result.checks),
        result.strict,
        result.checks,
        result.cause,
        result.seconds,
    )
