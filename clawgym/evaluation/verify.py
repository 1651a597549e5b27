"""``clawgym runs verify``: the stored workspaces of a run are graded again, without a model.

Invariants: nothing of the run is changed; ``verification.json`` is written beside it. An episode is ``same`` only if
its verifier ran again, on the very files that the line names, and gave the same checks and scores. What cannot be
graded from a workspace alone is never called the same. The folder is hostile: archives are checked before use.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import io
import json
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clawgym.errors import GradingError, InfraError, TaskError
from clawgym.evaluation.grader import changes_of_image, describe_grader
from clawgym.evaluation.integrity import discrepancies, edited, picture_damage, results_digest, unpacked
from clawgym.evaluation.progress import NoProgress, ProgressView
from clawgym.evaluation.schedule import Schedule
from clawgym.evaluation.summary import graded_by_task, judged_by
from clawgym.evaluation.verify_record import (
    CHANGED,
    DAMAGED,
    NOT_GRADABLE,
    SAME,
    VERIFICATION,
    Verification,
    read_verification,
)
from clawgym.records import GradingMode, Outcome, Task, TaskSet, VerifierResult
from clawgym.records.atif import json_safe, steps_from_atif
from clawgym.records.manifest import library_version, now
from clawgym.records.run_folder import PROGRAM, TRANSCRIPT, WORKSPACE, RunFolder, seal_of, write_atomic
from clawgym.rollout import fault_of, transcript_payload
from clawgym.sandbox.machine import machine_of
from clawgym.sandbox.protocol import Archive, Backend
from clawgym.verifiers.grading import Subject, grade

__all__ = ["verify"]

_EVERY = 5.0
"""Seconds between two writes of an unfinished record."""

Row = Mapping[str, Any]


async def verify(
    run: RunFolder,
    task_set: TaskSet,
    backend: Backend,
    *,
    concurrency: int | None = None,
    progress: ProgressView | None = None,
    stop: asyncio.Event | None = None,
) -> Verification:
    """Grade the run's stored workspaces again, and write ``verification.json`` into its folder.

    An interrupted call goes on where it was, if nothing that grades has changed since; a finished one begins anew.

    Raises :class:`~clawgym.errors.SandboxUnavailable` if the backend cannot work here, and
    :class:`~clawgym.errors.RunFolderError` if the record cannot be written.
    """
    isolation = await backend.probe()
    tasks = [task_set.by_id[task] for task in run.manifest.tasks if task in task_set.by_id]
    against = {
        "library": library_version(),
        "grader": await describe_grader(tasks, backend),
        "isolation": {"backend": isolation.backend, "tier": isolation.tier},
    }
    work = _Work(run, task_set, backend, against)
    schedule = Schedule(
        work,
        tasks,
        work.attempt,
        progress or NoProgress(),
        samples=run.manifest.samples,
        concurrency=concurrency,
        machine=machine_of(backend),
        retry_seconds=0.5,
    )
    try:
        await schedule.run(stop or asyncio.Event())
    finally:
        work.save()
    return work.record


class _Work:
    """One call of :func:`verify`; the ledger of its schedule."""

    def __init__(self, run: RunFolder, task_set: TaskSet, backend: Backend, against: Mapping[str, Any]) -> None:
        self._run = run
        self._task_set = task_set
        self._backend = backend
        self._against = against
        self._rows = {row["key"]: row for rows in graded_by_task(run.manifest, run.rows).values() for row in rows}
        self._results, self._discrepancies = results_digest(run), discrepancies(run)
        self._created = now()
        self._saved = time.monotonic()
        self._entries: dict[str, Mapping[str, Any]] = {}
        self._sound: set[str] = set()
        earlier = self._earlier()
        for key, row in self._rows.items():
            if (entry := self._without_grading(row)) is not None:
                self._entries[key] = entry
            elif key in earlier and earlier[key].get("of") == self._identity(row):
                self._entries[key] = earlier[key]

    # What the schedule asks for.

    @property
    def rows(self) -> list[Row]:
        return []

    @property
    def latest(self) -> dict[str, Row]:
        return {key: {"key": key, **entry} for key, entry in self._entries.items()}

    @property
    def done(self) -> set[str]:
        every = {
            f"{task}#{sample}" for task in self._run.manifest.tasks for sample in range(self._run.manifest.samples)
        }
        return every - (self._rows.keys() - self._entries.keys())

    async def attempt(self, task: Task, sample: int, attempt: int) -> Row:
        """Grade one episode again."""
        key = f"{task.id}#{sample}"
        row = self._rows[key]
        try:
            entry = await self._graded(task, row)
        except InfraError as error:
            entry = {"outcome": str(Outcome.INFRA), "fault": str(fault_of(error)), "why": [str(error)]}
        self._entries[key] = entry | {"of": self._identity(row)}
        if time.monotonic() - self._saved > _EVERY:
            self.save()
        return {"key": key, "task_id": task.id, "cause": "; ".join(entry["why"]), **entry}

    @property
    def record(self) -> Verification:
        order = {key: self._entries[key] for key in self._rows if key in self._entries}
        complete = self._rows.keys() <= {k for k, e in order.items() if e["outcome"] != Outcome.INFRA}
        return Verification(
            self._results, self._against, self._created, complete, order, self._discrepancies, self._images()
        )

    def save(self) -> None:
        """Write the record as far as it is."""
        self._saved = time.monotonic()
        data = json.dumps(self.record.to_dict(), indent=1, allow_nan=False) + "\n"
        write_atomic(self._run.path / VERIFICATION, data.encode())

    def _images(self) -> tuple[str, ...]:
        tasks = self._task_set.by_id
        rows = (row for row in self._rows.values() if row.get("task_id") in tasks)
        found = {self._changed_image(tasks[row["task_id"]], row) for row in rows}
        return tuple(sorted(change for change in found if change is not None))

    # One episode.

    def _changed_image(self, task: Task, row: Row) -> str | None:
        return changes_of_image(task, _opening(self._run, row).get("grader") or {}, self._against["grader"])

    def _earlier(self) -> Mapping[str, Mapping[str, Any]]:
        """What an interrupted verification under the same conditions found."""
        record = read_verification(self._run)
        if record is None or record.complete or record.against != json_safe(self._against):
            return {}
        return {key: e for key, e in record.episodes.items() if e.get("outcome") in (SAME, CHANGED)}

    def _identity(self, row: Row) -> list[str]:
        task = self._task_set.by_id[row["task_id"]]
        return [seal_of(row), task.content_hash]

    def _without_grading(self, row: Row) -> dict[str, Any] | None:
        """The entry of an episode whose verifier is not to be run; ``None`` if it is."""
        if not _readable(row):
            return {"outcome": DAMAGED, "why": ["its line holds no result that can be read"]}
        task, result = self._task_set.by_id.get(row["task_id"]), row["result"]
        mode = result.get("mode") or self._run.manifest.tasks[row["task_id"]].get("mode") or GradingMode.CLEAN
        why = None
        if mode != GradingMode.CLEAN:
            kept = "the whole box" if mode == GradingMode.FORK else "the running box"
            why = f"graded in mode {mode}, on {kept}, which a run folder does not hold"
        elif judge := judged_by(self._run.manifest, row):
            why = f"judged by a model ({judge}), which may answer otherwise every time"
        elif result.get("cause") and not result.get("checks") and not result.get("seconds"):
            why = f"scored 0 without its verifier, because the agent broke its box ({result['cause']})"
        elif task is None:
            why = f"{self._task_set.name} has no task {row['task_id']} here"
        elif task.unsupported:
            why = f"the task cannot run here: {task.unsupported}"
        elif self._not_kept(row):
            dropped = next((d for d in row.get("dropped") or () if d.startswith(WORKSPACE)), "")
            why = dropped or f"{WORKSPACE} was not kept"
        if why is not None:
            return {"outcome": NOT_GRADABLE, "why": [why]}
        damage = self._damage(row)
        return {"outcome": DAMAGED, "why": [damage]} if damage else None

    def _file(self, row: Row, name: str) -> Path:
        return self._run.episode_folder(row["task_id"], row["sample"]) / name

    def _not_kept(self, row: Row) -> bool:
        if "files" in row:
            return WORKSPACE not in row["files"]
        return not self._file(row, WORKSPACE).exists()

    def _damage(self, row: Row) -> str | None:
        kept = row.get("files") or {}
        for name in (WORKSPACE, TRANSCRIPT, *([PROGRAM] if PROGRAM in kept else [])):
            try:
                digest = hashlib.sha256(self._file(row, name).read_bytes()).hexdigest()
            except FileNotFoundError:
                return f"{name} is missing"
            except OSError as error:
                return f"{name} cannot be read ({error.strerror})"
            if digest != kept.get(name, digest):
                return f"{name} is not the file that was written with this result"
        return picture_damage(self._run, self._file(row, TRANSCRIPT), self._sound)

    async def _graded(self, task: Task, row: Row) -> dict[str, Any]:
        try:
            subject = await asyncio.to_thread(self._subject, row)
        except (ValueError, KeyError, TypeError, AttributeError, OSError, TaskError, tarfile.TarError) as error:
            return {"outcome": DAMAGED, "why": [f"{WORKSPACE} or {TRANSCRIPT} is damaged: {error}"]}
        floor = row["result"].get("floor")
        task = await asyncio.to_thread(task.frozen)
        old = _facts(row["result"])
        other_task, reasons = self._other_task(task), self._differences(task, row)
        caveat = {"other_task": True} if other_task else {}
        reasons = [*other_task, *reasons]
        try:
            result = await grade(task, subject, self._backend, floor=floor)
            new = _facts(_plain(result))
            if _equal(old, new):
                return {"outcome": SAME, "why": other_task} | caveat
            if result.cause == "timeout":
                reasons.append("the verifier ran out of time now")
            again = _facts(_plain(await grade(task, subject, self._backend, floor=floor)))
            if not _equal(new, again):
                reasons.append("the verifier is not deterministic: two gradings now differ")
            elif not reasons:
                reasons.append(
                    "nothing known differs, and two gradings now agree: the stored result was changed, or the verifier "
                    "depends on something outside the workspace (the time, the machine)"
                )
        except GradingError as error:
            return {"outcome": CHANGED, "why": [*reasons, str(error).split("\n")[0]], "old": old, "new": None} | caveat
        return {"outcome": CHANGED, "why": reasons, "old": old, "new": new} | caveat

    def _subject(self, row: Row) -> Subject:
        """What was graded, from the folder. Raises ValueError, TarError, ... if it is damaged."""
        tar = unpacked(self._file(row, WORKSPACE))
        with tarfile.open(fileobj=io.BytesIO(tar)) as held:
            for member in held:
                if member.name.startswith("/") or ".." in member.name.split("/"):
                    raise ValueError(f"{member.name!r} leads out of the workspace")
                if not (member.isreg() or member.isdir() or member.issym()):
                    raise ValueError(f"{member.name!r} is no file, folder or link")
        document = json.loads(self._file(row, TRANSCRIPT).read_bytes())
        ours = (document.get("extra") or {}).get("clawgym") or {}
        message = str(ours.get("final_message", row.get("final_message") or ""))
        return Subject(Archive(tar), final_message=message, transcript=transcript_payload(steps_from_atif(document)))

    def _other_task(self, task: Task) -> list[str]:
        """Whether the verifier, or the rest of the task, is not the one that the run manifest pins."""
        about = self._run.manifest.tasks[task.id]
        found = ["verifier changed"] if about["verifier"] != task.verifier.digest else []
        return found + (["task changed"] if about["hash"] != task.content_hash_with(about["verifier"]) else [])

    def _differences(self, task: Task, row: Row) -> list[str]:
        """What else is known to differ from when the episode was graded."""
        then = _opening(self._run, row)
        reasons = []
        if edited(self._run, row):
            reasons.append("the stored line was edited")
        grader, graded = self._against["grader"], then.get("grader") or {}
        if then["library"] != self._against["library"]:
            reasons.append(f"ClawGym changed ({then['library']} then, {self._against['library']} now)")
        elif graded.get("code", grader["code"]) != grader["code"]:
            reasons.append("ClawGym's grading code changed")
        if (changed := self._changed_image(task, row)) is not None:
            reasons.append(changed)
        place = {key: self._run.manifest.isolation.get(key) for key in ("backend", "tier")}
        if place != self._against["isolation"]:
            reasons.append(f"graded in {place['tier']} then, in {self._against['isolation']['tier']} now")
        return reasons


def _readable(row: Row) -> bool:
    """Whether a line has what is used of it below, in the types that it is written in."""
    result, files, sample = row.get("result"), row.get("files", {}), row.get("sample")
    if not isinstance(sample, int) or row.get("key") != f"{row.get('task_id')}#{sample}":
        return False
    return isinstance(result, dict) and isinstance(result.get("checks"), dict) and isinstance(files, dict)


def _opening(run: RunFolder, row: Row) -> Mapping[str, Any]:
    """The opening of the run in which the row was written: ``library`` and ``grader``."""
    first = {"created": run.manifest.created, "library": run.manifest.library, "grader": run.manifest.grader}
    before = [o for o in run.manifest.resumed if str(o.get("created")) <= str(row.get("finished"))]
    return {**first, **(before[-1] if before else {})}


def _plain(result: VerifierResult) -> dict[str, Any]:
    return json_safe({f.name: getattr(result, f.name) for f in dataclasses.fields(result)})


def _facts(result: Mapping[str, Any]) -> dict[str, Any]:
    """What has to come out the same; ``cause`` is shown beside it."""
    return {name: result.get(name) for name in ("official", "strict", "corrected", "tampered", "checks", "cause")}


def _equal(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    return all(old[name] == new[name] for name in ("official", "strict", "corrected", "tampered", "checks"))
