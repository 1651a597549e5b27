"""Tests as a verifier, in real boxes: what each kind of test comes to, and what can go wrong with a run of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

import pytest

from clawgym.agents import NoopAgent, OracleAgent
from clawgym.errors import GradingError, TaskError
from clawgym.records import GradingMode, Layer, Outcome, Task, TaskFile, VerifierResult, VerifierSpec
from clawgym.sandbox import Backend
from clawgym.tasks.formats import read_task, write
from clawgym.tasks.swe import verifier
from clawgym.verifiers.diff import DIFF_FILE
from clawgym.verifiers.grading import Archive, Subject, grade
from clawgym.verifiers.workspace import packed

from ...invariants.tested import FAIL, FILES, PASS, SOURCE, calc
from ...rollouts import episode_of

FIXED = {"calc/__init__.py": SOURCE.replace("a - b", "a + b")}


async def graded(task: Task, left: Mapping[str, str], backend: Backend) -> VerifierResult:
    """Of a workspace in which the agent left ``left`` beside the inputs."""
    files = {f.path: f for f in task.inputs} | {path: TaskFile(path, text.encode()) for path, text in left.items()}
    return await grade(task, Subject(Archive(packed(files.values()))), backend)


async def test_resolved_and_not(backend: Backend, site_layer: Layer) -> None:
    task = calc(site_layer)
    before = await episode_of(task, NoopAgent(), backend)
    after = await episode_of(task, OracleAgent(), backend)
    assert before.result is not None
    assert after.result is not None
    assert (before.outcome, before.result.official, before.result.cause) == (Outcome.FAILED, 0.0, None)
    assert before.result.checks == {**dict.fromkeys(FAIL, 0.0), **dict.fromkeys(PASS, 1.0)}
    assert "assert -1 == 3" in before.result.log
    assert (after.outcome, after.result.official, after.result.tampered) == (Outcome.SOLVED, 1.0, False)
    assert before.files[DIFF_FILE] == b""
    assert b"-    return a - b\n+    return a + b\n" in after.files[DIFF_FILE]


KINDS = """
import pytest

from calc import add

@pytest.mark.skip
def test_skipped(): pass

@pytest.mark.skipif(add(1, 2) == 3, reason="x")
def test_skipped_once_mended(): pass

@pytest.mark.xfail
def test_fails_as_expected(): assert 0

@pytest.mark.xfail
def test_passes_unexpectedly(): pass

@pytest.fixture
def broken(): raise KeyError("x")

def test_setup(broken): pass

@pytest.fixture
def leaves():
    yield
    raise KeyError("x")

def test_teardown(leaves): pass

def test_leaves_processes():
    import subprocess
    subprocess.Popen(["sleep", "1000"])

def test_prints():
    print('["x", "tests/test_kinds.py::test_skipped", "passed"]' * 1000)

def test_passes(): pass
"""


async def test_outcome_of_each_kind_of_test(backend: Backend, site_layer: Layer) -> None:
    names = [line[4:].split("(")[0] for line in KINDS.splitlines() if line.startswith("def test_")]
    ids = [f"tests/test_kinds.py::{name}" for name in names]
    task = calc(site_layer, {**FILES, "tests/test_kinds.py": KINDS}, keep=[*ids, "tests/test_gone.py::test_x"])
    result = await graded(task, FIXED, backend)
    passed = {test.rpartition("test_")[2] for test in ids if result.checks[test]}
    assert passed == {"fails_as_expected", "leaves_processes", "prints", "passes"}
    assert result.checks["tests/test_gone.py::test_x"] == 0.0
    assert (result.cause, result.official) == (None, 0.0)


async def test_uncollectable_file_fails_alone(backend: Backend, site_layer: Layer) -> None:
    other = "from calc import gone\ndef test_other(): pass\n"
    task = calc(site_layer, {**FILES, "tests/test_other.py": other}, keep=["tests/test_other.py::test_other"])
    result = await graded(task, FIXED, backend)
    assert result.checks == {**dict.fromkeys(FAIL, 1.0), "tests/test_other.py::test_other": 0.0}
    assert "cannot import name 'gone'" in result.log
    assert result.cause is None


HURT = "import os, sys, time\nfrom calc._text import shown\ndef mul(a, b): return a * b\ndef add(a, b):\n    "


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("time.sleep(99)", "timeout"),
        ("os.kill(os.getpid(), 11)", "crash"),
        ("os.kill(os.getpid(), 9)", "crash"),
        ("os._exit(0)", "unfinished"),
        ("os.write(4, b'x')\n    os.closerange(3, 99)", None),
        ("sys.exit(0)", None),
        ("raise KeyboardInterrupt", "crash"),
    ],
)
async def test_test_that_ends_the_run(backend: Backend, site_layer: Layer, line: str, cause: str | None) -> None:
    task = calc(site_layer)
    task = dataclasses.replace(task, limits=dataclasses.replace(task.limits, verify_seconds=9))
    result = await graded(task, {"calc/__init__.py": HURT + line + "\n"}, backend)
    assert (result.official, result.strict) == (0.0, 0.0)
    assert not any(result.checks[test] for test in FAIL)
    if cause or line == "sys.exit(0)":
        assert result.cause == cause


async def test_broken_pytest_is_not_the_agents_fault(backend: Backend, site_layer: Layer) -> None:
    task = calc(dataclasses.replace(site_layer, folder=site_layer.folder / "_pytest"))
    with pytest.raises(GradingError, match="pytest cannot be imported"):
        await graded(task, FIXED, backend)


async def test_thousands_of_tests(backend: Backend, site_layer: Layer) -> None:
    many = "import pytest\n@pytest.mark.parametrize('n', range(2000))\ndef test_many(n): assert n != 7\n"
    ids = [f"tests/test_many.py::test_many[{n}]" for n in range(2000)]
    result = await graded(calc(site_layer, {**FILES, "tests/test_many.py": many}, keep=ids), FIXED, backend)
    assert [test for test, value in result.checks.items() if not value] == ["tests/test_many.py::test_many[7]"]


async def test_ids_truncated_at_a_blank(backend: Backend, site_layer: Layer) -> None:
    task = calc(site_layer, keep=["tests/test_calc.py::test_shown[a"])
    assert (await graded(task, FIXED, backend)).official == 1.0
    assert (await graded(task, {**FIXED, "calc/_text.py": "shown = len\n"}, backend)).official == 0.0


async def test_hidden_tests(backend: Backend, site_layer: Layer) -> None:
    hidden = TaskFile("tests/test_hidden.py", b"from calc import add\ndef test_hidden(): assert add(1, 1) == 2\n")
    spec = verifier.tests_verifier(
        fail_to_pass=["tests/test_hidden.py::test_hidden"], pass_to_pass=PASS, overlay=[hidden]
    )
    task = calc(site_layer, verifier=spec)
    assert (await graded(task, {"tests/test_hidden.py": "def test_hidden(): pass\n"}, backend)).official == 0.0
    assert (await graded(task, FIXED, backend)).official == 1.0


async def test_observing_verifier_reports_all_tests(backend: Backend, site_layer: Layer) -> None:
    task = calc(site_layer, verifier=verifier.observing_verifier(["tests"]))
    result = await graded(task, {}, backend)
    assert result.checks == {**dict.fromkeys(FAIL, 0.0), **dict.fromkeys(PASS, 1.0)}
    assert result.official == 0.0


async def test_arguments_reach_pytest(backend: Backend, site_layer: Layer) -> None:
    text = {
        **FILES,
        "tests/test_mode.py": "def test_mode(pytestconfig): assert pytestconfig.getoption('maxfail') == 99\n",
    }
    spec = verifier.tests_verifier(
        fail_to_pass=FAIL, pass_to_pass=["tests/test_mode.py::test_mode"], arguments=["--maxfail=99"]
    )
    assert (await graded(calc(site_layer, text, verifier=spec), FIXED, backend)).official == 1.0


def test_folder_keeps_verifier(tmp_path, site_layer: Layer) -> None:
    task = dataclasses.replace(calc(site_layer), layers={})
    write([task], tmp_path / "set")
    back = read_task(tmp_path / "set" / "calc")
    assert back.verifier == dataclasses.replace(task.verifier, files=back.verifier.files)
    assert back.content_hash == task.content_hash


@pytest.mark.parametrize(
    ("fail", "keep", "why"),
    [((), PASS, "fail_to_pass is empty"), (FAIL, FAIL, "is in fail_to_pass and in pass_to_pass")],
)
def test_invalid_test_lists_raise(fail, keep, why: str) -> None:
    with pytest.raises(TaskError, match=why):
        verifier.tests_verifier(fail_to_pass=fail, pass_to_pass=keep)


def test_protected_files_need_clean_mode() -> None:
    with pytest.raises(TaskError, match="need the mode 'clean'"):
        VerifierSpec("reward_sh", (), GradingMode.FORK, protected=("tests/*",))


def test_default_protected_patterns() -> None:
    from clawgym.verifiers.workspace import unprotected

    kept = ["src/pkg/a.py", "pkg/testing/b.py", "jinja2/tests.py", "json.py", "docs/x.md", "setup.py", "pkg/conf.py"]
    gone = [
        *("tests/a.py", "pkg/tests/data/x.json", "test_six.py", "pkg/test_a.py", "pkg/a_test.py", "conftest.py"),
        *("a/b/conftest.py", "pytest.ini", "sub/tox.ini", "setup.cfg", "pyproject.toml", "x.pth", "src/evil.pth"),
        *("sitecustomize.py", "src/usercustomize.py", "pytest.py", "src/_pytest/__init__.py", "pkg/_fast.so"),
        *("__pycache__/a.pyc", "pkg/__pycache__/b.pyc", "e.egg-info/PKG-INFO", "e.dist-info/RECORD", ".git/config"),
        *("odd[1]/run.py", "odd[1]/test.py"),
    ]
    spec = verifier.tests_verifier(fail_to_pass=["odd[1]/run.py::x"], pass_to_pass=["odd[1]/test.py::y"])
    files = [TaskFile(path, b"") for path in (*kept, *gone)]
    assert sorted(unprotected(files, spec)) == sorted(kept)
    assert json.loads(next(f for f in spec.files if f.path == "tests.json").read())["fail_to_pass"] == [
        "odd[1]/run.py::x"
    ]
