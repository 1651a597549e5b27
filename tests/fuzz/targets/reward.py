"""What a verifier prints, or leaves in its reward file, and the votes of a judge."""

from __future__ import annotations

import math
from typing import Any

from clawgym.errors import GradingError, SandboxError
from clawgym.records import GradingMode, Task, TaskFile, VerifierResult, VerifierSpec
from clawgym.rewards.votes import hint_of, verdict_of
from clawgym.sandbox.protocol import ExecResult
from clawgym.verifiers.grading import Subject, empty_archive, grade
from clawgym.verifiers.protocols.reward_sh import standard_reward_sh
from clawgym.verifiers.protocols.tests import TESTS_REWARD_SH

from ..source import Source, run

READS = ("verifiers.grading", "rewards.votes")

_STOCK = VerifierSpec("reward_sh", (TaskFile("reward.sh", standard_reward_sh()), TaskFile("check.py", b"print('{}')")))
_OWN = VerifierSpec("reward_sh", (TaskFile("reward.sh", b"echo 1"),))
_TESTS = VerifierSpec("reward_sh", (TaskFile("reward.sh", TESTS_REWARD_SH.encode()), TaskFile("tests.json", b"{}")))
_HARBOR = VerifierSpec("harbor", (TaskFile("test.sh", b"true"),), GradingMode.CLEAN)
_TOLD = {"outcomes": {"t::a": "passed", "t::b": "failed"}, "cause": None}
_SCORES = {"right": 1.0, "also": 0.5, "reward": 1}


class _Box:
    """A sandbox whose verifier says what the input says."""

    def __init__(self, source: Source, kind: VerifierSpec) -> None:
        self._source, self._kind = source, kind

    def tool(self, name: str) -> list[str]:
        return [name]

    async def put(self, files: Any, dest: str) -> None: ...

    async def put_archive(self, archive: Any, dest: str) -> None: ...

    async def exec(self, argv: Any, *, stdin: bytes = b"", **_: Any) -> ExecResult:
        source = self._source
        said = source.json(_TOLD if self._kind is _TESTS else _SCORES)
        said += source.pick((b"", b"\n", b"\n[]", b"\n1e400", b"\n\xff", b"\n0x1", b"\n" + b"9" * 5000))
        code = source.pick((0, 0, 0, 1, 137))
        cut = source.byte() // 250
        return ExecResult(said, code, "/", timed_out=source.byte() > 250, omitted_bytes=cut, stderr=b"x" + stdin)

    async def get(self, path: str, *, max_bytes: int = 0) -> bytes:
        source = self._source
        if source.byte() > 240:
            raise SandboxError("not there: look again")
        return source.json(_SCORES) if path.endswith("json") else source.pick((source.rest(), b"0.5", b"1" * 400))

    async def close(self) -> None: ...


class _Backend:
    def __init__(self, box: _Box) -> None:
        self._box = box

    async def create(self, spec: Any) -> _Box:
        return self._box


def fuzz(data: bytes) -> None:
    source = Source(data)
    kind = source.pick((_STOCK, _OWN, _TESTS, _HARBOR))
    task = Task("t", "Do it.", kind)
    box: Any = _Backend(_Box(source, kind))
    try:
        result = run(grade(task, Subject(empty_archive()), box))
    except GradingError:
        return
    assert isinstance(result, VerifierResult)
    assert math.isfinite(result.official)
    assert isinstance(result.cause, str | None)
    assert result.strict in (0.0, 1.0)
    assert all(isinstance(name, str) and 0 <= value <= 1 for name, value in result.checks.items())
    text = data.decode("utf-8", "replace")
    if verdict_of(text) is not None:
        assert text.rstrip().endswith(f"Verdict: {verdict_of(text):+}".replace("+0", "0"))
    hint_of(text, "ab")
