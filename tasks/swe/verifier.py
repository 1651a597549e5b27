"""A verifier that runs tests: resolved, 1 or 0, and each test is a check.

As in SWE-bench: a task is resolved if every test that had to turn passes, and every test that had to go on passing
does. ``xfailed`` counts as passed there and here; a test that was skipped, ``xpassed``, not found or not reached does
not. What the verifier's program does is told in :mod:`clawgym.verifiers._tests_runner`.
"""
# ruff: noqa: PT028 (tests_verifier is no test)

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
"""Tests and their data, what configures pytest, and what Python or pytest would load before them. ``*`` goes over
``/``. Caches and packaging metadata are never part of a submission (:mod:`clawgym.verifiers.workspace`)."""


def tests_verifier(
    *,
    fail_to_pass: Iterable[str],
    pass_to_pass: Iterable[str],
    arguments: Sequence[str] = (),
    protected: Sequence[str] = PROTECTED,
    overlay: Iterable[TaskFile] = (),
    site: bool = False,
) -> VerifierSpec:
    """The verifier of a task whose tests are ``fail_to_pass`` and ``pass_to_pass``.

    Args:
        fail_to_pass: pytest node ids relative to the workspace (``tests/test_a.py::test_b[1-2]``) that fail before.
        pass_to_pass: those that pass before, and must go on.
        arguments: further arguments of pytest. ``addopts`` of the repository's settings is emptied, so that plugins
            which are not here are not asked for; what of it is needed is said here.
        protected: see :attr:`~clawgym.records.VerifierSpec.protected`; the tests' own files are, in any case.
        overlay: files put over the graded workspace, by their paths in it: tests that the agent does not see.
        site: whether Python may use the image's own ``site-packages``; otherwise only the standard library, the
            workspace and ``PYTHONPATH`` of the task's environment.

    The tests run with ``Limits.verify_seconds``. Raises :class:`~clawgym.errors.TaskError` without a test, or for a
    test in both lists.
    """
    first, second = [*dict.fromkeys(fail_to_pass)], [*dict.fromkeys(pass_to_pass)]
    if not first:
        raise TaskError("fail_to_pass is empty: a task needs a test that fails before and passes afterwards")
    if both := set(first).intersection(second):
        raise TaskError(f"{min(both)!r} is in fail_to_pass and in pass_to_pass: leave it in one")
    own = {test.split("::")[0] for test in (*first, *second)}
    plan = {"fail_to_pass": first, "pass_to_pass": second, "paths": [], "arguments": [*arguments], "site": site}
    names = ("".join(f"[{c}]" if c in "*?[" else c for c in path) for path in sorted(own))
    return _spec(plan, (*dict.fromkeys((*protected, *names)),), overlay)


def observing_verifier(paths: Sequence[str], *, arguments: Sequence[str] = (), site: bool = False) -> VerifierSpec:
    """A verifier that runs every test below ``paths`` (files or folders of the workspace): what each does is its
    check. For finding out which tests pass; its score says nothing."""
    plan = {"fail_to_pass": [], "pass_to_pass": [], "paths": [*paths], "arguments": [*arguments], "site": site}
    return _spec(plan, (), ())


def _spec(plan: dict[str, object], protected: tuple[str, ...], overlay: Iterable[TaskFile]) -> VerifierSpec:
    files = [
        TaskFile("reward.sh", TESTS_REWARD_SH.encode(), executable=True),
        TaskFile("tests.json", (json.dumps(plan, indent=1, ensure_ascii=False) + "\n").encode()),
        *(TaskFile(name, _program(source)) for name, source in _PROGRAMS.items()),
        *(replace(file, path=OVERLAY + file.path) for file in overlay),
    ]
    return VerifierSpec(
        "reward_sh", tuple(files), executes_agent_code="in_process", mutable_inputs=("*",), protected=protected
    )


_PROGRAMS = {"run_tests.py": "_tests_runner.py", "tests_session.py": "_tests_session.py"}


@cache
def _program(source: str) -> bytes:
    return resources.files("clawgym.verifiers").joinpath(source).read_bytes()
