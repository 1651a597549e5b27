"""Verifiers that run tests. The score is 1 if the task is resolved and 0 otherwise; each test is a check.

As in SWE-bench, a task is resolved if all tests of ``fail_to_pass`` and ``pass_to_pass`` pass. ``xfailed`` counts as
passed, as there; a test that is skipped, ``xpassed``, missing or not reached does not.
:mod:`clawgym.verifiers._tests_runner` describes the verifier's program.
"""
# ruff: noqa: PT028 (tests_verifier is not a test)

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from importlib import resources

from clawgym.errors import TaskError
from clawgym.records import TaskFile, VerifierSpec
from clawgym.verifiers.protocols.tests import TESTS_REWARD_SH
from clawgym.verifiers.workspace import OVERLAY

__all__ = ["PROTECTED", "observing_verifier", "tests_verifier"]

_TESTS = ("test/*", "tests/*", "test_*.py", "*_test.py", "conftest.py")
_SETTINGS = ("pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg", "pyproject.toml")
_SETTINGS += ("noxfile.py", ".coveragerc")
_START = ("*.pth", "sitecustomize.py", "usercustomize.py", "sitecustomize/*", "usercustomize/*", "*.so", "*.pyd")
_SHADOWS = tuple(
    f"{root}{name}{kind}"
    for root in ("", "src/", "lib/")
    for name in ("pytest", "_pytest", "pluggy", "iniconfig")
    for kind in (".py", "/*")
)

PROTECTED = (
    *(pattern for glob in (*_TESTS, *_SETTINGS, *_START) for pattern in dict.fromkeys((glob, f"*/{glob}"))),
    *_SHADOWS,
)
"""Patterns of protected files: tests and their data, settings of pytest, and files that Python or pytest would load
before the tests. ``*`` also matches ``/``. Caches and packaging metadata are never part of a submission
(:mod:`clawgym.verifiers.workspace`)."""


def tests_verifier(
    *,
    fail_to_pass: Iterable[str],
    pass_to_pass: Iterable[str],
    arguments: Sequence[str] = (),
    protected: Sequence[str] = PROTECTED,
    overlay: Iterable[TaskFile] = (),
    site: bool = False,
    runner: str = "pytest",
    paths: Sequence[str] = (),
) -> VerifierSpec:
    """A verifier that runs the tests ``fail_to_pass`` and ``pass_to_pass``, for at most ``Limits.verify_seconds``.

    Args:
        fail_to_pass: pytest node ids relative to the workspace (``tests/test_a.py::test_b[1-2]``) that fail without a
            solution.
        pass_to_pass: tests that pass without a solution and must still pass.
        arguments: further arguments of pytest. ``addopts`` of the repository's settings is cleared, because it may need
            missing plugins; pass required options here.
        protected: see :attr:`~clawgym.records.VerifierSpec.protected`. The files of the tests are always protected.
        overlay: files that are written over the graded workspace, such as tests that the agent must not see.
        site: whether Python may use the image's ``site-packages``. Otherwise it uses only the standard library, the
            workspace, and ``PYTHONPATH`` of the task's environment.
        runner: see :attr:`~clawgym.tasks.swe.suites.RepositoryTests.runner`. With ``django`` and ``sympy`` tests have
            the names of SWE-bench instead of ids.
        paths: the files of the tests, for runners without ids.

    Raises :class:`~clawgym.errors.TaskError` if ``fail_to_pass`` is empty or a test is in both lists.
    """
    first, second = [*dict.fromkeys(fail_to_pass)], [*dict.fromkeys(pass_to_pass)]
    if not first:
        raise TaskError("fail_to_pass is empty: give at least one test that fails without a solution")
    if both := set(first).intersection(second):
        raise TaskError(f"{min(both)!r} is in fail_to_pass and in pass_to_pass: remove it from one")
    own = {*paths} or {test.split("::")[0] for test in (*first, *second)}
    plan = {"fail_to_pass": first, "pass_to_pass": second, "paths": [*paths], "arguments": [*arguments], "site": site}
    names = ("".join(f"[{c}]" if c in "*?[" else c for c in path) for path in sorted(own))
    return _spec(plan, (*dict.fromkeys((*protected, *names)),), overlay, runner)


def observing_verifier(
    paths: Sequence[str], *, arguments: Sequence[str] = (), site: bool = False, runner: str = "pytest"
) -> VerifierSpec:
    """A verifier that runs all tests below ``paths`` (files or folders of the workspace) and reports each as a check.
    It is for finding out which tests pass; its score is meaningless."""
    plan = {"fail_to_pass": [], "pass_to_pass": [], "paths": [*paths], "arguments": [*arguments], "site": site}
    return _spec(plan, (), (), runner)


def _spec(
    plan: dict[str, object], protected: tuple[str, ...], overlay: Iterable[TaskFile], runner: str
) -> VerifierSpec:
    if runner in ("django", "sympy"):
        plan["suite"] = runner
    files = [
        TaskFile("reward.sh", TESTS_REWARD_SH.encode(), executable=True),
        TaskFile("tests.json", (json.dumps(plan, indent=1, ensure_ascii=False) + "\n").encode()),
        *(TaskFile(name, _program(source)) for name, source in _PROGRAMS[runner].items()),
        *(replace(file, path=OVERLAY + file.path) for file in overlay),
    ]
    return VerifierSpec(
        "reward_sh", tuple(files), executes_agent_code="in_process", mutable_inputs=("*",), protected=protected
    )


_PYTEST = {"run_tests.py": "_tests_runner.py", "tests_session.py": "_tests_session.py"}
_SUITE = {
    "run_tests.py": "_suite_runner.py",
    "pytest_runner.py": "_tests_runner.py",
    "tests_session.py": "_suite_session.py",
}
_PROGRAMS = {
    "pytest": _PYTEST,
    "own-pytest": {**_PYTEST, "tests_session.py": "_own_pytest_session.py", "pytest_session.py": "_tests_session.py"},
    "django": _SUITE,
    "sympy": _SUITE,
}


@cache
def _program(source: str) -> bytes:
    return resources.files("clawgym.verifiers").joinpath(source).read_bytes()
