"""Reference solutions that apply a patch."""

from __future__ import annotations

from functools import cache
from importlib import resources

from clawgym.records import TaskFile

__all__ = ["patch_solution"]

_SOLVE = """\
#!/usr/bin/env bash
set -e
here="$(cd "$(dirname "$0")" && pwd)"
python3 -I -S "$here/patching.py" . < "$here/fix.patch"
"""


def patch_solution(patch: bytes) -> tuple[TaskFile, ...]:
    """The files of a solution that applies the unified diff ``patch`` in the workspace
    (:mod:`clawgym.tasks.swe.patching`)."""
    return (
        TaskFile("solve.sh", _SOLVE.encode(), executable=True),
        TaskFile("fix.patch", patch),
        TaskFile("patching.py", _program()),
    )


@cache
def _program() -> bytes:
    return resources.files("clawgym.tasks.swe").joinpath("patching.py").read_bytes()
