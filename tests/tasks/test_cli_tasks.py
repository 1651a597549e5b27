"""``clawgym tasks``, as a user calls it."""

from __future__ import annotations

import json
import re
import shutil

import pytest
from typer.testing import CliRunner

from clawgym.cli.tasks import app
from clawgym.errors import SandboxUnavailable, TaskError, TaskSetNotFound
from clawgym.records import TaskSet
from clawgym.tasks import load, names, read_task
from clawgym.tasks.scaffold import PYTHON, new_task, starter


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CLAWGYM_DATA", raising=False)
    return lambda *args: CliRunner().invoke(app, list(args), env={"COLUMNS": "200"})


def test_tasks_without_command_shows_all_commands(run):
    shown = run().output
    for command in ("list", "show", "validate", "import", "export", "new", "make"):
        assert re.search(rf"\b{command}\b.*\w", shown), command


def test_list_shows_every_name(run):
    result = run("list")
    assert result.exit_code == 0
    assert all(name in result.stdout for name in names())


def test_new_writes_a_python_file_that_loads(run, tmp_path):
    result = run("new", "my.tasks")
    assert result.exit_code == 0
    assert "clawgym tasks validate ./my.tasks.py" in result.stdout
    assert (tmp_path / "my.tasks.py").read_text() == PYTHON
    assert len(load(str(tmp_path / "my.tasks.py"))) == 50
    assert isinstance(run("new", "my.tasks.py").exception, TaskError)


def test_new_writes_a_task_that_reads_back(run, tmp_path):
    result = run("new", "my-task", "--format", "clawgym")
    assert result.exit_code == 0
    assert "clawgym tasks validate ./my-task" in result.stdout
    task = read_task(tmp_path / "my-task")
    assert task.content_hash == starter("my-task").content_hash
    assert len(task.wrong_solutions) == 3
    assert isinstance(run("new", "my-task", "--format", "clawgym").exception, TaskError)
    assert isinstance(run("new", "my:task", "--format", "clawgym").exception, TaskError)


@pytest.mark.parametrize(("format", "made"), [("clawgym", "./my-task"), ("python", "./my-task.py")])
def test_validate_passes_task_of_new(run, format, made):
    run("new", "my-task", "--format", format)
    result = run("validate", made, "--limit", "1")
    if isinstance(result.exception, SandboxUnavailable):
        pytest.skip(f"namespace: {result.exception}")
    assert (result.exit_code, result.exception) == (0, None)
    assert "oracle pass 1" in result.stdout
    assert f"wrong pass {3 if format == 'clawgym' else 2}" in result.stdout
    assert "Required: the solution scores 1 in 3 runs." in result.stdout


def test_validate_shows_output_of_checker(run, tmp_path):
    folder = new_task(tmp_path / "my-task").origin
    (tmp_path / "my-task/reward/check.py").write_text("import sys\nsys.stderr.write('a\\x1b[2Jb\\n')\n1 / 0\n")
    result = run("validate", folder)
    if isinstance(result.exception, SandboxUnavailable):
        pytest.skip(f"namespace: {result.exception}")
    assert result.exit_code == 1
    assert r"a\x1b[2Jb" in result.stdout
    assert 'check.py", line 3' in result.stdout
    assert "ZeroDivisionError" in result.stdout


def test_validate_names_each_reason_once_without_solutions(run, tmp_path):
    for name in ("one", "two", "three", "four"):
        new_task(tmp_path / f"set/{name}")
        shutil.rmtree(tmp_path / f"set/{name}/solution")
        (tmp_path / f"set/{name}/wrong/tampers.sh").unlink()
        (tmp_path / f"set/{name}/wrong/no-refunds.sh").unlink()
    result = run("validate", "./set")
    if isinstance(result.exception, SandboxUnavailable):
        pytest.skip(f"namespace: {result.exception}")
    assert result.exit_code == 1
    lines = [line for line in result.stdout.splitlines() if line.startswith("fail ")]
    assert [line.partition(": ")[0] for line in lines] == [
        "fail four oracle, one oracle, three oracle and 1 more",
        "fail four wrong, one wrong, three wrong and 1 more",
    ]


def test_validate_fails_on_unsound_or_unreadable_task(run, tmp_path):
    new_task(tmp_path / "set/good")
    new_task(tmp_path / "set/bad")
    new_task(tmp_path / "set/lost")
    (tmp_path / "set/bad/solution/solve.sh").write_text("true\n")
    (tmp_path / "set/lost/reward/reward.sh").unlink()
    result = run("validate", "./set")
    if isinstance(result.exception, SandboxUnavailable):
        pytest.skip(f"namespace: {result.exception}")
    assert result.exit_code == 1
    assert "fail bad oracle" in result.stdout
    assert "1 unreadable" in result.stdout
    assert "reward.sh" in result.stderr


def test_show_a_set_and_a_task(run, tmp_path):
    new_task(tmp_path / "set/one")
    found = json.loads(run("show", "./set", "--json").stdout)
    assert found["tasks"] == 1
    assert found["content hash"] == load(str(tmp_path / "set")).content_hash
    task = json.loads(run("show", "./set", "one", "--json").stdout)
    assert task["inputs"] == ["input/sales.csv"]
    assert "input/sales.csv lists sales" in run("show", "./set", "one").stdout
    for argument, about in (((), found), (("one",), task)):
        shown = re.sub(r"\s+", "", run("show", "./set", *argument).stdout)
        about.pop("instruction", None)  # shown below, without its name
        for key, value in about.items():
            assert re.sub(r"\s+", "", f"{key}{'' if isinstance(value, (dict, list)) else value}") in shown
    assert isinstance(run("show", "./set", "onee").exception, TaskSetNotFound)


@pytest.mark.parametrize("format", ["clawgym", "rows", "harbor"])
def test_export_and_import_keep_the_tasks(run, tmp_path, format):
    new_task(tmp_path / "set/one")
    new_task(tmp_path / "set/two")
    before = load(str(tmp_path / "set"))
    dest = "out.jsonl" if format == "rows" else "out"
    assert run("export", "./set", dest, "--format", format).exit_code == 0
    assert run("import", dest, "back").exit_code == 0
    assert load(str(tmp_path / "back")).content_hash == before.content_hash
    assert isinstance(run("export", "./set", dest, "--format", format).exception, TaskError)
    assert "there is no format 'zip'" in str(run("export", "./set", "x", "--format", "zip").exception)


def test_import_reports_skipped_tasks(run, tmp_path):
    new_task(tmp_path / "set/one")
    (tmp_path / "set/two").mkdir()
    result = run("import", "./set", "out")
    assert result.exit_code == 1
    assert "two" in result.stderr
    assert isinstance(load(str(tmp_path / "out")), TaskSet)
