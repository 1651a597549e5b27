"""A run with CLAWGYM_REQUIRE fails if a requirement is missing, and reports the skipped tests."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression
from hypothesis import given, settings
from hypothesis import strategies as st

from .conftest import CHECK
from .gate import LACKS, lacks

ROOT = Path(__file__).parents[1]
NO_NETWORK_NAMESPACES = """
import ctypes, os, struct, sys
def line(code, k, yes=0, no=0):
    return struct.pack("HBBI", code, yes, no, k)
# unshare(2) with CLONE_NEWNET: EPERM
lines = [line(0x20, 0), line(0x15, 272, 0, 3), line(0x20, 16), line(0x45, 0x40000000, 0, 1), line(6, 0x50001)]
lines.append(line(6, 0x7FFF0000))
held = ctypes.create_string_buffer(b"".join(lines))
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
program = Program(len(lines), ctypes.addressof(held))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0
os.execv(sys.argv[1], sys.argv[1:])
"""


def _pytest(*argv: str, before: tuple[str, ...] = (), **env: str) -> subprocess.CompletedProcess[str]:
    command = [*before, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *argv]
    env = {**os.environ, "CLAWGYM_SKIPS_SO_FAR": "", **env}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=150)


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="a filter for the system calls of one processor")
@pytest.mark.parametrize("required", ["namespace", ""])
def test_broken_backend_fails_a_run_that_requires_it(required: str) -> None:
    before = (sys.executable, "-c", NO_NETWORK_NAMESPACES)
    done = _pytest("tests/sandbox/test_install.py", before=before, CLAWGYM_REQUIRE=required)
    if required:
        assert done.returncode == pytest.ExitCode.USAGE_ERROR
        assert "CLAWGYM_REQUIRE names what does not work here: namespace: " in done.stderr
    else:
        assert done.returncode == 0
        assert " skipped" in done.stdout


def test_skip_for_lack_of_a_requirement_fails() -> None:
    done = _pytest("tests/desktop/test_desktop.py", CLAWGYM_REQUIRE="desktop", PATH="/nowhere")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "desktop is required here (CLAWGYM_REQUIRE), and this test was skipped: no Xvfb" in done.stdout


def test_too_many_skips_fail_the_run_and_are_listed() -> None:
    for most, code in (("0", pytest.ExitCode.TESTS_FAILED), ("1000", pytest.ExitCode.OK)):
        done = _pytest("tests/desktop/test_desktop.py", CLAWGYM_MOST_SKIPS=most, CLAWGYM_REQUIRE="", PATH="/nowhere")
        assert done.returncode == code
        assert f"skipped, at most {most} allowed" in done.stdout
        assert "tests/desktop/test_desktop.py: no Xvfb" in done.stdout


def test_skips_of_earlier_parts_count(tmp_path: Path) -> None:
    so_far = tmp_path / "skips"
    for number, code in enumerate((pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)):
        env = {
            "CLAWGYM_MOST_SKIPS": "1",
            "CLAWGYM_REQUIRE": "",
            "CLAWGYM_SKIPS_SO_FAR": str(so_far),
            "PATH": "/nowhere",
        }
        done = _pytest("tests/desktop/test_desktop.py", "-k", "test_a_text_is_typed_and_saved", **env)
        assert done.returncode == code, done.stdout
        assert "1 skipped for lack of: desktop" in re.sub(" +", " ", done.stdout)
        assert len(so_far.read_text().split()) == number + 1


def test_skips_of_workers_count_once(tmp_path: Path) -> None:
    so_far = tmp_path / "skips"
    env = {"CLAWGYM_MOST_SKIPS": "9", "CLAWGYM_REQUIRE": "", "CLAWGYM_SKIPS_SO_FAR": str(so_far), "PATH": "/nowhere"}
    done = _pytest("tests/desktop/test_desktop.py", "-n", "2", "-k", "test_a_text_is_typed_and_saved", **env)
    assert done.returncode == pytest.ExitCode.OK, done.stdout
    assert so_far.read_text().split() == ["1"]


def _parts() -> list[str]:
    """What the recipes of the Makefile's test, check and agents select: the expressions after ``-m``."""
    rules = re.findall(r"^(unit|check|agents):.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)
    assert sorted(name for name, _ in rules) == ["agents", "check", "unit"]
    found = [re.search(r" -m (?:\"(.+?)\"|(\w+))", line) for _, recipe in rules for line in recipe.splitlines()]
    return [match[1] or match[2] for match in found if match]


def test_every_test_is_in_one_part() -> None:
    parts = [Expression.compile(part) for part in _parts()]
    assert len(parts) == 4
    for marks in [*((*two, False) for two in itertools.product((False, True), repeat=2)), (False, False, True)]:
        has = dict(zip(("check", "alone", "agents"), marks, strict=True))
        assert sum(part.evaluate(lambda name, /, **_: has[name]) for part in parts) == 1, has  # noqa: B023


@pytest.mark.timeout(600)  # four collections of all tests
def test_each_part_is_collected_once() -> None:
    def collected(*argv: str) -> list[str]:
        done = _pytest("tests", "--collect-only", *argv, PYTEST_ADDOPTS="", CLAWGYM_REQUIRE="", CLAWGYM_MOST_SKIPS="")
        assert done.returncode == 0, done.stdout
        return sorted(line for line in done.stdout.splitlines() if "::" in line)

    parts = [collected("-m", part) for part in _parts()]
    assert all(len(part) > 5 for part in parts)
    assert sorted(itertools.chain(*parts)) == collected()


def test_names_in_check_exist() -> None:
    for entry in CHECK:
        place, _, name = entry.partition("::")
        found = [*(ROOT / "tests").glob(f"{place}*" if not place.endswith("/") else f"{place}*.py")]
        assert found, f"{entry}: no such file"
        assert not name or f"def {name}" in found[0].read_text(), f"{entry}: no such test"


DRAWN: list[int] = []


@settings(max_examples=60)
@given(st.integers())
def test_quick_profile_bounds_examples_of_own_settings(number: int) -> None:
    DRAWN.append(number)


def test_number_of_drawn_examples(request: pytest.FixtureRequest) -> None:
    if not DRAWN:
        pytest.skip("the test before was not run")
    quick = request.config.getoption("--hypothesis-profile") == "quick"
    assert (len(DRAWN) <= 25) == quick


def test_unknown_requirement_is_refused() -> None:
    done = _pytest("tests/test_gate.py", "--collect-only", CLAWGYM_REQUIRE="namespaces")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "CLAWGYM_REQUIRE names namespaces: choose of namespace, " in done.stderr


@pytest.mark.parametrize(
    ("reason", "name"),
    [
        ("docker: no engine answers, and no dockerd to start as root", "docker"),
        ("namespace: the sandbox supervisor did not start", "namespace"),
        ("PostgreSQL is not installed (initdb is missing): sudo make system", "postgres"),
        ("needs root, for a uid a box", "root"),
        ("no Xvfb, chromium here: make system", "desktop"),
        ("with CLAWGYM_WHOLE=1: it starts a cluster of its own", None),
    ],
)
def test_requirement_is_found_in_skip_reason(reason: str, name: str | None) -> None:
    assert lacks(reason) == name
    assert name is None or name in LACKS
