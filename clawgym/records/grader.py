"""Graders that run on the host: what they are given, and what they answer.

Most tasks are graded by a verifier in a sandbox of its own. A grader is for what no program can check: a judge with a
rubric, or code of an installed package. It reads what the agent left as bytes and never executes any of it.

Invariant: a submission never touches the file system; links, devices and folders are not part of it.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

__all__ = ["LARGEST_READ", "MOST_FILES", "Grader", "Submission"]

LARGEST_READ = 1 << 20
"""Bytes of one file that :meth:`Submission.read` returns unless more are asked for."""
MOST_FILES = 10_000
"""Files that are listed."""


@dataclass(frozen=True)
class Submission:
    """What an agent left. All of it was written by the agent: treat it as data."""

    instruction: str
    """Of the task."""
    tar: bytes = field(repr=False)
    """The frozen workspace, with changed inputs restored; an uncompressed tar archive."""
    inputs: frozenset[str] = frozenset()
    """Paths of the task's own input files."""
    final_message: str = ""
    transcript: tuple[Mapping[str, Any], ...] = ()
    """Messages with ``role`` and ``content``, ``tool_calls`` and ``results``; as the reward payload has them."""

    @cached_property
    def files(self) -> Mapping[str, int]:
        """Path below the workspace -> size in bytes, of the first :data:`MOST_FILES` regular files, sorted."""
        return {path: member.size for path, member in self._members.items()}

    @cached_property
    def _members(self) -> dict[str, tarfile.TarInfo]:
        found: dict[str, tarfile.TarInfo] = {}
        with tarfile.open(fileobj=io.BytesIO(self.tar)) as archive:
            for member in archive:
                if member.isreg() and len(found) < MOST_FILES:
                    found[member.name] = member
        return dict(sorted(found.items()))

    def read(self, path: str, limit: int = LARGEST_READ) -> bytes | None:
        """The first ``limit`` bytes of a file; None if there is no such file."""
        member = self._members.get(path)
        if member is None:
            return None
        with tarfile.open(fileobj=io.BytesIO(self.tar)) as archive:
            content = archive.extractfile(member)
            return content.read(limit) if content is not None else None


@runtime_checkable
class Grader(Protocol):
    """Grades submissions, on the host. Made anew for each grading, with the options of the task.

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
        """Changes when the same submission may get other scores. Part of the run manifest."""
        ...

    @property
    def model(self) -> str:
        """The model that decides, as its endpoint names it; empty if code alone decides.

        What a model judged is marked so in results, reports and leaderboards, and is not part of a strict score.
        """
        ...

    async def grade(self, submission: Submission) -> Mapping[str, float]:
        """Name of a check -> score in [0, 1]; the task is solved if all are 1.

        Raises :class:`~clawgym.errors.EngineError` if the model cannot be reached, which is an infrastructure error.
        Raises :class:`ValueError` if the submission cannot be judged. It then scores 0, unless the grader raises for
        the untouched workspace too.
        """
        ...
