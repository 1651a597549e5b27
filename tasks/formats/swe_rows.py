"""Rows of SWE-bench and SWE-Gym: a repository at a commit, an issue, tests.

A row names its repository, but has neither its files nor its dependencies. The files come from a clone below
``$CLAWGYM_REPOS`` (:mod:`clawgym.tasks.swe.repository`). The dependencies come from a folder of installed packages
beside the clone, ``<owner>/<name>.site`` or ``<name>@<version>.site``, which becomes a layer. If one is missing, the
task is ``unsupported``, with a message on how to get it. docs/how-to/swe.md has the commands.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, StringConstraints

from clawgym.errors import TaskError, UnsupportedTask
from clawgym.records import Layer, Limits, Task, TaskFile, VerifierSpec
from clawgym.tasks.formats._files import check_task_id
from clawgym.tasks.formats._schema import validated
from clawgym.tasks.swe import patching, verifier
from clawgym.tasks.swe.repository import files_at, repositories
from clawgym.tasks.swe.solution import patch_solution
from clawgym.tasks.swe.suites import PYTEST, SUITES, RepositoryTests

__all__ = ["is_row", "read_row"]

SITE = "/opt/layers/site"
_KEYS = {"instance_id", "repo", "base_commit", "problem_statement", "test_patch"}
_LIMITS = Limits(
    memory_mb=4096, pids=512, disk_mb=1024, agent_seconds=1800, verify_seconds=900, command_seconds=300, max_steps=100
)


def _listed(value: Any) -> Any:
    """A list, or the JSON text of one."""
    return json.loads(value) if isinstance(value, str) else value


Tests = Annotated[list[str], BeforeValidator(_listed)]


class _Row(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    instance_id: str
    repo: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")]
    base_commit: str
    problem_statement: str
    patch: str = ""
    test_patch: str
    FAIL_TO_PASS: Tests
    PASS_TO_PASS: Tests
    version: str | None = None


def is_row(value: Mapping[str, Any]) -> bool:
    """Whether ``value`` is a row of SWE-bench or SWE-Gym."""
    return value.keys() >= _KEYS


def read_row(value: Mapping[str, Any], where: str = "row") -> Task:
    """The task in one row. Raises :class:`TaskError`, naming ``where`` and the field, for an invalid row."""
    row = validated(_Row, dict(value), where)
    workspace = f"/workspace/{row.repo.rpartition('/')[2]}"
    task = Task(
        id=check_task_id(row.instance_id, f"{where}: field instance_id"),
        instruction=_instruction(row, workspace),
        verifier=VerifierSpec("reward_sh", (), executes_agent_code="in_process"),
        workspace=workspace,
        limits=_LIMITS,
        metadata={"category": "Software engineering", "repo": row.repo, "base_commit": row.base_commit},
        solution=patch_solution(row.patch.encode()) if row.patch else (),
        origin=where,
    )
    try:
        return _with_repository(task, row)
    except UnsupportedTask as error:
        why = str(error)
        return dataclasses.replace(task, unsupported=why if why.startswith("ours:") else f"image not here: {why}")
    except TaskError as error:
        raise TaskError(f"{where}: {error}") from error


def _instruction(row: _Row, workspace: str) -> str:
    return (
        f"The repository {row.repo} is in {workspace}. Solve this issue by changing its code. Tests that you do not "
        f"see will be run on the result; tests and settings that you edit are put back.\n\n{row.problem_statement}"
    )


def _with_repository(task: Task, row: _Row) -> Task:
    """``task`` with the files and dependencies of its repository. Raises :class:`UnsupportedTask` if they are
    missing."""
    suite = SUITES.get(row.repo, PYTEST)
    fail_to_pass, pass_to_pass = suite.listed(row.FAIL_TO_PASS), suite.listed(row.PASS_TO_PASS)
    odd = [test for test in (*fail_to_pass, *pass_to_pass) if "::" not in test]
    if odd and suite.has_ids:
        raise UnsupportedTask(f"ours: {row.repo}: {odd[0]!r} is not a pytest id (FILE::NAME): leave the row out")
    inputs = files_at(row.repo, row.base_commit)
    by_path = {file.path: file for file in inputs}
    overlay = _hidden(row, by_path)
    paths = [] if suite.has_ids else [file.path for file in overlay if file.path.endswith(".py")]
    if not (paths or suite.has_ids):
        raise UnsupportedTask(f"ours: {row.repo}: test_patch has no Python file, so no tests to run: leave the row out")
    layer = _layer(row.repo, row.version, suite)
    roots = [task.workspace, *([f"{task.workspace}/src"] if any(p.startswith("src/") for p in by_path) else [])]
    return dataclasses.replace(
        task,
        inputs=_with_version(row, inputs),
        layers={SITE: layer},
        env={"PYTHONPATH": ":".join([*roots, SITE])},
        verifier=verifier.tests_verifier(
            fail_to_pass=fail_to_pass,
            pass_to_pass=pass_to_pass,
            arguments=suite.arguments,
            protected=_protected(suite, _touched(row.patch)),
            overlay=overlay,
            runner=suite.runner,
            paths=paths,
        ),
    )


def _hidden(row: _Row, files: Mapping[str, TaskFile]) -> list[TaskFile]:
    """The files that the test patch creates or changes."""

    def read(path: str) -> bytes | None:
        return files[path].read() if path in files else None

    try:
        made = patching.apply(row.test_patch.encode(), read)
    except patching.BadPatch as error:
        raise UnsupportedTask(f"{row.repo} at {row.base_commit}: test_patch: {error}: leave the row out") from None
    return [
        TaskFile(path, data, mode == 0o100755 or (mode is None and path in files and files[path].executable))
        for path, (data, mode) in made.items()
        if data is not None
    ]


def _with_version(row: _Row, inputs: tuple[TaskFile, ...]) -> tuple[TaskFile, ...]:
    """``inputs``, and the file with its version that a build of pytest writes, which no commit has."""
    path = "src/_pytest/_version.py"
    if row.repo != "pytest-dev/pytest" or not re.fullmatch(r"\d+(\.\d+)*", row.version or ""):
        return inputs
    if any(file.path == path for file in inputs):
        return inputs
    parts = ", ".join(str(int(part)) for part in f"{row.version}.0".split("."))
    made = TaskFile(path, f'version = "{row.version}.0"\nversion_tuple = ({parts})\n'.encode())
    return tuple(sorted((*inputs, made), key=lambda file: file.path))


def _touched(patch: str) -> set[str]:
    try:
        changes = patching.parse(patch.encode())
    except patching.BadPatch:
        return set()
    return {path for change in changes for path in (change.old, change.new) if path}


def _protected(suite: RepositoryTests, solution: Iterable[str]) -> tuple[str, ...]:
    """Patterns of protected files, without those that would revert the reference solution. Files of the tests are
    always protected."""
    paths = [part for path in solution for part in _with_folders(path)]
    globs = [glob for glob in verifier.PROTECTED if not glob.startswith(suite.changeable)]
    return tuple(glob for glob in (*globs, *suite.protected) if not any(fnmatchcase(path, glob) for path in paths))


def _with_folders(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]


def _layer(repo: str, version: str | None, suite: RepositoryTests) -> Layer:
    root = repositories()
    tried = [root / f"{repo}@{version}.site"] if version and re.fullmatch(r"[\w.-]+", version) else []
    tried.append(root / f"{repo}.site")
    for folder in tried:
        if folder.is_dir():
            return Layer(f"swe/{repo}", _site_digest(folder.resolve()), folder.resolve())
    raise UnsupportedTask(
        f"{tried[-1]} is missing: pip install --target {tried[-1]} {suite.needs}the dependencies of {repo}, "
        "then try again"
    )


@cache
def _site_digest(folder: Path) -> str:
    """SHA-256 over the file lists, with hashes, of the packages installed in ``folder``, without byte code.

    Raises :class:`UnsupportedTask` if there is no such list (``*.dist-info/RECORD``).
    """
    lists = sorted(folder.glob("*.dist-info/RECORD"))
    if not lists:
        raise UnsupportedTask(f"{folder} has no installed packages (*.dist-info/RECORD): pip install --target it again")
    lines = [
        line
        for path in lists
        for line in sorted(path.read_text(encoding="utf-8", errors="replace").splitlines())
        if ",sha256=" in line and not re.search(r"\.pyc,|/direct_url\.json,|/INSTALLER,|^\.\./", line)
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
