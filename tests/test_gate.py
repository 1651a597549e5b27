"""A gate that names what it requires fails without it, and says how many tests were skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, timeout=150)


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="a filter for the system calls of one processor")
@pytest.mark.parametrize("required", ["namespace", ""])
def test_a_broken_backend_fails_the_run_that_requires_it(required: str) -> None:
    before = (sys.executable, "-c", NO_NETWORK_NAMESPACES)
    done = _pytest("tests/sandbox/test_install.py", before=before, CLAWGYM_REQUIRE=required)
    if required:
        assert done.returncode == pytest.ExitCode.USAGE_ERROR
        assert "CLAWGYM_REQUIRE asks for what does not work here: namespace: " in done.stderr
    else:
        assert done.returncode == 0
        assert " skipped" in done.stdout


def test_a_test_that_is_skipped_for_lack_of_what_is_required_fails() -> None:
    done = _pytest("tests/desktop/test_desktop.py", CLAWGYM_REQUIRE="desktop", PATH="/nowhere")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "desktop is required here (CLAWGYM_REQUIRE), and this test was skipped: no Xvfb" in done.stdout


def test_too_many_skips_fail_the_run_and_are_listed() -> None:
    for most, code in (("0", pytest.ExitCode.TESTS_FAILED), ("1000", pytest.ExitCode.OK)):
        done = _pytest("tests/desktop/test_desktop.py", CLAWGYM_MOST_SKIPS=most, CLAWGYM_REQUIRE="", PATH="/nowhere")
        assert done.returncode == code
        assert f"skipped, at most {most} allowed" in done.stdout
        assert "tests/desktop/test_desktop.py: no Xvfb" in done.stdout


def test_an_unknown_requirement_is_refused() -> None:
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
def test_reasons_of_skips_say_what_is_lacking(reason: str, name: str | None) -> None:
    assert lacks(reason) == name
    assert name is None or name in LACKS
