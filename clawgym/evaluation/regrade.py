"""Grade the stored workspaces of a run again, without a model (``clawgym runs verify``).

Invariants:

- The results of the run are not changed; only ``verification.json`` is written.
- An episode is ``same`` only if its verifier ran again on the files whose digests the result names, and gave the same
  checks and scores. An episode that cannot be graded from its workspace alone is never ``same``.
- The run folder is untrusted. Archives are checked before use.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import tarfile
import time
from collections.abc import Mapping
from typing import Any

from clawgym.errors import GradingError, InfraError, TaskError
from clawgym.evaluation.grader import changes_of_image, describe_grader
from clawgym.evaluation.integrity import discrepancies, edited, picture_damage, results_digest, unpacked
from clawgym.evaluation.progress import NoProgress, ProgressView
from clawgym.evaluation.schedule import Schedule
from clawgym.evaluation.summary import graded_by_task, judged_by
from clawgym.evaluation.verification import (
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
from clawgym.records.run_folder import PROGRAM, TRANSCRIPT, WORKSPACE, RunFolder, checksum_of, write_atomic
from clawgym.rollout import fault_of, transcript_payload
from clawgym.sandbox.machine import machine_of
from clawgym.sandbox.protocol import Archive, Backend
from clawgym.tars import open_tar
from clawgym.verifiers.grading import Subject, grade

__all__ = ["regrade"]

_SAVE_SECONDS = 5.0
"""Seconds between two writes of an unfinished record."""

Row = Mapping[str, Any]


async def regrade(
    run: RunFolder,
    task_set: TaskSet,
    backend: Backend,
    *,
    concurrency: int | None = None,
    progress: ProgressView | None = None,
    stop: asyncio.Event | None = None,
) -> Verification:
    """Grade the stored workspaces of a run again, and write ``verification.json`` into its folder.

    ``task_set``: the tasks of the run, with their verifiers. An interrupted call resumes if the library, the grader
    and the isolation are unchanged. After a finished call everything is graded again.

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
    regrading = _Regrading(run, task_set, backend, against)
    schedule = Schedule(
        regrading,
        tasks,
        regrading.attempt,
        progress or NoProgress(),
        samples=run.manifest.samples,
        concurrency=concurrency,
        machine=machine_of(backend),
        retry_seconds=0.5,
    )
    try:
        await schedule.run(stop or asyncio.Event())
    finally:
        regrading.save()
    return regrading.record


class _Regrading:
    """One call of :func:`regrade`; the :class:`~clawgym.evaluation.progress.ResultStore` of its schedule."""

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
        self._intact_pictures: set[str] = set()
        earlier = self._earlier()
        for key, row in self._rows.items():
            if (entry := self._without_grading(row)) is not None:
                self._entries[key] = entry
            elif key in earlier and earlier[key].get("of") == self._identity(row):
                self._entries[key] = earlier[key]

    # The methods of a ResultStore.

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
        if time.monotonic() - self._saved > _SAVE_SECONDS:
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
        """Write the record, complete or not."""
        self._saved = time.monotonic()
        data = json.dumps(self.record.to_dict(), indent=1, allow_nan=False) + "\n"
        write_atomic(self._run.path / VERIFICATION, data.encode())

    def _images(self) -> tuple[str, ...]:
        tasks = self._task_set.by_id
        rows = (row for row in self._rows.values() if row.get("task_id") in tasks)
        found = {self._changed_image(tasks[row["task_id"]], row) for row in rows}
        return tuple(sorted(change for change in found if change is not None))

    # Methods about one episode.

    def _changed_image(self, task: Task, row: Row) -> str | None:
        return changes_of_image(task, _start_of_run(self._run, row).get("grader") or {}, self._against["grader"])

    def _earlier(self) -> Mapping[str, Mapping[str, Any]]:
        """The entries of an interrupted verification under the same conditions."""
        record = read_verification(self._run)
        if record is None or record.complete or record.against != json_safe(self._against):
            return {}
        return {key: e for key, e in record.episodes.items() if e.get("outcome") in (SAME, CHANGED)}

    def _identity(self, row: Row) -> list[str]:
        task = self._task_set.by_id[row["task_id"]]
        return [checksum_of(row), task.content_hash]

    def _without_grading(self, row: Row) -> dict[str, Any] | None:
        """The entry of an episode that cannot be graded again; ``None`` if it can."""
        if not _readable(row):
            return {"outcome": DAMAGED, "why": ["its line has no readable result"]}
        task, result = self._task_set.by_id.get(row["task_id"]), row["result"]
        mode = result.get("mode") or self._run.manifest.tasks[row["task_id"]].get("mode") or GradingMode.CLEAN
        why = None
        if mode != GradingMode.CLEAN:
            graded = "a snapshot of the sandbox" if mode == GradingMode.FORK else "the running sandbox"
            why = f"graded in mode {mode}, on {graded}, which is not stored in a run folder"
        elif judge := judged_by(self._run.manifest, row):
            why = f"judged by a model ({judge}), whose answers may vary"
        elif result.get("cause") and not result.get("checks") and not result.get("seconds"):
            why = f"scored 0 without running the verifier, because the agent broke its sandbox ({result['cause']})"
        elif task is None:
            why = f"{self._task_set.name} has no task {row['task_id']} here"
        elif task.unsupported:
            why = f"the task cannot run here: {task.unsupported}"
        elif self._not_stored(row):
            dropped = next((d for d in row.get("dropped") or () if d.startswith(WORKSPACE)), "")
            why = dropped or f"{WORKSPACE} was not stored"
        if why is not None:
            return {"outcome": NOT_GRADABLE, "why": [why]}
        damage = self._damage(row)
        return {"outcome": DAMAGED, "why": [damage]} if damage else None

    def _not_stored(self, row: Row) -> bool:
        if "files" in row:
            return WORKSPACE not in row["files"]
        return not (self._run.path / self._run.place_of(row) / WORKSPACE).exists()

    def _damage(self, row: Row) -> str | None:
        digests, content = row.get("files") or {}, b""
        for name in (WORKSPACE, *([PROGRAM] if PROGRAM in digests else []), TRANSCRIPT):
            try:
                content = self._run.read_of(row, name)
            except FileNotFoundError:
                return f"{name} is missing"
            except OSError as error:
                return f"{name} cannot be read ({error.strerror})"
            if name in digests and digests[name] != hashlib.sha256(content).hexdigest():
                return f"{name} changed after this result was written"
        return picture_damage(self._run, content, self._intact_pictures)

    async def _graded(self, task: Task, row: Row) -> dict[str, Any]:
        try:
            subject = await asyncio.to_thread(self._subject, row)
        except (ValueError, KeyError, TypeError, AttributeError, OSError, TaskError, tarfile.TarError) as error:
            return {"outcome": DAMAGED, "why": [f"{WORKSPACE} or {TRANSCRIPT} is damaged: {error}"]}
        baseline = row["result"].get("floor")
        task = await asyncio.to_thread(task.frozen)
        old = _scores_of(row["result"])
        other_task, reasons = self._other_task(task), self._differences(task, row)
        caveat = {"other_task": True} if other_task else {}
        reasons = [*other_task, *reasons]
        try:
            result = await grade(task, subject, self._backend, baseline=baseline)
            new = _scores_of(_plain(result))
            if _equal(old, new):
                return {"outcome": SAME, "why": other_task} | caveat
            if result.cause == "timeout":
                reasons.append("the verifier timed out this time")
            again = _scores_of(_plain(await grade(task, subject, self._backend, baseline=baseline)))
            if not _equal(new, again):
                reasons.append("the verifier is not deterministic: two gradings gave different results")
            elif not reasons:
                reasons.append(
                    "no known difference, and two gradings now give the same result: the stored result was changed, or "
                    "the verifier depends on something outside the workspace (the time, the machine)"
                )
        except GradingError as error:
            return {"outcome": CHANGED, "why": [*reasons, str(error).split("\n")[0]], "old": old, "new": None} | caveat
        return {"outcome": CHANGED, "why": reasons, "old": old, "new": new} | caveat

    def _subject(self, row: Row) -> Subject:
        """Read the workspace and the transcript that were graded. Raises ValueError, TarError, ... if damaged."""
        tar = unpacked(self._run.read_of(row, WORKSPACE))
        with open_tar(tar) as archive:
            for member in archive:
                if member.name.startswith("/") or ".." in member.name.split("/"):
                    raise ValueError(f"{member.name!r} is outside the workspace")
                if not (member.isreg() or member.isdir() or member.issym()):
                    raise ValueError(f"{member.name!r} is not a file, folder or link")
        document = json.loads(self._run.read_of(row, TRANSCRIPT))
        extra = (document.get("extra") or {}).get("clawgym") or {}
        message = str(extra.get("final_message", row.get("final_message") or ""))
        return Subject(Archive(tar), final_message=message, transcript=transcript_payload(steps_from_atif(document)))

    def _other_task(self, task: Task) -> list[str]:
        """Whether the verifier, or the rest of the task, differs from the run manifest."""
        about = self._run.manifest.tasks[task.id]
        found = ["verifier changed"] if about["verifier"] != task.verifier.digest else []
        return found + (["task changed"] if about["hash"] != task.content_hash_with(about["verifier"]) else [])

    def _differences(self, task: Task, row: Row) -> list[str]:
        """Other known differences from when the episode was graded."""
        then = _start_of_run(self._run, row)
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
        isolation = {key: self._run.manifest.isolation.get(key) for key in ("backend", "tier")}
        if isolation != self._against["isolation"]:
            reasons.append(f"isolation changed ({isolation['tier']} then, {self._against['isolation']['tier']} now)")
        return reasons


def _readable(row: Row) -> bool:
    """Whether a row has the fields that are used here, with their types."""
    result, files, sample = row.get("result"), row.get("files", {}), row.get("sample")
    if not isinstance(sample, int) or row.get("key") != f"{row.get('task_id')}#{sample}":
        return False
    return isinstance(result, dict) and isinstance(result.get("checks"), dict) and isinstance(files, dict)


def _start_of_run(run: RunFolder, row: Row) -> Mapping[str, Any]:
    """The ``library`` and ``grader`` recorded when the run was started, or resumed, before the row was written."""
    first = {"created": run.manifest.created, "library": run.manifest.library, "grader": run.manifest.grader}
    before = [o for o in run.manifest.resumed if str(o.get("created")) <= str(row.get("finished"))]
    return {**first, **(before[-1] if before else {})}


def _plain(result: VerifierResult) -> dict[str, Any]:
    return json_safe(result.as_dict())


def _scores_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that must be reproduced, and ``cause``, which is only shown."""
    return {name: result.get(name) for name in ("official", "strict", "corrected", "tampered", "checks", "cause")}


def _equal(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    return all(old[name] == new[name] for name in ("official", "strict", "corrected", "tampered", "checks"))
