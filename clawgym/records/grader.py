"""The interface of graders that run on the host.

Most tasks are graded by a verifier in its own sandbox. A grader on the host is for work that such a program cannot
check: a judge with a rubric, or code of an installed package. It reads the agent's files as bytes and never executes
them. If the task brings a program that checks one part and asks a model about the rest, the grader has it run in a
sandbox of its own (:attr:`Submission.check`).

Invariant: a submission is never written to the file system. Links, devices and folders are not part of it.
"""

from __future__ import annotations

import tarfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

from clawgym.tars import open_tar

__all__ = ["DEFAULT_READ_LIMIT", "MAX_FILES", "Grader", "ProgramResult", "Submission"]

DEFAULT_READ_LIMIT = 1 << 20
"""Most bytes that :meth:`Submission.read` returns by default."""
MAX_FILES = 10_000
"""Most files that :attr:`Submission.files` lists."""


@dataclass(frozen=True)
class ProgramResult:
    """What the program of a task printed: scores, or questions to a model that it needs answers to. Untrusted."""

    scores: Mapping[str, float] = field(default_factory=dict)
    """The score of each check by name; empty if there are questions."""
    questions: Mapping[str, Sequence[Mapping[str, str]]] = field(default_factory=dict)
    """Id -> messages with ``role`` and ``content``."""


@dataclass(frozen=True)
class Submission:
    """The work that an agent submitted. Untrusted: the agent wrote the files, the message and the transcript."""

    instruction: str
    """The instruction of the task."""
    tar: bytes = field(repr=False)
    """The frozen workspace, with changed inputs restored; an uncompressed tar archive."""
    inputs: frozenset[str] = frozenset()
    """Paths of the task's own input files."""
    final_message: str = ""
    transcript: tuple[Mapping[str, Any], ...] = ()
    """Messages with ``role``, ``content``, ``tool_calls`` and ``results``, as in the reward payload."""
    check: Callable[[Mapping[str, str]], Awaitable[ProgramResult]] | None = field(default=None, repr=False)
    """Runs the task's ``check.py`` on this work in a new sandbox, with answers by the id of their question. None if the
    task has none. Raises :class:`ValueError` if the program gives no result."""

    @cached_property
    def files(self) -> Mapping[str, int]:
        """Path below the workspace -> size in bytes, of the first :data:`MAX_FILES` regular files, sorted."""
        return {path: member.size for path, member in self._members.items()}

    @cached_property
    def _members(self) -> dict[str, tarfile.TarInfo]:
        found: dict[str, tarfile.TarInfo] = {}
        with open_tar(self.tar) as archive:
            for member in archive:
                if member.isreg() and len(found) < MAX_FILES:
                    found[member.name] = member
        return dict(sorted(found.items()))

    def read(self, path: str, limit: int = DEFAULT_READ_LIMIT) -> bytes | None:
        """The first ``limit`` bytes of a file; None if there is no such file."""
        member = self._members.get(path)
        if member is None:
            return None
        with open_tar(self.tar) as archive:
            content = archive.extractfile(member)
            return content.read(limit) if content is not None else None


@runtime_checkable
class Grader(Protocol):
    """Grades submissions on the host. A new instance is made for each grading, with the options of the task.

    Example:
        >>> class Short:
        ...     \"\"\"Wants a short answer.\"\"\"
        ...
        ...     name, version, model = "short", "1", ""
        ...
        ...     def __init__(self, most: int = 100) -> None:
        ...         self.most = most
        ...
        ...     async def grade(self, submission):
        ...         answer = submission.read("answer.txt") or b""
        ...         return {"answered": bool(answer.strip()), "short": len(answer) <= self.most}
    """

    name: str

    @property
    def version(self) -> str:
        """Must change when the same submission may get other scores. Stored in the run manifest."""
        ...

    @property
    def model(self) -> str:
        """The model that decides, as its endpoint names it; empty if code decides.

        Results that a model judged are marked in reports and leaderboards, and are not part of the strict score.
        """
        ...

    async def grade(self, submission: Submission) -> Mapping[str, float]:
        """Return the score of each check by name, in [0, 1]. The task is solved if all are 1.

        A grader that asks a model may set its attribute ``judgement`` to a :class:`~clawgym.records.JudgeVotes`. One
        that uses :attr:`Submission.check` sets ``runs_check = True``; others are refused for tasks with files.

        Raises :class:`~clawgym.errors.EngineError` if the model cannot be reached; this is an infrastructure error.
        Raises :class:`ValueError` if the submission cannot be judged. It then scores 0, unless the grader also raises
        for the untouched workspace.
        """
        ...
