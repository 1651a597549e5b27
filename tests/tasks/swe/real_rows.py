"""Rows in the form of SWE-bench, made from source archives of Django, SymPy and pytest.

A row's commit is the archive with a bug in one file and with older tests. Its patch takes the bug out, its test patch
brings the archive's tests. Archives and the wheels that the tests need are pinned, and come from the package index or
the cache.
"""

from __future__ import annotations

import dataclasses
import subprocess
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from clawgym.errors import DownloadError, MissingDependency
from clawgym.package_index import fetch

__all__ = ["CASES", "Case", "bring", "git"]

Pin = tuple[str, str, str]
"""Project, file name, SHA-256."""
IDENTITY = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false", "-c", "core.autocrlf=false"]


def git(folder: Path, *words: str) -> str:
    env = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "GIT_CONFIG_NOSYSTEM": "1"}
    argv = ["git", *IDENTITY, *words]
    return subprocess.run(argv, cwd=folder, check=True, capture_output=True, env=env).stdout.decode()


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    repo: str
    version: str
    sdist: Pin
    wheels: tuple[Pin, ...]
    kept: Callable[[str], bool]
    """Whether a file of the archive is in the repository: the rest would only take time."""
    bug: tuple[str, str, str]
    """A file, a text in it, and what is there instead while the bug is in."""
    wrong: str
    """What a wrong solution puts there."""
    old: Mapping[str, tuple[str, str]]
    """For each file of the test patch, a text in it, and what is there before the patch."""
    fails: tuple[str, ...]
    """Tests that the bug breaks."""
    passes: tuple[str, ...]
    """Some that it does not."""

    @property
    def workspace(self) -> str:
        return f"/workspace/{self.repo.rpartition('/')[2]}"

    def solution(self, text: str) -> str:
        """A line of shell that puts ``text`` in the place of the bug."""
        path, _, bad = self.bug
        program = f"p={path!r}; t=open(p).read(); assert {bad!r} in t; open(p, 'w').write(t.replace({bad!r}, {text!r}))"
        return f"python3 - <<'END_OF_PROGRAM'\n{program}\nEND_OF_PROGRAM\n"


def bring(case: Case, root: Path) -> dict[str, Any]:
    """The row of a case, with its clone and its packages below ``root``. Skips the test without the archives."""
    folder, site = root / case.repo, root / f"{case.repo}.site"
    try:
        archive = fetch(*case.sdist)
        wheels = [fetch(*pin) for pin in case.wheels]
    except (DownloadError, MissingDependency) as error:
        pytest.skip(f"the archives of {case.repo} are not here: {error}")
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as source:
            source.extractall(site)
    with tarfile.open(archive) as source:
        for member in source:
            path = member.name.partition("/")[2]
            content = source.extractfile(member) if member.isreg() else None
            if content is not None and case.kept(path):
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_bytes(content.read())
    for path in ("src/_pytest/_version.py",):  # a build writes it, and no commit has it
        (folder / path).unlink(missing_ok=True)
    fixed, bad = _replaced(folder / case.bug[0], *case.bug[1:])
    new = {path: _replaced(folder / path, *texts)[0] for path, texts in case.old.items()}
    git(folder, "init", "-q")
    git(folder, "add", "-f", ".")
    git(folder, "commit", "-qm", "base")
    base = git(folder, "rev-parse", "HEAD").strip()
    (folder / case.bug[0]).write_bytes(fixed)
    patch = git(folder, "diff")
    (folder / case.bug[0]).write_bytes(bad)
    for path, data in new.items():
        (folder / path).write_bytes(data)
    test_patch = git(folder, "diff")
    git(folder, "checkout", "-q", ".")
    return {
        "instance_id": f"{case.repo.replace('/', '__')}-{case.version}",
        "repo": case.repo,
        "base_commit": base,
        "patch": patch,
        "test_patch": test_patch,
        "problem_statement": "Something is wrong.",
        "version": case.version,
        "FAIL_TO_PASS": [*case.fails],
        "PASS_TO_PASS": [*case.passes],
    }


def _replaced(path: Path, text: str, other: str) -> tuple[bytes, bytes]:
    """The bytes of a file before and after one replacement, which is made."""
    before = path.read_bytes()
    assert before.count(text.encode()) >= 1, (path, text)
    after = before.replace(text.encode(), other.encode(), 1)
    path.write_bytes(after)
    return before, after


ASGIREF = (
    "asgiref",
    "asgiref-3.8.1-py3-none-any.whl",
    "3e1e3ecc849832fe52ccf2cb6686b7a55f82bb1d6aee72a58826471390335e47",
)
SQLPARSE = (
    "sqlparse",
    "sqlparse-0.5.1-py3-none-any.whl",
    "773dcbf9a5ab44a090f3441e2180efe2560220203dc2f8c0b0fa141e18b505e4",
)
PYTZ = ("pytz", "pytz-2024.2-py2.py3-none-any.whl", "31c7c1817eb7fae7ca4b8c7ee50c72f93aa2dd863de768e1ef4245d426aa0725")
MPMATH = ("mpmath", "mpmath-1.3.0-py3-none-any.whl", "a0b2b9fe80bbcd81a6647ff13108738cfb482d481d826cc0e02f5b35e5c88d2c")
PLUGGY = ("pluggy", "pluggy-1.5.0-py3-none-any.whl", "44e1ad92c8ca002de6377e165f3e0f1be63266ab4d554740532335b9d75ea669")
INICONFIG = (
    "iniconfig",
    "iniconfig-2.0.0-py3-none-any.whl",
    "b6a85871a79d2e3b22d2d1b94ac2824226a63c6b741c88f7ae975f18b6778374",
)
PACKAGING = (
    "packaging",
    "packaging-24.1-py3-none-any.whl",
    "5b8f2217dbdbd2f7f384c41c628544e6d52f2d0f53c6d0c3ea61aa5d1d7ff124",
)
ATTRS = ("attrs", "attrs-24.2.0-py3-none-any.whl", "81921eb96de3191c8258c199618104dd27ac608d9366f5e35d011eae1867ede2")
PY = ("py", "py-1.11.0-py2.py3-none-any.whl", "607c53218732647dff4acdfcd50cb62615cedf612e72d1724fb1a0cc6405b378")
TOML = ("toml", "toml-0.10.2-py2.py3-none-any.whl", "806143ae5bfb6a3c6e736a764057db0e6a0e05e338b5630894a5f779cabb4f9b")

_APPS = ("get_or_create", "utils_tests", "templates")


def _of_django(path: str) -> bool:
    parts = path.split("/")
    if parts[0] == "tests":
        return len(parts) == 2 or parts[1] in _APPS
    locale = "locale" in parts and parts[-2:] != ["locale", "__init__.py"] and "en" not in parts
    return parts[0] in ("django", "setup.py", "setup.cfg") and not locale and "static" not in parts


def _of_sympy(path: str) -> bool:
    parts = path.split("/")
    tests = "tests" in parts and parts[1] not in ("core", "utilities", "testing")
    return parts[0] in ("sympy", "setup.py", "conftest.py") and not tests and "benchmarks" not in parts


def _django(version: str, sdist: Pin, wheels: tuple[Pin, ...], strings: str) -> Case:
    person = f"{strings}Harrison{strings}"
    return Case(
        "django/django",
        version,
        sdist,
        wheels,
        _of_django,
        ("django/db/models/query.py", "return self.create(**params), True", "return self.create(**params), False"),
        "return self.create(**params), 0",
        {
            "tests/get_or_create/tests.py": (f"last_name={person}", f"last_name={strings}Harris{strings}"),
            "tests/utils_tests/test_dateparse.py": ("class DurationParseTests", "class OldDurationParseTests"),
        },
        ("test_get_or_create_method_with_create (get_or_create.tests.GetOrCreateTests)",),
        (
            "test_get_or_create_method_with_get (get_or_create.tests.GetOrCreateTests)",
            # as Python 3.11 and later write it
            "test_update (get_or_create.tests.UpdateOrCreateTests.test_update)",
            # one test with a docstring, as older and newer Pythons name it
            "test_get_or_create_redundant_instance (get_or_create.tests.GetOrCreateTests)",
            "If we execute the exact same statement twice, the second time,",
        ),
    )


DJANGO = _django(
    "4.2",
    ("django", "Django-4.2.16.tar.gz", "6f1616c2786c408ce86ab7e10f792b8f15742f7b7b7460243929cb371e7f1dad"),
    (ASGIREF, SQLPARSE),
    '"',
)
OLD_DJANGO = _django(
    "3.2",
    ("django", "Django-3.2.25.tar.gz", "7ca38a78654aee72378594d63e51636c04b8e28574f5505dff630895b5472777"),
    (ASGIREF, SQLPARSE, PYTZ),
    "'",
)
SYMPY = Case(
    "sympy/sympy",
    "1.12",
    ("sympy", "sympy-1.12.tar.gz", "ebf595c8dac3e0fdc4152c51878b498396ec7f30e7a914d6071e674d49420fb8"),
    (MPMATH,),
    _of_sympy,
    ("sympy/utilities/iterables.py", "    return x[y:] + x[:y]\n", "    return x[y:] + x[y:]\n"),
    "    return x[:y] + x[y:]\n",
    {
        "sympy/utilities/tests/test_iterables.py": ("    assert rotate_left(A, 2) == [2, 3, 4, 0, 1]\n", ""),
        "sympy/core/tests/test_match.py": ("def test_symbol():", "def test_a_symbol():"),
    },
    ("test_rotate",),
    ("test_flatten", "test_symbol"),
)
PYTEST = Case(
    "pytest-dev/pytest",
    "7.4",
    ("pytest", "pytest-7.4.4.tar.gz", "2cf0005922c6ace4a3e2ec8b4080eb0d9753fdc93107415332f50ce9e7994280"),
    (PLUGGY, INICONFIG, PACKAGING, ATTRS),
    lambda path: path.split("/")[0] in ("src", "testing", "pyproject.toml", "setup.cfg", "setup.py", "tox.ini"),
    ("src/_pytest/mark/expression.py", "return ast.UnaryOp(ast.Not(), not_expr(s))", "return not_expr(s)"),
    "return ast.UnaryOp(ast.Not(), ast.Constant(False))",
    {
        "testing/test_mark_expression.py": ('        ("not true", False),\n', ""),
        "testing/test_skipping.py": ("def test_importorskip()", "def test_an_importorskip()"),
    },
    ("testing/test_mark_expression.py::test_basic[not",),
    ("testing/test_mark_expression.py::test_empty_is_false", "testing/test_skipping.py::test_importorskip"),
)
OLD_SYMPY = dataclasses.replace(
    SYMPY,
    version="1.5",
    sdist=("sympy", "sympy-1.5.1.tar.gz", "d77901d748287d15281f5ffe5b0fef62dd38f357c2b827c44ff07f35695f4e7e"),
)
OLD_PYTEST = dataclasses.replace(
    PYTEST,
    version="6.2",
    sdist=("pytest", "pytest-6.2.5.tar.gz", "131b36680866a76e6781d13f101efb86cf674ebb9762eb70d3082b6f29889e89"),
    wheels=(*PYTEST.wheels, PY, TOML),
)
CASES = {
    "django": DJANGO,
    "django-3.2": OLD_DJANGO,
    "sympy": SYMPY,
    "sympy-1.5": OLD_SYMPY,
    "pytest": PYTEST,
    "pytest-6.2": OLD_PYTEST,
}
