"""What every verifier protocol shares: what is graded, what comes out, and what a program's end means."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from clawgym.records import JudgeVotes, Task, TaskFile, VerifierSpec
from clawgym.sandbox.protocol import Archive, ExecResult, Sandbox, Snapshot
from clawgym.verifiers.scores import checks_of, out_of_range

__all__ = [
    "LOG_BYTES",
    "MAX_STDOUT",
    "Subject",
    "VerifierReport",
    "VerifierProtocol",
    "failure_of",
    "file_of",
    "log_of",
    "scored",
]

MAX_STDOUT = 4 * 2**20
"""Bytes of stdout that a verifier may write."""
LOG_BYTES = 16 * 1024
"""Bytes of each stream that go into the log."""


@dataclass(frozen=True)
class Subject:
    """What is graded."""

    workspace: Archive
    snapshot: Snapshot | None = None
    """The agent's whole writable layer, for mode ``fork``."""
    running: Sandbox | None = None
    """The agent's sandbox, for mode ``live``."""
    final_message: str = ""
    transcript: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class VerifierReport:
    """What one run of a verifier gave."""

    official: float
    """The score as the task's format defines it."""
    checks: dict[str, float] = field(default_factory=dict)
    """Check name -> score in [0, 1]."""
    cause: str | None = None
    """Why there is no result: ``timeout``, ``killed``, ``crash``, ``output``, ``unfinished``, ...; None if there is
    one."""
    log: str = ""
    out_of_range: tuple[str, ...] = ()
    """Checks whose score was outside [0, 1]."""
    judgement: JudgeVotes | None = None
    """The votes of a model that judged."""
    questions: Mapping[str, Sequence[Mapping[str, str]]] = field(default_factory=dict)
    """Id -> messages to a model; a program that asks has no scores yet."""


class VerifierProtocol(Protocol):
    """How the files of a verifier are mounted, run, and their result read."""

    entry: str
    """The script that the format requires among the files."""
    folder: str
    """Where the files are mounted, read-only."""
    own_interpreter: bool
    """Whether only our untouched interpreter runs, and no script that looks programs up in the agent's layer."""
    drop: tuple[str, ...] = ()
    """Top-level names that are removed from the agent's workspace before it is graded."""

    def mounts(self, task: Task, subject: Subject) -> Mapping[str, tuple[TaskFile, ...]]:
        """Folder -> further read-only files; none unless a protocol says so."""
        return {}

    async def run(self, task: Task, sandbox: Sandbox) -> VerifierReport:
        """Run the verifier in ``sandbox``, which holds the workspace and the mounted files."""
        ...


def scored(score: float, values: Mapping[str, float], log: str) -> VerifierReport:
    """The report of a verifier that gave ``score`` and these named values."""
    return VerifierReport(score if math.isfinite(score) else 0.0, checks_of(values), None, log, out_of_range(values))


def failure_of(done: ExecResult) -> str | None:
    """Why a program gave no result, or None if it ended with exit code 0 and all of its output is there."""
    if done.timed_out:
        return "timeout"
    if done.exit_code == 137:
        return "killed"
    if done.exit_code != 0:
        return "crash"
    return "output" if done.omitted_bytes else None


def log_of(done: ExecResult) -> str:
    """Exit code and the last :data:`LOG_BYTES` of both streams."""
    text = done.output.decode("utf-8", "backslashreplace")
    errors = done.stderr.decode("utf-8", "backslashreplace")
    parts = [f"exit code {done.exit_code}", text[-LOG_BYTES:], errors[-LOG_BYTES:]]
    return "\n".join(part for part in parts if part)


def file_of(spec: VerifierSpec, path: str) -> bytes | None:
    """The content of the verifier's file ``path``, or None if it has none."""
    return next((file.read() for file in spec.files if file.path == path), None)
