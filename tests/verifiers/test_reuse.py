"""Reports of verifiers are reused for identical workspaces of pure verifiers, and for nothing else."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import tarfile

import pytest

from clawgym.errors import InfraError
from clawgym.records import GradingMode, TaskFile
from clawgym.sandbox import Backend
from clawgym.sandbox.protocol import Archive
from clawgym.verifiers.grading import Subject, grade, progress
from clawgym.verifiers.protocols import VerifierReport
from clawgym.verifiers.reuse import Grades, is_pure, workspace_digest

from .tasks_for_tests import archive, task

NUMBERS = {"input__numbers_txt": b"1 2 3\n"}
PRINT = "import json; print(json.dumps({'made': 1.0}))\n"


@pytest.mark.parametrize(
    "source",
    [
        PRINT,
        "import re, csv, sys\nfrom pathlib import Path\nprint(len(Path(sys.argv[1]).read_text()))",
        "import os\nprint(os.path.getsize('a'), os.stat('a').st_size, os.stat('a').st_mode)",
        "from datetime import datetime, date\nprint(datetime.strptime('2020', '%Y'), date(2020, 1, 1))",
    ],
)
def test_checkers_of_files_alone_are_pure(source: str) -> None:
    assert is_pure(task(source.encode()).verifier)


@pytest.mark.parametrize(
    "source",
    [
        "import time",
        "from random import random",
        "import subprocess",
        "import os; os.environ['X']",
        "from os import getenv as g",
        "import os; os.stat('a').st_mtime_ns",
        "import os; os.stat('a')[8]",
        "import os.path; os.path.getmtime('a')",
        "from datetime import datetime; datetime.now()",
        "import os; os.urandom(3)",
        "print(hash('a'))",
        "__import__('time')",
        "import importlib",
        "import yaml",
        "getattr(__builtins__, 'ha' + 'sh')",
        "open('/payload/openclaw_reward_payload.json')",
        "import os; os.listdir('/Payload')",
        "open('/proc/uptime')",
        "import sqlite3; sqlite3.connect(':memory:').execute('select random ()')",
        "import sqlite3; sqlite3.connect(':memory:').execute(\"select datetime('now')\")",
        "def f(:",
    ],
)
def test_checkers_of_anything_else_are_not(source: str) -> None:
    assert not is_pure(task((source + "\n" + PRINT).encode()).verifier)


def test_only_the_standard_check_in_clean_mode_is_pure() -> None:
    spec = task(PRINT.encode()).verifier
    assert is_pure(spec)
    own_script = tuple(TaskFile("reward.sh", b"date +%s\n") if f.path == "reward.sh" else f for f in spec.files)
    for changed in (
        {"mode": GradingMode.FORK},
        {"executes_agent_code": "subprocess"},
        {"files": own_script},
        {"protected": ("tests/*",)},
        {"files": (*spec.files, TaskFile("helper.py", b"import time"))},
    ):
        assert not is_pure(dataclasses.replace(spec, **changed))


def _tar(*members: tuple[str, bytes, int, int]) -> Archive:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as out:
        for name, data, mode, mtime in members:
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode, entry.mtime = len(data), mode, mtime
            out.addfile(entry, io.BytesIO(data))
    return Archive(buffer.getvalue())


def test_the_digest_is_over_all_but_times() -> None:
    a = workspace_digest(_tar(("a", b"1", 0o644, 1)))
    assert a == workspace_digest(_tar(("a", b"1", 0o644, 2)))
    others = [
        _tar(("a", b"2", 0o644, 1)),
        _tar(("b", b"1", 0o644, 1)),
        _tar(("a", b"1", 0o755, 1)),
        _tar(("a", b"", 0o644, 1), ("b", b"1", 0o644, 1)),
        _tar(("a", b"1", 0o644, 1), ("b", b"", 0o644, 1)),
    ]
    assert len({a, *map(workspace_digest, others)}) == 6


async def test_an_identical_workspace_is_graded_once(backend: Backend) -> None:
    grades = Grades()
    right, wrong = (Subject(archive(**NUMBERS, output__sum_txt=text)) for text in (b"6", b"7"))
    results = await asyncio.gather(
        *(grade(task(), one, backend, grades=grades) for one in (right, wrong, right, right))
    )
    assert [result.strict for result in results] == [1.0, 0.0, 1.0, 1.0]
    assert (grades.run, grades.reused) == (2, 2)
    assert await progress(task(), right, backend, grades=grades) == 1.0
    assert (grades.run, grades.reused) == (2, 3)
    assert dataclasses.replace(results[2], seconds=0) == dataclasses.replace(results[0], seconds=0)


async def test_restored_inputs_are_another_workspace(backend: Backend) -> None:
    """A changed input is graded twice, as it is and restored; neither takes the place of the other."""
    grades = Grades()
    forged = Subject(archive(input__numbers_txt=b"1\n", output__sum_txt=b"1"))
    for _ in range(2):
        result = await grade(task(), forged, backend, grades=grades)
        assert (result.official, result.strict, result.tampered) == (1.0, 0.0, True)
    assert (grades.run, grades.reused) == (2, 2)


async def test_another_task_or_an_impure_verifier_is_run(backend: Backend) -> None:
    grades = Grades()
    same = Subject(archive(**NUMBERS, output__sum_txt=b"6"))
    for one in (
        task(),
        dataclasses.replace(task(), instruction="Another one."),
        task(b"import time\n" + PRINT.encode()),
    ):
        await grade(one, same, backend, grades=grades)
    assert (grades.run, grades.reused) == (3, 0)
    await grade(task(b"import time\n" + PRINT.encode()), same, backend, grades=grades)
    assert (grades.run, grades.reused) == (4, 0)


async def test_failures_are_not_kept() -> None:
    grades, same = Grades(), archive(**NUMBERS)
    answers: list[VerifierReport | Exception] = [
        VerifierReport(0.0, cause="timeout"),
        InfraError("the host: try again"),
        VerifierReport(1.0, {"a": 1.0}),
    ]

    async def run() -> VerifierReport:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def once() -> asyncio.Future[VerifierReport]:
        return asyncio.ensure_future(grades.of(task(), same, (), run))

    assert (await once()).cause == "timeout"
    with pytest.raises(InfraError):
        await once()
    assert (await once()).official == 1.0
    assert (await once()).official == 1.0
    assert (grades.run, grades.reused) == (3, 1)


async def test_the_least_recently_used_is_forgotten() -> None:
    grades, spaces = Grades(most=2), [archive(a=b"%d" % n) for n in range(3)]

    async def run() -> VerifierReport:
        return VerifierReport(1.0, {"a": 1.0})

    for n in (0, 1, 0, 2, 0, 1):
        await grades.of(task(), spaces[n], (), run)
    assert (grades.run, grades.reused) == (4, 2)
