"""A frozen workspace on its way to a verifier: comparing it, rewriting it, and telling what was changed."""

from __future__ import annotations

import io
import tarfile

from clawgym.errors import SandboxError
from clawgym.records import Task, TaskFile, VerifierSpec
from clawgym.sandbox.extract import filter_tar
from clawgym.verifiers.diff import submission_diff
from clawgym.verifiers.workspace import OVERLAY, changed_inputs, compose, packed, submitted, with_protected

from ..source import Source

READS = ("verifiers.workspace", "verifiers._links", "verifiers.diff")

_SPEC = VerifierSpec(
    "reward_sh",
    (TaskFile("reward.sh", b""), TaskFile("check.py", b""), TaskFile(f"{OVERLAY}a/c", b"hidden")),
    protected=("b", "*/task.txt"),
)
_TASK = Task("t", "Do it.", _SPEC, inputs=(TaskFile("a/b", b"1\n2\n"), TaskFile("task.txt", b"\0")))


def fuzz(data: bytes) -> None:
    source = Source(data)
    try:
        tar = filter_tar(source.tar(), "", 100_000, 100).tar
    except SandboxError:
        return
    changed = changed_inputs(tar, _TASK.inputs, ("*.log",))
    rewritten = compose(tar, drop=("reward", "out"), put=[f for f in _TASK.inputs if f.path in changed])
    assert not changed_inputs(rewritten, _TASK.inputs, ())
    with tarfile.open(fileobj=io.BytesIO(rewritten)) as held:
        assert not any(name == "reward" or name.startswith("reward/") for name in held.getnames())
    graded = packed(with_protected(submitted(tar, _SPEC), _TASK.inputs, _SPEC))
    assert submitted(graded, VerifierSpec("reward_sh", ()))["a/c"].read() == b"hidden"
    submission_diff(_TASK, tar)
