"""Task sets written in Python: made on the host, checked in a sandbox."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

import clawgym
from clawgym.errors import TaskError, TaskSetNotFound
from clawgym.evaluation.validate import validate_task
from clawgym.records import Task, TaskSet
from clawgym.sandbox import Backend
from clawgym.tasks import load, read, write
from clawgym.tasks.packs import Pack
from clawgym.tasks.python import PythonTasks, load_file
from clawgym.tasks.scaffold import PYTHON
from clawgym.verifiers.grading import Subject, grade, untouched

GREET = """
from clawgym import TaskDraft, task
from clawgym.verifiers import checks as cg

WORD = "hello"


@task
def greet():
    import json  # any package may be imported here

    return TaskDraft(
        "Write hello to out/hello.txt.",
        check=check,
        expected={"numbers": [1, 2]},
        solution=solve,
        wrong={"Another word!": another, "in capitals": "mkdir out; echo HELLO > out/hello.txt"},
    )


def check(workspace, numbers):
    print("what a check prints is no score")
    return {"word": word(workspace) == WORD, "numbers": word(workspace) == WORD and numbers == [1, 2]}


def word(workspace):
    return cg.read_text(workspace / "out/hello.txt").strip()


def solve(workspace, numbers):
    write(workspace, WORD)


def another(workspace, numbers):
    write(workspace, "hi")


def write(workspace, text):
    (workspace / "out").mkdir()
    (workspace / "out/hello.txt").write_text(text)
"""


def made(tmp_path: Path, text: str, name: str = "mine.py") -> TaskSet:
    (tmp_path / name).write_text(text)
    return load(str(tmp_path / name))


def one(body: str, **fields: str) -> str:
    """A module with one task, whose check has this body; ``fields`` are those of its draft, as source."""
    about = ", ".join(f"{name}={value}" for name, value in ({"check": "check"} | fields).items())
    return (
        "from clawgym import TaskDraft, task\n\n\n@task\ndef one():\n"
        f"    return TaskDraft('Do it.', {about})\n\n\ndef check(workspace):\n    {body}\n"
    )


async def test_helpers_constants_and_functions_of_the_module_work_in_sandboxes(
    tmp_path: Path, backend: Backend
) -> None:
    (task,) = made(tmp_path, GREET).tasks
    assert [file.path for file in task.wrong_solutions] == ["another-word.sh", "in-capitals.sh"]
    found = await validate_task(task, backend)
    assert [finding for finding in found if finding.status != "pass"] == []
    assert {finding.rule for finding in found} >= {"oracle", "noop", "wrong/another-word.sh", "wrong/in-capitals.sh"}


async def test_exception_of_a_check_scores_0_and_shows_its_line(tmp_path: Path, backend: Backend) -> None:
    (task,) = made(tmp_path, one("return {'x': (workspace / 'gone.txt').read_text() == 'x'}")).tasks
    result = await grade(task, Subject(untouched(task)), backend)
    assert (result.checks, result.cause) == ({"check": 0.0}, None)
    assert 'task_module.py", line 10, in check' in result.log
    assert "FileNotFoundError" in result.log


async def test_check_runs_isolated_and_without_installed_packages(tmp_path: Path, backend: Backend) -> None:
    body = "import sys\n    return {'isolated': sys.flags.isolated, 'no_site': sys.flags.no_site}"
    (task,) = made(tmp_path, one(body)).tasks
    assert (await grade(task, Subject(untouched(task)), backend)).checks == {"isolated": 1.0, "no_site": 1.0}


async def test_import_error_in_sandbox_is_a_task_fault(tmp_path: Path, backend: Backend) -> None:
    text = "from pathlib import Path\n\nDATA = Path(__file__).with_name('data.txt').read_text()\n" + one("return {}")
    (tmp_path / "data.txt").write_text("beside it")
    (task,) = made(tmp_path, text).tasks
    oracle, *_ = await validate_task(dataclasses.replace(task, solution=task.verifier.files[:0]), backend)
    assert "no reference solution" in oracle.detail
    noop = next(f for f in await validate_task(task, backend) if f.rule == "noop")
    assert noop.status == "fail"
    assert "fails on the untouched workspace too (crash)" in noop.detail
    assert "data.txt" in noop.log


@pytest.mark.parametrize("value", ["None", "{}", "[1.0]"])
async def test_check_without_scores_is_a_task_fault(value: str, tmp_path: Path, backend: Backend) -> None:
    (task,) = made(tmp_path, one(f"return {value}")).tasks
    (noop,) = [f for f in await validate_task(task, backend) if f.rule == "noop"]
    assert noop.status == "fail"
    assert f"check() returned {value}" in noop.log


def test_check_does_not_run_on_the_host(tmp_path: Path) -> None:
    tasks = made(tmp_path, one(f"open({str(tmp_path / 'ran')!r}, 'w')\n    return {{'x': 1}}"))
    assert len(tasks) == 1
    assert not (tmp_path / "ran").exists()


def test_python_file_in_a_folder_of_tasks_is_not_imported(tmp_path: Path, make_task) -> None:
    folder = make_task().parent
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n" + PYTHON)
    tasks = load(str(folder))
    assert (len(tasks), list(tasks.problems)) == (1, ["evil.py"])
    assert not (tmp_path / "ran").exists()


PINNED = "7a548baab82d6249557fecefc6a85d4c945ea9adc2c164067f37a207d0feb862"


def test_content_hash_is_pinned(tmp_path: Path) -> None:
    tasks = made(tmp_path, PYTHON)
    assert tasks.content_hash == PINNED
    (tmp_path / "elsewhere").mkdir()
    assert made(tmp_path / "elsewhere", PYTHON, "renamed.py").content_hash == PINNED
    code = f"import clawgym; print(clawgym.load({str(tmp_path / 'mine.py')!r}).content_hash)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == PINNED, done.stderr


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("words[:1] ==", "words[1:] =="),
        ('{"total": sum(numbers)}', '{"total": sum(numbers) + 0}'),
        ('{"total": sum(numbers)}', '{"total": sum(numbers) + 1}'),
        ("Write the sum", "Write the total"),
        ("randint(-99, 99)", "randint(-98, 99)"),
    ],
)
def test_content_hash_covers_module_and_draft(old: str, new: str, tmp_path: Path) -> None:
    before = {task.content_hash for task in made(tmp_path, PYTHON).tasks}
    assert len(before) == 50
    changed = PYTHON.replace(old, new)
    assert changed != PYTHON
    assert before.isdisjoint(task.content_hash for task in made(tmp_path, changed).tasks)


def test_hash_covers_solutions_only_through_the_module_text(tmp_path: Path) -> None:
    (task,) = made(tmp_path, GREET).tasks
    assert dataclasses.replace(task, solution=(), wrong_solutions=()).content_hash == task.content_hash


@pytest.mark.parametrize("format", ["clawgym", "harbor", "rows"])
@pytest.mark.parametrize("text", [PYTHON, GREET], ids=["add-up", "greet"])
def test_python_tasks_are_written_in_every_format(text: str, format, tmp_path: Path) -> None:
    tasks = made(tmp_path, text).tasks[:3]
    target = tmp_path / ("out.jsonl" if format == "rows" else "out")
    write(tasks, target, format)
    back = read(target).by_id
    for task in tasks:
        assert back[task.id].content_hash == task.content_hash
        assert back[task.id].verifier.executes_agent_code == task.verifier.executes_agent_code
        assert [f.read() for f in back[task.id].solution] == [f.read() for f in task.solution]
        assert len(back[task.id].wrong_solutions) == 2


def test_seeds_make_the_splits(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        PYTHON + "\n\n@task\ndef no_seed():\n    return TaskDraft('Do it.', check, expected={'total': 1})\n"
    )
    ids = {name: [task.id for task in load(f"{path}{name}").tasks] for name in ("", ":train", ":heldout")}
    assert ids[":train"] == [*(f"add-up-{seed}" for seed in range(0, 50, 2)), "no-seed"]
    assert ids[":heldout"] == [f"add-up-{seed}" for seed in range(1, 50, 2)]
    assert len(ids[""]) == 51
    assert load(f"{path}:train").name == "mine:train"
    assert [t.id for t in load(str(path), ids=["add-up-7"]).tasks] == ["add-up-7"]
    assert len(load(str(path), limit=2)) == 2
    with pytest.raises(TaskSetNotFound, match="has no split 'test'"):
        load(f"{path}:test")
    with pytest.raises(TaskSetNotFound, match="cannot be read"):
        load(str(tmp_path / "gone.py"))


def test_task_set_is_a_pack_of_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scratch_tasks.py").write_text(PYTHON)
    monkeypatch.syspath_prepend(tmp_path)
    import scratch_tasks  # pyright: ignore[reportMissingImports]

    assert isinstance(scratch_tasks.add_up, PythonTasks)
    assert isinstance(scratch_tasks.add_up, Pack)
    assert load("scratch_tasks:add_up").content_hash == PINNED
    assert load("scratch_tasks:add_up:heldout").name == "add-up:heldout"
    assert [t.id for t in scratch_tasks.add_up.load(seeds=[1000]).tasks] == ["add-up-1000"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("import pydantic as p", r"mine\.py:2: imports pydantic, which is not in Python's standard library"),
        ("from yaml import safe_load", r"mine\.py:2: imports yaml"),
        ("if True:\n    import pydantic", r"mine\.py:3: imports pydantic"),
        ("class A:\n    import pydantic", r"mine\.py:3: imports pydantic"),
        ("from clawgym import Task", r"mine\.py:2: imports clawgym\.Task, which the grading sandbox"),
        ("import clawgym", r"mine\.py:2: imports clawgym, which the grading sandbox"),
        ("from clawgym.verifiers import grading", r"imports clawgym\.verifiers\.grading"),
    ],
)
def test_imports_missing_in_sandbox_raise(line: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=message):
        made(tmp_path, "\n" + line + "\n" + one("return {'x': 1}"))


@pytest.mark.parametrize(
    "line",
    [
        "from __future__ import annotations",
        "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    import numpy",
        "try:\n    import pydantic\nexcept ImportError:\n    pydantic = None",
        "if __name__ == '__main__':\n    import pydantic",
        "def late():\n    import pydantic",
        "import clawgym.verifiers.checks as cg",
        "import os.path, xml.etree.ElementTree",
    ],
)
def test_imports_that_do_not_run_in_a_sandbox_are_allowed(line: str, tmp_path: Path) -> None:
    assert len(made(tmp_path, line + "\n" + one("return {'x': 1}"))) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (one("return {}", check="lambda ws: {}"), "is not a top-level function of this module"),
        (one("return {}", check="print"), "is not a top-level function"),
        (one("return {}", check="clean"), "of the module"),
        (one("return {}", check="None"), "set either check=, a function of this module, or grader="),
        (one("return {}", grader="'rubric'"), "set either check=, a function of this module, or grader="),
        (one("return {}", expected="{'a': (1, 2)}"), "use lists, not tuples"),
        (one("return {}", expected="{'a': {1: 2}}"), "dicts with text keys"),
        (one("return {}", expected="{'a': {1, 2}}"), "are not JSON"),
        (one("return {}", expected="{'a': float('nan')}"), "are not JSON"),
        (one("return {}", files="{'a': 1}"), "file 'a' is int: give text or bytes"),
        (one("return {}", files="{'../a': 'x'}"), "plain relative path"),
        (one("return {}", wrong="{'?': 'true'}"), "use letters or digits"),
        (one("return {}", wrong="{'a b': 'true', 'a-b': 'true'}"), "two wrong solutions have the same name"),
        (one("return {}", solution="lambda ws: 1"), "is not a top-level function"),
        (one("return {}").replace("'Do it.'", "' '"), "its instruction is empty"),
        (
            one("return {}").replace("    return TaskDraft", "    1 / 0\n    return TaskDraft"),
            "line 6: division by zero",
        ),
        (one("return {}").replace("return TaskDraft", "TaskDraft"), "returned NoneType: return a TaskDraft"),
        (one("return {}").replace("@task", "@task(seeds=[-1])"), "seeds must be distinct integers of at least 0"),
        (one("return {}").replace("@task", "@task(seeds=[1, 1])"), "distinct integers"),
        (one("return {}").replace("@task", "@task\nclass One: ...\n\n"), "is for functions, not for type"),
        ("import json\n", "has no function with @task"),
        ("def (\n", r"mine\.py:1: cannot be imported \(SyntaxError"),
        ("x = 1\ny = x / 0\n", r"mine\.py:2: cannot be imported \(ZeroDivisionError"),
    ],
)
def test_invalid_draft_names_its_place(text: str, message: str, tmp_path: Path) -> None:
    text = text if "clean" not in text else "from textwrap import dedent as clean\n" + text
    message = message if "clean" not in text else "define it"
    with pytest.raises(TaskError, match=message):
        made(tmp_path, text)


def test_code_without_a_file_raises() -> None:
    code = "from clawgym import TaskDraft, task\n\n@task\ndef one(): ...\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "in a notebook: %%writefile my_tasks.py" in done.stderr


def test_edited_file_is_reloaded(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(PYTHON)
    first = load_file(path)
    assert load_file(path).makers[0] is first.makers[0]
    path.write_text(PYTHON.replace("range(50)", "range(60)"))
    assert (len(load_file(path).load()), len(first.load())) == (60, 50)
    assert first.version != load_file(path).version


def test_check_that_runs_programs_is_flagged(tmp_path: Path) -> None:
    text = "from clawgym.verifiers import checks as cg\n" + one("return {'x': cg.run_program(['ls']).code == 0}")
    (task,) = made(tmp_path, text).tasks
    assert task.verifier.executes_agent_code == "subprocess"
    (task,) = made(tmp_path, GREET).tasks
    assert task.verifier.executes_agent_code is None


def test_task_with_a_rubric_names_its_grader(tmp_path: Path) -> None:
    options = {"rubric": {"clear": "A reader understands it."}}
    fields = {"check": "None", "grader": "'rubric'", "grader_options": repr(options)}
    (task,) = made(tmp_path, one("return {}", **fields)).tasks
    assert (task.verifier.grader, task.verifier.grader_options) == ("rubric", options)


def test_evaluation_of_a_python_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: Backend) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(PYTHON)
    code = "from clawgym.cli import main; main()"
    words = ["eval", "mine.py:heldout", "--limit", "2", "--agent", "oracle", "--out", "run"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in Path("run/results.jsonl").read_text().splitlines()]
    assert {row["task_id"]: row["outcome"] for row in rows} == {"add-up-1": "solved", "add-up-3": "solved"}


def test_environment_runs_a_python_file(tmp_path: Path, backend: Backend) -> None:
    import gymnasium

    (tmp_path / "mine.py").write_text(PYTHON)
    env = gymnasium.make("ClawGym/terminal-v0", tasks=f"{tmp_path}/mine.py")
    try:
        observation, _ = env.reset(options={"task_ids": ["add-up-4"]})
        assert "Write the sum of the numbers in sales.txt to sum.txt." in str(observation)
    finally:
        env.close()


def test_names_are_exported_at_top_level() -> None:
    assert clawgym.task is clawgym.tasks.python.task
    assert Task is clawgym.Task
