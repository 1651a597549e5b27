"""Solutions of an instance that check its verifier: the reverse patch, and wrong solutions that must not pass."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from clawgym.records import TaskFile
from clawgym.tasks.swe.solution import patch_solution
from clawgym.verifiers.diff import diff

__all__ = ["reference", "wrong"]


def reference(path: str, bad: bytes, good: bytes) -> tuple[TaskFile, ...]:
    """The reference solution: a unified diff that changes the file ``path`` from ``bad`` to ``good``."""
    return patch_solution(diff({path: TaskFile(path, bad)}, {path: TaskFile(path, good)}))


def wrong(path: str, bad: bytes, failing: Iterable[str], others: Sequence[bytes]) -> tuple[TaskFile, ...]:
    """Wrong solutions: three that tamper with the tests, and one for each of ``others``, other wrong contents of the
    file ``path``. ``bad`` is its current content; ``failing`` are the ids of the failing tests."""
    tests = json.dumps(sorted({test.split("::")[0] for test in failing}))
    found = {
        "deletes-the-tests": f"import os\nfor path in {tests}:\n    os.unlink(path)\n",
        "skips-the-tests": (
            f"for path in {tests}:\n"
            "    with open(path, 'a') as file:\n"
            "        file.write('\\nimport pytest\\npytestmark = pytest.mark.skip\\n')\n"
        ),
        "hook-in-conftest": (
            "with open('conftest.py', 'a') as file:\n"
            "    file.write('''\n"
            "import pytest\n\n"
            "@pytest.hookimpl(hookwrapper=True)\n"
            "def pytest_runtest_makereport(item, call):\n"
            "    report = (yield).get_result()\n"
            "    report.outcome, report.longrepr = 'passed', None\n"
            "''')\n"
        ),
    }
    for number, other in enumerate(others, 1):
        start, end, text = _difference(bad, other)
        found[f"another-mistake-{number}"] = (
            f"path = {json.dumps(path)}\n"
            "with open(path, 'rb') as file:\n"
            "    data = file.read()\n"
            "with open(path, 'wb') as file:\n"
            f"    file.write(data[:{start}] + {text!r} + data[{end}:])\n"
        )
    end = "END_OF_PROGRAM"
    return tuple(
        TaskFile(f"{name}.sh", f"#!/usr/bin/env bash\npython3 - <<'{end}'\n{program}{end}\n".encode(), executable=True)
        for name, program in found.items()
    )


def _difference(old: bytes, new: bytes) -> tuple[int, int, bytes]:
    """Start, end and text such that replacing ``old[start:end]`` by the text gives ``new``."""
    start = 0
    while start < min(len(old), len(new)) and old[start] == new[start]:
        start += 1
    tail = 0
    while tail < min(len(old), len(new)) - start and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    return start, len(old) - tail, new[start : len(new) - tail]
