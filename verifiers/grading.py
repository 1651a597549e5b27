"""Grading: run the verifier on the agent's workspace in a new sandbox.

Modes (``VerifierSpec.mode``):

- ``clean``: a new sandbox with a copy of the frozen workspace.
- ``fork``: a new sandbox over all files that the agent wrote, with an interpreter from an untouched mount.
- ``live``: a new sandbox that shares the network of the agent's running sandbox.

In all modes the verifier has another outer uid than the agent, no other network, its own limits, and its files mounted
read-only outside the workspace. The agent has no access to the stream of its result.

A verifier that crashes, hangs or dies scores 0, as in the formats' original harnesses. If it also fails on the initial
workspace, the task or the host is broken (:class:`GradingError`).

A task may have a grader instead (``VerifierSpec.grader``). It reads the frozen workspace on the host and executes no
code from it. If it uses the verifier's files, they run in a new sandbox as above.
:mod:`clawgym.verifiers.protocols` runs the files of a verifier.
"""

from __future__ import annotations

import dataclasses
import io
import tarfile
import time
from collections.abc import Mapping
from functools import cache, partial
from importlib import resources

from clawgym.errors import GradingError, InfraError, SandboxDied, SandboxError
from clawgym.offload import offloaded, offloaded_if_large
from clawgym.records import GradingMode, Task, VerifierResult, packages_of
from clawgym.sandbox.protocol import Archive, Backend, Sandbox, SandboxSpec, Snapshot
from clawgym.verifiers.graders import ask_grader, judged_by
from clawgym.verifiers.protocols import AskingCheck, Subject, VerifierProtocol, VerifierReport, protocol_of
from clawgym.verifiers.reuse import Grades
from clawgym.verifiers.scores import baseline_adjusted, plain_mean
from clawgym.verifiers.workspace import OVERLAY, changed_inputs, compose, packed, submitted, with_protected

__all__ = ["Subject", "empty_archive", "grade", "progress", "untouched"]

_CONTROL_LOG = 3000
"""Characters of a failing control's log in the error."""


def empty_archive() -> Archive:
    """An empty workspace."""
    buffer = io.BytesIO()
    tarfile.open(fileobj=buffer, mode="w").close()
    return Archive(buffer.getvalue())


def untouched(task: Task) -> Archive:
    """The initial workspace of a task."""
    return Archive(compose(empty_archive().tar, put=task.inputs))


async def grade(
    task: Task, subject: Subject, backend: Backend, *, baseline: float | None = None, grades: Grades | None = None
) -> VerifierResult:
    """Grade ``subject``; see :class:`~clawgym.records.VerifierResult` for the numbers.

    ``baseline`` is the task's no-model baseline, if it is known. With ``grades`` a report that a pure verifier gave for
    an identical workspace is reused.

    Raises :class:`GradingError` if the verifier fails on the untouched workspace too,
    :class:`~clawgym.errors.InfraError` if the host fails, and :class:`~clawgym.errors.EngineError` if a grader cannot
    reach its model.
    """
    started = time.monotonic()
    spec = task.verifier
    subject = await _submitted(task, subject)
    changed = await _changed(task, subject)
    # A grader is called once, on the restored workspace, because a model may not give the same answer twice.
    official = await _run(task, subject, backend, restore=changed if spec.grader else (), grades=grades)
    strict = official
    if changed and official.cause is None and not spec.grader:
        strict = await _run(task, subject, backend, restore=changed, grades=grades)
    if official.cause is not None and spec.mode is not GradingMode.LIVE:
        control = await _run(task, await _submitted(task, Subject(untouched(task))), backend, restore=())
        if control.cause is not None:
            raise GradingError(
                f"task {task.id}: its verifier fails on the untouched workspace too ({control.cause}): "
                f"repair the verifier in {task.origin or 'the task'}\n{control.log[-_CONTROL_LOG:]}",
                cause=f"control-{control.cause}",
            )
    checks = strict.checks
    solved = bool(checks) and strict.cause is None and min(checks.values()) >= 1.0
    return VerifierResult(
        checks=checks,
        official=official.official,
        strict=1.0 if solved else 0.0,
        corrected=None if baseline is None else baseline_adjusted(plain_mean(checks), baseline),
        mode=spec.mode,
        verifier_hash=spec.digest,
        floor=baseline,
        tampered=bool(changed) and (strict.checks != official.checks or strict.cause != official.cause),
        changed_inputs=changed,
        cause=strict.cause or official.cause,
        log=official.log,
        judged_by=judged_by(spec),
        judgement=strict.judgement,
        out_of_range=tuple(sorted({*official.out_of_range, *strict.out_of_range})),
        seconds=time.monotonic() - started,
    )


async def progress(task: Task, subject: Subject, backend: Backend, *, grades: Grades | None = None) -> float:
    """The mean score of the verifier's plain checks on ``subject``, in [0, 1], with changed inputs restored.

    At most one run of the verifier (``grades`` as for :func:`grade`), without a control: a verifier that fails gives 0,
    as on an unfinished workspace. Raises
    :class:`~clawgym.errors.InfraError` if the host fails.
    """
    subject = await _submitted(task, subject)
    changed = await _changed(task, subject)
    report = await _run(task, subject, backend, restore=changed, grades=grades)
    return plain_mean(report.checks) if report.cause is None else 0.0


async def _changed(task: Task, subject: Subject) -> tuple[str, ...]:
    tar = subject.workspace.tar
    return await offloaded_if_large(len(tar), changed_inputs, tar, task.inputs, task.verifier.mutable_inputs)


async def _submitted(task: Task, subject: Subject) -> Subject:
    """``subject``; if the task has protected files, with these restored."""
    spec = task.verifier
    if not spec.protected:
        return subject

    def tree() -> Archive:
        return Archive(packed(with_protected(submitted(subject.workspace.tar, spec), task.inputs, spec)))

    return dataclasses.replace(subject, workspace=await offloaded(tree))


_DISARMED = dict.fromkeys(("BASH_ENV", "ENV", "LD_AUDIT", "LD_PRELOAD"), "")
"""Variables that name files to load code from. An image or a task may set them to files that the agent can change."""


async def _run(
    task: Task, subject: Subject, backend: Backend, restore: tuple[str, ...], grades: Grades | None = None
) -> VerifierReport:
    """Run the verifier once, with the inputs in ``restore`` restored, or take the report of an earlier run."""
    if grades is None:
        return await _run_once(task, subject, backend, restore)
    return await grades.of(task, subject.workspace, restore, partial(_run_once, task, subject, backend, restore))


async def _run_once(task: Task, subject: Subject, backend: Backend, restore: tuple[str, ...]) -> VerifierReport:
    spec = task.verifier
    if not spec.grader:
        return await _run_files(task, subject, backend, restore, protocol_of(spec))

    async def check(answers: Mapping[str, str]) -> VerifierReport:
        return await _run_files(task, subject, backend, restore, AskingCheck(answers))

    originals = [file for file in task.inputs if file.path in restore]
    return await ask_grader(task, subject, originals, check if spec.files else None)


async def _run_files(
    task: Task, subject: Subject, backend: Backend, restore: tuple[str, ...], protocol: VerifierProtocol
) -> VerifierReport:
    """Run the verifier's files in a new sandbox."""
    spec = task.verifier
    originals = [file for file in task.inputs if file.path in restore]
    forked = subject.snapshot if spec.mode is GradingMode.FORK else None
    mounted = {protocol.folder: tuple(file for file in spec.files if not file.path.startswith(OVERLAY))}
    mounted |= protocol.mounts(task, subject)
    sandbox_spec = SandboxSpec(
        image=task.sandbox_image,
        limits=dataclasses.replace(task.limits, command_seconds=task.limits.verify_seconds),
        env={**task.env, **_DISARMED, **spec.env},
        workdir=task.workspace,
        readonly=mounted,
        join_network_of=subject.running if spec.mode is GradingMode.LIVE else None,
        pristine_tools=forked is not None,
        # A checker that imports the agent's code starts as usual: it shares its process with that code.
        warm_python=protocol.own_interpreter and spec.executes_agent_code != "in_process",
        mounts={target: layer.folder for target, layer in task.layers.items()},
    )
    sandbox = await (backend.create(sandbox_spec) if forked is None else _fork(backend, forked, sandbox_spec))
    if sandbox is None:
        return VerifierReport(0.0, cause="layer", log="no sandbox can be started over the files that the agent left")
    try:
        if forked is None:
            tar = subject.workspace.tar
            workspace = await offloaded_if_large(len(tar), partial(compose, tar, drop=protocol.drop, put=originals))
            # The image may contain files that the agent has deleted.
            if spec.protected and packages_of(task.image) is None:
                await sandbox.exec(["rm", "-rf", "--", *(file.path for file in task.inputs)], cwd=task.workspace)
            await sandbox.put_archive(Archive(workspace), task.workspace)
        else:
            if originals:
                await sandbox.put(originals, task.workspace)
            await _clear(sandbox, [*mounted])
        return await protocol.run(task, sandbox)
    except SandboxDied as error:
        return VerifierReport(0.0, cause=error.cause, log=str(error))
    except SandboxError as error:
        return VerifierReport(0.0, cause="workspace", log=str(error))
    finally:
        await sandbox.close()


async def _fork(backend: Backend, layer: Snapshot, spec: SandboxSpec) -> Sandbox | None:
    """A sandbox over the agent's files; None if these files, not the host, prevent it (a link in place of a mount)."""
    try:
        return await backend.fork(layer, spec)
    except (InfraError, SandboxError):
        control = await backend.create(spec)  # raises if the host is at fault
        await control.close()
    try:
        return await backend.fork(layer, spec)
    except (InfraError, SandboxError):
        return None


async def _clear(sandbox: Sandbox, folders: list[str]) -> None:
    """Remove files of the agent that could replace or expose the verifier, which is mounted at ``folders``."""
    argv = [*sandbox.tool("python3"), "-I", "-S", "-B", "-c", _clear_layer(), *folders]
    done = await sandbox.exec(argv, cwd="/", timeout=60)
    if done.exit_code != 0:
        raise SandboxError(f"the links of the layer could not be searched ({done.text[-200:]}): grade it again")


@cache
def _clear_layer() -> str:
    return resources.files("clawgym.verifiers").joinpath("_clear_layer.py").read_text(encoding="utf-8")
