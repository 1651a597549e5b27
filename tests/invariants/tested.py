"""A small task of the kind that is graded by running tests: one line of a package is wrong, and two tests see it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from clawgym.records import Layer, Limits, Task, TaskFile
from clawgym.tasks.swe import verifier

WORKSPACE = "/workspace/calc"
SOURCE = '''"""Sums and products."""

from calc._text import shown


def add(a, b):
    return a - b


def mul(a, b):
    return a * b
'''
TESTS = """
import unittest

import pytest

from calc import add, mul, shown


def test_add():
    assert add(1, 2) == 3


def test_mul():
    assert mul(2, 3) == 6


@pytest.mark.parametrize("text", ["a b", "[", "ä", "::", "x/y"])
def test_shown(text):
    assert shown(text) == text


class TestGroup:
    def test_method(self):
        assert mul(1, 1) == 1


class TestUnit(unittest.TestCase):
    def test_unit(self):
        self.assertEqual(add(2, 2), 4)
"""
FIX = "sed -i 's/a - b/a + b/' calc/__init__.py\n"
FAIL = ("tests/test_calc.py::test_add", "tests/test_calc.py::TestUnit::test_unit")
PASS = (
    "tests/test_calc.py::test_mul",
    "tests/test_calc.py::TestGroup::test_method",
    *(f"tests/test_calc.py::test_shown[{text}]" for text in ("a b", "[", "\\xe4", "::", "x/y")),
)
FILES = {
    "calc/__init__.py": SOURCE,
    "calc/_text.py": "def shown(text):\n    return str(text)\n",
    "tests/test_calc.py": TESTS,
    "pyproject.toml": '[tool.pytest.ini_options]\naddopts = "--no-such-option"\n',
}


def calc(
    layer: Layer,
    files: Mapping[str, str] = FILES,
    fail: Sequence[str] = FAIL,
    keep: Sequence[str] = PASS,
    **changes: Any,
) -> Task:
    """The task; ``changes`` to it, ``fail`` and ``keep`` are its tests."""
    made = Task(
        "calc",
        "add() gives the difference.",
        verifier.tests_verifier(fail_to_pass=fail, pass_to_pass=keep),
        tuple(TaskFile(path, text.encode()) for path, text in files.items()),
        WORKSPACE,
        limits=Limits(agent_seconds=20, verify_seconds=20, memory_mb=512, disk_mb=64, command_seconds=15),
        env={"PYTHONPATH": f"{WORKSPACE}:/opt/layers/site"},
        layers={"/opt/layers/site": layer},
        solution=(TaskFile("solve.sh", FIX.encode()),),
    )
    return dataclasses.replace(made, **changes)
