"""``clawgym tasks``, as a user calls it."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

from clawgym.cli.tasks import app
from clawgym.errors import SandboxUnavailable, TaskError, TaskSetNotFound
from clawgym.records import TaskSet
from clawgym.tasks import load, names, read_task
from clawgym.tasks.scaffold import new_task, starter


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CLAWGYM_DATA", raising=False)
    return lambda *args: CliRunner().invoke(app, list(args), env={"COLUMNS": "200"})


def test_no_command_shows_them_all(run):
    shown = run().output
    for command in ("list", "show", "validate", "import", "export", "new", "make"):
        assert re.search(rf"\b{command}\b.*\w", shown), command


def test_list_shows_every_name(run):
    result = run("list")
    assert result.exit_code == 0
    assert all(name in result.stdout for name in names())


def test_new_makes_a_task_that_reads_back(run, tmp_path):
    result = run("new", "my-task")
    assert result.exit_code == 0
    assert "clawgym tasks validate ./my-task" in result.stdout
    task = read_task(tmp_path / "my-task")
    assert task.content_hash == starter("my-task").content_hash
    assert len(task.wrong_solutions) == 3
    assert isinstance(run("new", "my-task").exception, TaskError)
    assert isinstance(run("new", "my:task").exception, TaskError)


def test_validate_runs_it(run):
    run("new", "my-task")
    result = run("validate", "./my-task")
    if isinstance(result.exception, SandboxUnavailable):
        pytest.skip(f"namespace: {result.exception}")
    assert (result.exit_code, result.exception) == (0, None)
    assert "oracle pass 1" in result.stdout
    assert "wrong pass 3" in result.stdout


def test_validate_fails_on_an_unsound_or_unreadable_task(run, tmp_path):
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
    assert run("export", "./set", "x", "--format", "zip").exit_code == 2


def test_import_says_what_it_left_out(run, tmp_path):
    new_task(tmp_path / "set/one")
    (tmp_path / "set/two").mkdir()
    result = run("import", "./set", "out")
    assert result.exit_code == 1
    assert "two" in result.stderr
    assert isinstance(load(str(tmp_path / "out")), TaskSet)
