"""``audit``: can a task's reward be trusted? Every task of a set is graded on work that nobody did.

Invariants: what is said of a verifier was seen by running it, or is read from its source and said to be; the verifier
runs as it does in an episode; a failure of the host is retried and never a finding.
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
from clawgym.evaluation._watch import WatchedBackend
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
"""Goes up when :func:`observe` sees something else; a folder never mixes two."""
_REPEATED = ("touch", "echo")
"""Graded twice: where the outputs are there, most of a verifier is reached."""
_MARK = "/tmp/.clawgym-audit-ran"


def sample(task_set: TaskSet, n: int, seed: int = 0) -> TaskSet:
    """``n`` tasks of the set, drawn with ``seed``, in the set's order; the whole set if it has no more."""
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
    """Observe what is missing from the run folder ``out``, then write ``audit.json`` and ``clean.csv`` there.

    ``results.jsonl`` holds what was observed; the flaws are made of it anew at each end. Setting ``stop`` cancels what
    is in flight; the same call goes on from there.

    Raises :class:`~clawgym.errors.RunFolderError` if the folder belongs to another audit or a run, and
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
    except Exception as error:  # one task's accident is data, not the end of the audit
        row["outcome"], row["fault"] = Outcome.INFRA, str(fault_of(error))
        known = isinstance(error, InfraError)
        row["cause"] = str(error) if known else "".join(traceback.format_exception(error))[-4000:]
    return row | {"finished": now()}


async def observe(task: Task, backend: Backend) -> dict[str, Any]:
    """Grade ``task`` on every cheap policy (``touch`` and ``echo`` twice), on programs that leave a mark, and on its
    reference solution (twice).

    Returns what :class:`~clawgym.evaluation.findings.TaskAudit` holds of it, JSON-ready.
    Raises :class:`~clawgym.errors.InfraError` if the host fails.
    """
    watch = WatchedBackend(backend)
    policies: dict[str, dict[str, Any]] = {}
    varies: dict[str, list[str]] = {}
    for policy in CHEAP_POLICIES:
        workspace = cheap_workspace(task, policy)
        grade = await grade_cheaply(task, workspace, watch)
        policies[policy] = dataclasses.asdict(grade)
        if policy in _REPEATED and (names := _differences(grade, await grade_cheaply(task, workspace, watch))):
            varies[policy] = names
    solution = None
    if task.solution:
        for finding in await validate_solution(task, watch):
            if finding.status == "infra":
                raise InfraError(f"task {task.id}: its solution could not be tried ({finding.detail}): try again")
            if finding.rule == "oracle":
                solution = "pass" if finding.status == "pass" else finding.detail
            elif finding.status == "fail":
                varies["solution"] = [finding.detail]
    return {
        "policies": policies,
        "varies": varies,
        "writes": sorted(watch.writes),
        "solution": solution,
        "ran": await _programs_run(task, backend),
        # Not in a thread: CPython 3.11's parser, entered by two at once, ends with a SystemError.
        **read_sources(task),
    }


def _differences(one: CheapGrade, two: CheapGrade) -> list[str]:
    """The checks in which two gradings of one workspace differ; ``official`` and ``cause`` for the whole."""
    names = sorted(n for n in {*one.checks, *two.checks} if one.checks.get(n) != two.checks.get(n))
    return names + [name for name in ("official", "cause") if getattr(one, name) != getattr(two, name)]


async def _programs_run(task: Task, backend: Backend) -> list[str] | None:
    """Which programs the grading starts or imports, of those that the agent may write: every ``.py`` and ``.sh`` among
    the inputs and the named outputs is replaced by one that leaves a mark. ``None`` if there is none."""
    workspace = _marking_workspace(task)
    if workspace is None:
        return None
    watch = WatchedBackend(backend, _MARK)
    await grade_cheaply(task, workspace, watch)
    return sorted(watch.marks)


def _marking_workspace(task: Task) -> Archive | None:
    named = [f.path for f in task.inputs] + output_paths(task)
    if not any(path.endswith((".py", ".sh")) for path in named):
        return None
    files = output_files(task, lambda path: _marking(path) or task.instruction.encode())
    files += [dataclasses.replace(f, source=_marking(f.path)) for f in task.inputs if _marking(f.path)]
    return with_files(task, [dataclasses.replace(f, executable=True) for f in files])


def _marking(path: str) -> bytes:
    """A program that appends its own path to the mark; empty for anything but Python and shell."""
    if path.endswith(".py"):
        return f'with open({_MARK!r}, "a") as mark:\n    mark.write({json.dumps(path)} + "\\n")\n'.encode()
    if path.endswith(".sh"):
        return f"printf '%s\\n' {shlex.quote(path)} >> {_MARK}\n".encode()
    return b""
