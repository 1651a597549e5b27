"""Grading: the verifier runs where the agent never was, on what the agent left, and cannot be talked to.

Modes (``VerifierSpec.mode``): ``clean``, a fresh box gets a copy of the frozen workspace; ``fork``, a fresh box
over the whole writable layer, its interpreter from an untouched mount; ``live``, a fresh box that shares the
running box's network. In each: another outer uid than the agent's, no network beyond, the verifier mounted
read-only outside the workspace, its own limits, and the result taken from a stream that the agent never held.

A verifier that crashes, hangs or dies scores 0, as in the formats' own harnesses, unless it also fails on the
untouched workspace: then it is the task or the host that is broken (:class:`GradingError`).

A task may name a grader instead (``VerifierSpec.grader``), which reads the frozen workspace on the host and executes
nothing of it.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import re
import secrets
import tarfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import resources
from typing import Any

from clawgym.errors import ClawGymError, EngineError, GradingError, InfraError, SandboxDied, SandboxError, traceback_of
from clawgym.offload import offloaded
from clawgym.records import GradingMode, Submission, Task, TaskFile, VerifierResult, VerifierSpec, packages_of
from clawgym.sandbox.protocol import Archive, Backend, ExecResult, Sandbox, SandboxSpec, Snapshot
from clawgym.verifiers.graders import checked, judged_by, make_grader
from clawgym.verifiers.scan import third_party_imports
from clawgym.verifiers.scores import checks_of, corrected, last_line_score, out_of_range, plain_mean, stock_score
from clawgym.verifiers.stock import TESTS_REWARD_SH, stock_reward_sh
from clawgym.verifiers.workspace import OVERLAY, changed_inputs, compose, packed, submitted, with_protected

__all__ = ["Subject", "empty_archive", "grade", "untouched"]

VERIFIER_DIR = "/verifier"
PAYLOAD_PATH = "/payload/openclaw_reward_payload.json"
_LOGS = "/logs/verifier"
_MAX_STDOUT = 4 * 2**20
_LOG_BYTES = 16 * 1024
_CONTROL_LOG = 3000
"""Characters of a failing control's log in the error."""
_REFUSED = (400, 413, 422)
"""HTTP statuses by which an endpoint refuses the content of a request."""
_MARGIN = 3.0
"""Seconds before the end in which a run of tests can still say what it has."""

# A checker that ends its own process cannot be seen to come to its end.
_LEAVES = re.compile(r"\b_exit\b|\bos\s*\.\s*(exec|abort|kill)")


# What a layer must not bring: a result that is there already, and links to the verifier by which its files would be
# graded as the agent's own. Modes keep nothing from being found: a folder gets its own back at the end. Mounts and the
# image's own programs are not walked through: no link is needed there.
_CLEAR = """
import errno, os, stat, sys, time
def mode(path):
    try:
        return os.lstat(path).st_mode
    except FileNotFoundError:
        return 0
def remove(path):
    if not stat.S_ISDIR(mode(path)):
        return mode(path) and os.unlink(path)
    os.chmod(path, 0o700)
    for name in os.listdir(path):
        remove(path + "/" + name)
    os.rmdir(path)
if stat.S_ISDIR(mode("/logs")):
    os.chmod("/logs", stat.S_IMODE(mode("/logs")) | 0o700)
    remove("/logs/verifier")
else:
    remove("/logs")
def leads_there(path):
    try:
        fd = os.open(path, os.O_PATH)
        try:
            end = os.readlink("/proc/self/fd/%d" % fd)
        finally:
            os.close(fd)
    except OSError as error:
        # The kernel follows a circle nowhere, but a program that counts no links may. And no honest work takes seconds.
        if error.errno == errno.ELOOP or time.process_time() > 3:
            return True
        end = os.path.realpath(path)  # nothing is there yet, or there is no /proc
    return any(end == folder or end.startswith(folder + "/") for folder in sys.argv[1:])
waiting, modes = ["/"], []
skip = {"/usr/lib", "/usr/share", "/usr/include", "/usr/src", "/.pristine", "/proc", "/sys", "/dev", *sys.argv[1:]}
while waiting:
    folder = waiting.pop()
    before = stat.S_IMODE(mode(folder))
    try:
        if before & 0o700 != 0o700:
            os.chmod(folder, before | 0o700)
            modes.append((folder, before))
        entries = list(os.scandir(folder))
    except OSError:  # somebody else's: the verifier cannot enter it either
        continue
    for entry in entries:
        if entry.is_symlink() and leads_there(entry.path):
            try:
                os.unlink(entry.path)
            except OSError as error:
                if error.errno != errno.EROFS:  # the image's own: nobody can have put it there
                    raise
        elif entry.is_dir(follow_symlinks=False) and entry.path not in skip:
            waiting.append(entry.path)
for folder, before in reversed(modes):
    os.chmod(folder, before)
"""


@dataclass(frozen=True)
class Subject:
    """What is graded."""

    workspace: Archive
    snapshot: Snapshot | None = None
    """For ``fork``."""
    running: Sandbox | None = None
    """For ``live``."""
    final_message: str = ""
    transcript: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class _Verdict:
    official: float
    checks: dict[str, float] = field(default_factory=dict)
    cause: str | None = None
    log: str = ""
    out_of_range: tuple[str, ...] = ()


def _scored(score: float, values: Mapping[str, float], log: str) -> _Verdict:
    """The verdict of a verifier that gave ``score`` and named ``values``."""
    return _Verdict(score if math.isfinite(score) else 0.0, checks_of(values), None, log, out_of_range(values))


def empty_archive() -> Archive:
    """A workspace with nothing in it."""
    buffer = io.BytesIO()
    tarfile.open(fileobj=buffer, mode="w").close()
    return Archive(buffer.getvalue())


def untouched(task: Task) -> Archive:
    """The workspace as the agent finds it."""
    return Archive(compose(empty_archive().tar, put=task.inputs))


async def grade(task: Task, subject: Subject, backend: Backend, *, floor: float | None = None) -> VerifierResult:
    """Grade ``subject``; see :class:`~clawgym.records.VerifierResult` for the numbers.

    Raises :class:`GradingError` if the verifier fails on the untouched workspace too,
    :class:`~clawgym.errors.InfraError` if the host fails, and :class:`~clawgym.errors.EngineError` if a grader cannot
    reach its model.
    """
    started = time.monotonic()
    spec = task.verifier
    subject = await _what_counts(task, subject)
    changed = await offloaded(changed_inputs, subject.workspace.tar, task.inputs, spec.mutable_inputs)
    # A grader is asked once, about the restored workspace: a model would not give the same answer twice.
    official = await _run(task, subject, backend, restore=changed if spec.grader else ())
    strict = official
    if changed and official.cause is None and not spec.grader:
        strict = await _run(task, subject, backend, restore=changed)
    if official.cause is not None and spec.mode is not GradingMode.LIVE:
        control = await _run(task, await _what_counts(task, Subject(untouched(task))), backend, restore=())
        if control.cause is not None:
            raise GradingError(
                f"task {task.id}: its verifier fails on the untouched workspace too ({control.cause}): "
                f"mend the verifier in {task.origin or 'the task'}\n{control.log[-_CONTROL_LOG:]}",
                cause=f"control-{control.cause}",
            )
    checks = strict.checks
    solved = bool(checks) and strict.cause is None and min(checks.values()) >= 1.0
    return VerifierResult(
        checks=checks,
        official=official.official,
        strict=1.0 if solved else 0.0,
        corrected=None if floor is None else corrected(plain_mean(checks), floor),
        mode=spec.mode,
        verifier_hash=spec.digest,
        floor=floor,
        tampered=bool(changed) and (strict.checks != official.checks or strict.cause != official.cause),
        changed_inputs=changed,
        cause=strict.cause or official.cause,
        log=official.log,
        judged_by=judged_by(spec),
        out_of_range=tuple(sorted({*official.out_of_range, *strict.out_of_range})),
        seconds=time.monotonic() - started,
    )


async def _what_counts(task: Task, subject: Subject) -> Subject:
    """``subject``; where there are protected files, the inputs and the agent's changes to the others."""
    spec = task.verifier
    if not spec.protected:
        return subject

    def tree() -> Archive:
        return Archive(packed(with_protected(submitted(subject.workspace.tar, spec), task.inputs, spec)))

    return dataclasses.replace(subject, workspace=await offloaded(tree))


def _payload(task: Task, subject: Subject) -> bytes:
    """The documented keys of ClawGym's payload."""
    body = {
        "task_id": task.id,
        "user_query": task.instruction,
        "metadata": dict(task.metadata),
        "final_message": subject.final_message,
        "transcript": [dict(entry) for entry in subject.transcript],
    }
    return json.dumps(body, ensure_ascii=False, default=str).encode("utf-8", "replace")


async def _run(task: Task, subject: Subject, backend: Backend, restore: tuple[str, ...]) -> _Verdict:
    """One run of the verifier in a fresh box, or of the grader."""
    spec = task.verifier
    if spec.grader:
        return await _asked(task, subject, restore)
    forked = subject.snapshot if spec.mode is GradingMode.FORK else None
    limits = dataclasses.replace(task.limits, command_seconds=task.limits.verify_seconds)
    folder = "/tests" if spec.protocol == "harbor" else VERIFIER_DIR
    readonly = {folder: tuple(f for f in spec.files if not f.path.startswith(OVERLAY))}
    tests = _has_stock_tests(spec)
    if spec.protocol == "reward_sh" and not tests:
        # The format's harness puts reward/ into the workspace, where some checkers see it on their walks.
        readonly[f"{task.workspace}/reward"] = spec.files
        readonly[PAYLOAD_PATH.rpartition("/")[0]] = (
            TaskFile(PAYLOAD_PATH.rpartition("/")[2], _payload(task, subject)),
        )
    box_spec = SandboxSpec(
        image=task.sandbox_image,
        limits=limits,
        env={**task.env, **spec.env},
        workdir=task.workspace,
        readonly=readonly,
        join_network_of=subject.running if spec.mode is GradingMode.LIVE else None,
        pristine_tools=forked is not None,
        mounts={target: layer.folder for target, layer in task.layers.items()},
    )
    box = await (backend.create(box_spec) if forked is None else _fork(backend, forked, box_spec))
    if box is None:
        return _Verdict(0.0, cause="layer", log="no box can be started over the files that the agent left")
    try:
        originals = [f for f in task.inputs if f.path in restore]
        if forked is None:
            drop = ("reward",) if spec.protocol == "reward_sh" and not tests else ()
            workspace = await offloaded(partial(compose, subject.workspace.tar, drop=drop, put=originals))
            # An image may bring the files that the agent has deleted.
            if spec.protected and packages_of(task.image) is None:
                await box.exec(["rm", "-rf", "--", *(f.path for f in task.inputs)], cwd=task.workspace)
            await box.put_archive(Archive(workspace), task.workspace)
        else:
            if originals:
                await box.put(originals, task.workspace)
            await _clear(box, [*readonly])
        if tests:
            return await _tests(task, box)
        if spec.protocol == "harbor":
            return await _harbor(task, box)
        return await _reward_sh(task, box)
    except SandboxDied as error:
        return _Verdict(0.0, cause=error.cause, log=str(error))
    except SandboxError as error:
        return _Verdict(0.0, cause="workspace", log=str(error))
    finally:
        await box.close()


async def _asked(task: Task, subject: Subject, restore: tuple[str, ...]) -> _Verdict:
    """The answer of the task's grader."""
    originals = [f for f in task.inputs if f.path in restore]
    tar = subject.workspace.tar
    submission = Submission(
        task.instruction,
        await offloaded(partial(compose, tar, put=originals)) if originals else tar,
        frozenset(f.path for f in task.inputs),
        subject.final_message,
        subject.transcript,
    )
    grader = make_grader(task.verifier)
    try:
        values = checked(await grader.grade(submission), grader.name)
    except EngineError as error:
        # The endpoint refused this very request: its content, or its size. The control tells whose fault that is.
        if error.status not in _REFUSED:
            raise
        return _Verdict(0.0, cause="judge-refused", log=str(error))
    except ValueError as error:
        return _Verdict(0.0, cause="output", log=str(error)[-_LOG_BYTES:])
    except ClawGymError:
        raise
    except Exception as error:  # of the grader's own code
        return _Verdict(0.0, cause="crash", log=traceback_of(error)[-_LOG_BYTES:])
    return _scored(math.fsum(values.values()) / len(values), values, "")


async def _fork(backend: Backend, layer: Snapshot, spec: SandboxSpec) -> Sandbox | None:
    """A box over the agent's layer; None if the layer prevents it (a link where a mount has to go), not the host."""
    try:
        return await backend.fork(layer, spec)
    except (InfraError, SandboxError):
        control = await backend.create(spec)  # raises where the host is at fault
        await control.close()
    try:
        return await backend.fork(layer, spec)
    except (InfraError, SandboxError):
        return None


async def _clear(box: Sandbox, folders: list[str]) -> None:
    """Take out of a forked layer what would speak for the verifier, which is in ``folders``."""
    done = await box.exec([*box.tool("python3"), "-I", "-S", "-B", "-c", _CLEAR, *folders], cwd="/", timeout=60)
    if done.exit_code != 0:
        raise SandboxError(f"the links of the layer could not be looked through ({done.text[-200:]})")


@cache
def _runner() -> str:
    return resources.files("clawgym.verifiers").joinpath("_runner.py").read_text(encoding="utf-8")


def _log(result: ExecResult) -> str:
    text = result.output.decode("utf-8", "backslashreplace")
    errors = result.stderr.decode("utf-8", "backslashreplace")
    parts = [f"exit code {result.exit_code}", text[-_LOG_BYTES:], errors[-_LOG_BYTES:]]
    return "\n".join(p for p in parts if p)


async def _reward_sh(task: Task, box: Sandbox) -> _Verdict:
    files = {f.path: f for f in task.verifier.files}
    env = {"OPENCLAW_REWARD_PAYLOAD": PAYLOAD_PATH}
    timeout = task.limits.verify_seconds
    # The stock script's mean is taken here: the same number, and the named checks with it.
    stock = "check.py" in files and files["reward.sh"].read() == stock_reward_sh()
    if not stock:
        argv = [*box.tool("bash"), f"{VERIFIER_DIR}/reward.sh"]
        done = await box.exec(argv, cwd="/", env=env, timeout=timeout, max_output=_MAX_STDOUT, stdout_only=True)
        return _from_reward_sh(done)
    sources = [f.read().decode("utf-8", "replace") for f in files.values() if f.path.endswith(".py")]
    beside = {f.rpartition(".")[0].split("/")[0] for f in files}
    foreign = {name for source in sources for name in third_party_imports(source)} - beside
    flags = ["-I", "-B"] if foreign else ["-I", "-S", "-B"]
    argv = [*box.tool("python3"), *flags, "-c", _runner(), f"{VERIFIER_DIR}/check.py", task.workspace]
    mark = secrets.token_hex(16).encode()
    done = await box.exec(argv, cwd="/", env=env, stdin=mark, timeout=timeout, max_output=_MAX_STDOUT, stdout_only=True)
    cause = _failure(done)
    if cause is None and mark not in done.stderr and not any(map(_LEAVES.search, sources)):
        cause = "unfinished"
    done = dataclasses.replace(done, stderr=done.stderr.replace(mark, b""))
    if cause is None:
        try:
            score, values = stock_score(done.output.decode("utf-8"))
        except (ValueError, TypeError, OverflowError, RecursionError):
            cause = "output"
        else:
            return _scored(score, values, _log(done))
    return _Verdict(0.0, cause=cause, log=_log(done))


def _has_stock_tests(spec: VerifierSpec) -> bool:
    files = {f.path: f for f in spec.files}
    return "tests.json" in files and "reward.sh" in files and files["reward.sh"].read() == TESTS_REWARD_SH.encode()


async def _tests(task: Task, box: Sandbox) -> _Verdict:
    """Run the tests, as the stock ``reward.sh`` does: 1 if all passed, else 0, and each test is a check."""
    timeout = task.limits.verify_seconds
    argv = [*box.tool("python3"), "-I", "-S", "-B", f"{VERIFIER_DIR}/run_tests.py", task.workspace]
    argv.append(str(max(timeout - _MARGIN, timeout / 2)))
    done = await box.exec(argv, cwd="/", timeout=timeout, max_output=_MAX_STDOUT, stdout_only=True)
    cause = _failure(done)
    if cause is not None:
        return _Verdict(0.0, cause=cause, log=_log(done))
    try:
        found, _ = done.output.decode("utf-8").splitlines()
        told = json.loads(found)
        outcomes, cause = dict(told["outcomes"]), told["cause"]
        if not all(isinstance(word, str) for word in (*outcomes, *outcomes.values(), cause or "")):
            raise TypeError
    except (ValueError, TypeError, KeyError, RecursionError):
        return _Verdict(0.0, cause="output", log=_log(done))
    checks = {test: float(outcome in ("passed", "xfailed")) for test, outcome in outcomes.items()}
    resolved = cause is None and bool(checks) and all(checks.values())
    failed = [f"{outcome} {test}" for test, outcome in outcomes.items() if not checks[test]]
    log = "\n".join([*failed[:200], done.stderr.decode("utf-8", "backslashreplace")[-2 * _LOG_BYTES :]])
    return _Verdict(float(resolved), checks, cause, log)


def _failure(done: ExecResult) -> str | None:
    if done.timed_out:
        return "timeout"
    if done.exit_code == 137:
        return "killed"
    if done.exit_code != 0:
        return "crash"
    return "output" if done.omitted_bytes else None


def _from_reward_sh(done: ExecResult) -> _Verdict:
    cause = _failure(done)
    if cause not in (None, "output"):
        return _Verdict(0.0, cause=cause, log=_log(done))
    score = last_line_score(done.output.decode("utf-8", "replace"))
    return _scored(score, {"score": score}, _log(done))


async def _harbor(task: Task, box: Sandbox) -> _Verdict:
    """Run ``test.sh``; its result is ``reward.json`` (named numbers) or ``reward.txt`` (one), not its exit code."""
    await box.put((), _LOGS)
    argv = [*box.tool("bash"), "/tests/test.sh"]
    done = await box.exec(argv, timeout=task.limits.verify_seconds, max_output=_LOG_BYTES * 2)
    if done.timed_out:
        return _Verdict(0.0, cause="timeout", log=_log(done))
    for name in ("reward.json", "reward.txt"):
        try:
            text = (await box.get(f"{_LOGS}/{name}", max_bytes=1 << 20)).decode("utf-8", "replace")
        except SandboxDied:
            raise
        except SandboxError:
            continue
        try:
            data = json.loads(text) if name.endswith("json") else float(text.strip())
            values = {str(k): float(v) for k, v in data.items()} if isinstance(data, dict) else {"reward": float(data)}
            score = values["reward"] if "reward" in values else math.fsum(values.values()) / len(values)
        except (ValueError, TypeError, ArithmeticError, RecursionError):
            return _Verdict(0.0, cause="output", log=_log(done))
        return _scored(score, values, _log(done))
    return _Verdict(0.0, cause="crash", log=_log(done))
