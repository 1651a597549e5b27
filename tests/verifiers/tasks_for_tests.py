"""Small tasks that the grading tests share."""

from __future__ import annotations

import dataclasses
import io
import tarfile
from typing import Any

from clawgym.records import GradingMode, Limits, Task, TaskFile, VerifierSpec
from clawgym.sandbox import Archive
from clawgym.verifiers.protocols.reward_sh import standard_reward_sh

CHECK = b"""
import json, os, sys
root = sys.argv[1]
def read(path):
    try:
        return open(os.path.join(root, path)).read()
    except OSError:
        return None
total = sum(int(x) for x in (read("input/numbers.txt") or "").split())
print(json.dumps({"made": float(read("output/sum.txt") is not None),
                  "right": float((read("output/sum.txt") or "").strip() == str(total))}))
"""


def task(check: bytes = CHECK, **changes: Any) -> Task:
    """Sum the numbers: official and strict disagree when the input is edited."""
    spec = VerifierSpec("reward_sh", (TaskFile("reward.sh", standard_reward_sh()), TaskFile("check.py", check)))
    made = Task(
        id="sum",
        instruction="Write the sum of input/numbers.txt to output/sum.txt.",
        verifier=spec,
        inputs=(TaskFile("input/numbers.txt", b"1 2 3\n"),),
        limits=Limits(verify_seconds=10, memory_mb=256, disk_mb=64),
    )
    return dataclasses.replace(made, **changes)


def with_mode(made: Task, mode: GradingMode) -> Task:
    return dataclasses.replace(made, verifier=dataclasses.replace(made.verifier, mode=mode))


def archive(**files: bytes | str) -> Archive:
    """A workspace; str values are link targets. ``__`` in a name stands for ``/``, a trailing ``_py`` for ``.py``."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for key, value in files.items():
            name = key.replace("__", "/").replace("_py", ".py").replace("_txt", ".txt")
            entry = tarfile.TarInfo(name)
            if isinstance(value, str):
                entry.type, entry.linkname = tarfile.SYMTYPE, value
                tar.addfile(entry)
            else:
                entry.size = len(value)
                tar.addfile(entry, io.BytesIO(value))
    return Archive(buffer.getvalue())
