"""SWE-bench rows: read from every kind of file, with a repository that is made on the fly, and graded in real boxes."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clawgym.agents import NoopAgent, OracleAgent, ScriptAgent
from clawgym.errors import TaskError
from clawgym.records import Layer, Outcome, Task
from clawgym.sandbox import Backend
from clawgym.tasks import load
from clawgym.tasks.formats import read_row
from clawgym.verifiers.diff import DIFF_FILE

from ..invariants.tested import FAIL, FILES, PASS, SOURCE
from ..rollouts import episode_of
from .swe.conftest import site_layer

__all__ = ["site_layer"]

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")

OLD_TESTS = "from calc import mul\n\n\ndef test_mul():\n    assert mul(2, 3) == 6\n"
IDENTITY = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
Row = dict[str, Any]


def git(folder: Path, *words: str) -> str:
    env = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "GIT_CONFIG_NOSYSTEM": "1"}
    return subprocess.run(
        ["git", *IDENTITY, *words], cwd=folder, check=True, capture_output=True, text=True, env=env
    ).stdout.strip()


@pytest.fixture
def repos(tmp_path: Path, site_layer: Layer, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a clone of ``somebody/calc`` and a folder of packages for it."""
    folder = tmp_path / "repos" / "somebody" / "calc"
    for path, text in {**FILES, "tests/test_calc.py": OLD_TESTS, "gone.txt": "x\n"}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    (folder / "run.sh").write_text("echo\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "link.txt").symlink_to("gone.txt")
    (folder / "out.txt").symlink_to("../../../etc/passwd")
    # what git archive would obey, and what a checkout would run
    (folder / ".gitattributes").write_text("tests export-ignore\n*.py filter=evil\n")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "base")
    site = tmp_path / "repos" / "somebody" / "calc.site"
    site.symlink_to(site_layer.folder)
    (site_layer.folder / "pytest-1.dist-info").mkdir(exist_ok=True)
    (site_layer.folder / "pytest-1.dist-info" / "RECORD").write_text("pytest/__init__.py,sha256=abc,1\n")
    monkeypatch.setenv("CLAWGYM_REPOS", str(tmp_path / "repos"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "repos"


@pytest.fixture
def row(repos: Path) -> Row:
    """A row as SWE-bench has them; patches made by git."""
    folder = repos / "somebody" / "calc"
    base = git(folder, "rev-parse", "HEAD")
    (folder / "calc/__init__.py").write_text(SOURCE.replace("a - b", "a + b"))
    (folder / "calc/extra.py").write_text("EXTRA = 1\n")
    git(folder, "add", ".")
    patch = git(folder, "diff", "--cached", "HEAD") + "\n"
    git(folder, "commit", "-qm", "fix")
    (folder / "tests/test_calc.py").write_text(FILES["tests/test_calc.py"])
    test_patch = git(folder, "diff", "HEAD") + "\n"
    for setting in ("filter.evil.smudge", "filter.evil.clean", "core.fsmonitor", "core.alternateRefsCommand"):
        git(folder, "config", setting, f"touch {repos}/obeyed")
    return {
        "instance_id": "somebody__calc-1",
        "repo": "somebody/calc",
        "base_commit": base,
        "patch": patch,
        "test_patch": test_patch,
        "problem_statement": "add() gives the difference.",
        "hints_text": "",
        "version": "1.0",
        "FAIL_TO_PASS": json.dumps(FAIL),
        "PASS_TO_PASS": json.dumps(PASS),
        "environment_setup_commit": base,
    }


def test_row_is_read(row: Row, repos: Path) -> None:
    task = read_row(row)
    files = {file.path: file for file in task.inputs}
    assert files["tests/test_calc.py"].read().decode() == OLD_TESTS
    assert files["link.txt"].read() == b"x\n"
    assert "out.txt" not in files
    assert files["run.sh"].executable
    assert not files["gone.txt"].executable
    assert "calc/extra.py" not in files
    assert (task.id, task.workspace, task.unsupported) == ("somebody__calc-1", "/workspace/calc", None)
    assert "add() gives the difference." in task.instruction
    hidden = {file.path: file.read() for file in task.verifier.files if file.path.startswith("overlay/")}
    assert hidden == {"overlay/tests/test_calc.py": FILES["tests/test_calc.py"].encode()}
    assert not (repos / "obeyed").exists()
    assert read_row(row).content_hash == task.content_hash


async def test_only_the_patch_solves_it(backend: Backend, row: Row) -> None:
    task = read_row(row)
    episode = await episode_of(task, OracleAgent(), backend)
    assert episode.outcome is Outcome.SOLVED, (episode.error, episode.result)
    assert b"+++ b/calc/extra.py" in episode.files[DIFF_FILE]
    assert b"tests/" not in episode.files[DIFF_FILE]
    assert (await episode_of(task, NoopAgent(), backend)).outcome is Outcome.FAILED
    empty = ScriptAgent(b"find tests; echo 'def test_add(): pass' > tests/test_calc.py")
    episode = await episode_of(task, empty, backend)
    assert episode.outcome is Outcome.FAILED


def test_rows_with_runners_of_their_own(row: Row, repos: Path) -> None:
    for repo in ("django/django", "sympy/sympy", "pytest-dev/pytest"):
        git(repos, "clone", "-q", "--bare", "somebody/calc", f"{repo}.git")
        shutil.copytree(repos / "somebody/calc.site", repos / f"{repo}.site")
    names = {"FAIL_TO_PASS": ["test_add (tests.test_calc.Test)", "Adds two numbers."], "PASS_TO_PASS": ["test_mul"]}
    for repo, runner in (("django/django", "django"), ("sympy/sympy", "sympy")):
        task = read_row({**row, **names, "repo": repo})
        assert task.unsupported is None
        plan = json.loads(next(file for file in task.verifier.files if file.path == "tests.json").read())
        assert (plan["suite"], plan["paths"]) == (runner, ["tests/test_calc.py"])
        assert [plan["fail_to_pass"], plan["pass_to_pass"]] == [*names.values()]
        data = "--- /dev/null\n+++ b/tests/data.txt\n@@ -0,0 +1 @@\n+x\n"
        assert "no Python file" in unsupported(row, **names, repo=repo, test_patch=data)
    task = read_row({**row, "repo": "pytest-dev/pytest", "version": "7.4", "PASS_TO_PASS": [*PASS, "[100%]"]})
    assert task.unsupported is None
    assert json.loads(next(f for f in task.verifier.files if f.path == "tests.json").read())["pass_to_pass"] == [*PASS]
    version = {file.path: file for file in task.inputs}["src/_pytest/_version.py"].read()
    assert version == b'version = "7.4.0"\nversion_tuple = (7, 4, 0)\n'
    assert "testing/*" in task.verifier.protected
    assert not any(glob.startswith("src/_pytest") for glob in task.verifier.protected)
    assert "pytest.ini" in task.verifier.protected


def test_bare_clone_works_and_tree_is_cached(row: Row, repos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = read_row(row).content_hash
    git(repos, "clone", "-q", "--bare", "somebody/calc", "somebody/other.git")
    shutil.copytree(repos / "somebody/calc.site", repos / "somebody/other.site")
    assert read_row({**row, "repo": "somebody/other"}).unsupported is None
    shutil.rmtree(repos / "somebody/calc")  # it was written to the cache
    assert read_row(row).content_hash == first


def as_lines(rows: list[Row], path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def as_list(rows: list[Row], path: Path) -> None:
    path.write_text(json.dumps(rows, indent=1))


def as_parquet(rows: list[Row], path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), path)


@pytest.mark.parametrize(("name", "writer"), [("r.jsonl", as_lines), ("r.json", as_list), ("r.parquet", as_parquet)])
def test_files_of_rows(row: Row, tmp_path: Path, name: str, writer: Callable[[list[Row], Path], None]) -> None:
    lists = {"FAIL_TO_PASS": list(FAIL), "PASS_TO_PASS": list(PASS)}  # as SWE-Gym has them
    writer([{**row, **lists}, {**row, **lists, "instance_id": "second"}], tmp_path / name)
    tasks = load(str(tmp_path / name))
    assert [task.id for task in tasks.tasks] == ["somebody__calc-1", "second"]
    assert not tasks.problems
    assert {task.content_hash for task in tasks.tasks} == {read_row(row).content_hash}


def unsupported(row: Row, **changes: Any) -> str:
    task: Task = read_row({**row, **changes})
    assert task.unsupported is not None
    assert task.id == "somebody__calc-1"
    return task.unsupported


def test_missing_repository_or_site_is_named(row: Row, repos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = "0123456789" * 4
    assert f"the clone of somebody/calc has no commit {nowhere}" in unsupported(row, base_commit=nowhere)
    assert "somebody/else is not a clone of somebody/else: git clone" in unsupported(row, repo="somebody/else")
    assert "'test_add' is not a pytest id" in unsupported(row, FAIL_TO_PASS=["test_add"])
    assert "is not as the patch has it" in unsupported(row, test_patch=row["test_patch"].replace("-from", "-frm"))
    (repos / "somebody/calc.site").unlink()
    assert "pip install --target" in unsupported(row)
    (repos / "somebody/calc.site").mkdir()
    assert "has no installed packages" in unsupported(row)
    monkeypatch.delenv("CLAWGYM_REPOS")
    assert "$CLAWGYM_REPOS is not set" in unsupported(row, base_commit=nowhere)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"repo": "../etc/passwd"}, "field repo"),
        ({"repo": "a/.."}, "field repo"),
        ({"base_commit": "HEAD"}, "base_commit 'HEAD' is not a commit id"),
        ({"base_commit": "--upload-pack=x"}, "is not a commit id"),
        ({"FAIL_TO_PASS": "[]"}, "fail_to_pass is empty"),
        ({"FAIL_TO_PASS": "nonsense"}, "FAIL_TO_PASS"),
        ({"FAIL_TO_PASS": [1]}, "FAIL_TO_PASS"),
        ({"instance_id": "a/b"}, "field instance_id"),
        ({"test_patch": None}, "field test_patch"),
    ],
)
def test_invalid_row_raises(row: Row, changes: Row, why: str) -> None:
    with pytest.raises(TaskError, match=why):
        read_row({**row, **changes}, "rows.jsonl:1")


def test_protected_patterns_do_not_revert_solution(row: Row) -> None:
    patch = row["patch"] + "--- a/pyproject.toml\n+++ b/pyproject.toml\n@@ -1 +1 @@\n-x\n+y\n"
    protected = read_row({**row, "patch": patch}).verifier.protected
    assert "pyproject.toml" not in protected
    assert "tests/*" in protected
    assert "pyproject.toml" in read_row(row).verifier.protected


HARBOR = {
    "task.toml": 'schema_version = "1.0"\n[metadata]\n[agent]\ntimeout_sec = 30.0\n[verifier]\ntimeout_sec = 30.0\n',
    "instruction.md": "add() in calc gives the difference.\n",
    "environment/Dockerfile": "FROM python:3.12-slim\nWORKDIR /testbed\nCOPY calc/ ./calc/\nCOPY tests/ ./tests/\n",
    "environment/calc/__init__.py": "def add(a, b):\n    return a - b\n",
    "environment/tests/test_calc.py": "raise SystemExit('edited by nobody')\n",
    "solution/solve.sh": "#!/bin/bash\nsed -i 's/a - b/a + b/' /testbed/calc/__init__.py\n",
    "tests/test_calc.py": (
        "import unittest\nfrom calc import add\nclass Test(unittest.TestCase):\n"
        "    def test_add(self):\n        self.assertEqual(add(1, 2), 3)\n"
    ),
    "tests/test.sh": (
        "#!/bin/bash\ncp /tests/test_calc.py /testbed/tests/test_calc.py\ncd /testbed\n"
        "if python3 -m unittest tests/test_calc.py; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"
    ),
}


async def test_harbor_task_with_tests(backend: Backend, tmp_path: Path) -> None:
    for path, text in HARBOR.items():
        (tmp_path / "swe" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "swe" / path).write_text(text)
    task = load(str(tmp_path / "swe")).tasks[0]
    assert task.unsupported is None
    assert task.verifier.executes_agent_code is not None
    right = await episode_of(task, OracleAgent(), backend)
    assert (right.outcome, right.result and right.result.official) == (Outcome.SOLVED, 1.0), right.error
    cheats = ScriptAgent(b"echo 'import sys; sys.exit(0)' > tests/test_calc.py")
    for agent in (NoopAgent(), cheats):
        assert (await episode_of(task, agent, backend)).outcome is Outcome.FAILED
