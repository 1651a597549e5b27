"""Audit the rewards of a task set: grade every task on no-model baselines, and look for flaws in its verifier.

Invariants:

- A finding about a verifier was observed by running it, or is marked as read from its source.
- The verifier runs as it does in an episode.
- Infrastructure errors are retried and are never findings.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import shlex
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clawgym.errors import InfraError, RunFolderError, SandboxUnavailable
from clawgym.evaluation._recording import RecordingBackend
from clawgym.evaluation.findings import Audit, TaskAudit, read_sources
from clawgym.evaluation.progress import NoProgress, ProgressView
from clawgym.evaluation.schedule import Schedule, finished_writing
from clawgym.evaluation.validate import validate_solution
from clawgym.records import Outcome, Task, TaskSet
from clawgym.records.run_folder import RunFolder, make_manifest, now
from clawgym.rollout import fault_of
from clawgym.sandbox.machine import machine_of
from clawgym.sandbox.protocol import Archive, Backend
from clawgym.tasks.curation import clean
from clawgym.verifiers.cheap import (
    CHEAP_POLICIES,
    CheapGrade,
    cheap_workspace,
    grade_cheaply,
    output_files,
    output_paths,
    with_files,
)

__all__ = ["AUDIT", "CLEAN", "audit", "observe", "sample"]

AUDIT, CLEAN = "audit.json", "clean.csv"
_OBSERVATIONS = 1
"""Version of what :func:`observe` records. An audit folder holds observations of one version only."""
_REPEATED = ("touch", "echo")
"""Policies that are graded twice. They create the outputs, so that most of a verifier runs."""
_MARK = "/tmp/.clawgym-audit-ran"
"""The file in the sandbox to which the programs of :func:`_marking` append their paths."""


def sample(task_set: TaskSet, n: int, seed: int = 0) -> TaskSet:
    """Draw ``n`` tasks of the set with ``seed``, in the set's order; the whole set if it has at most ``n``."""
    if n >= len(task_set):
        return task_set
    chosen = sorted(random.Random(seed).sample(range(len(task_set)), n))
    return dataclasses.replace(task_set, tasks=tuple(task_set.tasks[i] for i in chosen))


async def audit(
    task_set: TaskSet,
    backend: Backend,
    out: Path,
    *,
    concurrency: int | None = None,
    progress: ProgressView | None = None,
    stop: asyncio.Event | None = None,
) -> Audit:
    """Observe the tasks that the folder ``out`` lacks, then write ``audit.json`` and ``clean.csv`` there.

    ``results.jsonl`` holds the observations. The flaws are computed from all of them at the end of each call. Setting
    ``stop`` cancels the tasks in flight; the same call resumes.

    Raises :class:`~clawgym.errors.RunFolderError` if the folder belongs to another audit or to a run, and
    :class:`~clawgym.errors.SandboxUnavailable` if the backend cannot work here.
    """
    isolation = await backend.probe()
    manifest = make_manifest("audit", task_set, config={"observations": _OBSERVATIONS}, isolation=isolation.as_dict())
    with RunFolder.open(out, manifest) as folder:

        async def attempt(task: Task, sample: int, attempt: int) -> Mapping[str, Any]:
            row = await _row(task, backend) | {"sample": sample, "attempt": attempt}
            return await finished_writing(asyncio.create_task(asyncio.to_thread(folder.append, row)))

        machine = machine_of(backend)
        shown = progress or NoProgress()
        schedule = Schedule(folder, task_set.tasks, attempt, shown, concurrency=concurrency, machine=machine)
        await schedule.run(stop or asyncio.Event())
        found = await asyncio.to_thread(_read, task_set, folder)
        folder.write_json(AUDIT, found.to_dict())
        folder.write(CLEAN, clean.to_csv(found.verdicts()).encode())
    return found


def _read(task_set: TaskSet, folder: RunFolder) -> Audit:
    rows = {row["task_id"]: row for row in folder.latest.values() if row["outcome"] != Outcome.INFRA}
    audited = [TaskAudit.of(task, rows[task.id]["observed"]) for task in task_set.tasks if task.id in rows]
    infra = {row["task_id"]: row["cause"] for row in folder.latest.values() if row["outcome"] == Outcome.INFRA}
    return Audit(task_set, tuple(audited), infra)


async def _row(task: Task, backend: Backend) -> dict[str, Any]:
    row: dict[str, Any] = {
        "key": f"{task.id}#0",
        "task_id": task.id,
        "task_hash": task.content_hash,
        "outcome": "audited",
        "cause": None,
    }
    try:
        row["observed"] = await observe(task, backend)
    except (SandboxUnavailable, RunFolderError):
        raise
    except Exception as error:  # recorded as an infrastructure error of this task; the audit continues
        row["outcome"], row["fault"] = Outcome.INFRA, str(fault_of(error))
        known = isinstance(error, InfraError)
        row["cause"] = str(error) if known else "".join(traceback.format_exception(error))[-4000:]
    return row | {"finished": now()}


async def observe(task: Task, backend: Backend) -> dict[str, Any]:
    """Grade ``task`` on every no-model policy (``touch`` and ``echo`` twice), on programs that record that they ran,
    and on its reference solution (twice).

    Returns the observations that :meth:`TaskAudit.of <clawgym.evaluation.findings.TaskAudit.of>` reads, JSON-ready.
    Raises :class:`~clawgym.errors.InfraError` on an infrastructure error.
    """
    recorder = RecordingBackend(backend)
    policies: dict[str, dict[str, Any]] = {}
    varies: dict[str, list[str]] = {}
    for policy in CHEAP_POLICIES:
        workspace = cheap_workspace(task, policy)
        grade = await grade_cheaply(task, workspace, recorder)
        policies[policy] = dataclasses.asdict(grade)
        if policy in _REPEATED and (names := _differences(grade, await grade_cheaply(task, workspace, recorder))):
            varies[policy] = names
    solution = None
    if task.solution:
        for finding in await validate_solution(task, recorder):
            if finding.status == "infra":
                raise InfraError(
                    f"task {task.id}: the reference solution could not be run ({finding.detail}): try again"
                )
            if finding.rule == "oracle":
                solution = "pass" if finding.status == "pass" else finding.detail
            elif finding.status == "fail":
                varies["solution"] = [finding.detail]
    return {
        "policies": policies,
        "varies": varies,
        "writes": sorted(recorder.writes),
        "solution": solution,
        "ran": await _programs_run(task, backend),
        # Not in a thread: the parser of CPython 3.11 raises a SystemError when two threads use it at once.
        **read_sources(task),
    }


def _differences(one: CheapGrade, two: CheapGrade) -> list[str]:
    """Names of the checks in which two gradings of one workspace differ; ``official`` and ``cause`` if those differ."""
    names = sorted(n for n in {*one.checks, *two.checks} if one.checks.get(n) != two.checks.get(n))
    return names + [name for name in ("official", "cause") if getattr(one, name) != getattr(two, name)]


async def _programs_run(task: Task, backend: Backend) -> list[str] | None:
    """Paths of the agent's programs that the grading starts or imports.

    Every ``.py`` and ``.sh`` file among the inputs and the named outputs is replaced by a program that records that it
    ran. ``None`` if there is no such file.
    """
    workspace = _marking_workspace(task)
    if workspace is None:
        return None
    recorder = RecordingBackend(backend, _MARK)
    await grade_cheaply(task, workspace, recorder)
    return sorted(recorder.marks)


def _marking_workspace(task: Task) -> Archive | None:
    named = [f.path for f in task.inputs] + output_paths(task)
    if not any(path.endswith((".py", ".sh")) for path in named):
        return None
    files = output_files(task, lambda path: _marking(path) or task.instruction.encode())
    files += [dataclasses.replace(f, source=_marking(f.path)) for f in task.inputs if _marking(f.path)]
    return with_files(task, [dataclasses.replace(f, executable=True) for f in files])


def _marking(path: str) -> bytes:
    """A program that appends its own path to the file :data:`_MARK`; empty if ``path`` is not Python or shell."""
    if path.endswith(".py"):
        return f'with open({_MARK!r}, "a") as mark:\n    mark.write({json.dumps(path)} + "\\n")\n'.encode()
    if path.endswith(".sh"):
        return f"printf '%s\\n' {shlex.quote(path)} >> {_MARK}\n".encode()
    return b""
