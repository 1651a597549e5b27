"""The ClawGym folder layout: every oddity is handled, or refused with the file and the field."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest

from clawgym.errors import TaskError
from clawgym.records import DEFAULT_WORKSPACE, GradingMode, Task, VerifierSpec
from clawgym.tasks import read
from clawgym.tasks.formats import harbor, write_row
from clawgym.tasks.formats.clawgym import read_task, write_task


def test_folder_is_read_without_opening_inputs(make_task, monkeypatch):
    folder = make_task()
    opened: list[str] = []
    real = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: (opened.append(str(self)), real(self))[1])
    task = read_task(folder)
    assert [file.path for file in task.inputs] == ["input/a.csv"]
    assert task.verifier.protocol == "reward_sh"
    assert {file.path for file in task.verifier.files} == {"check.py", "reward.sh"}
    assert task.workspace == DEFAULT_WORKSPACE
    assert not any("input_files" in path for path in opened)


def test_entry_with_bom_and_crlf_reads_as_without(make_task):
    folder = make_task()
    before = read_task(folder)
    text = (folder / "data_entry.json").read_text().replace("\n", "\r\n")
    (folder / "data_entry.json").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert read_task(folder).content_hash == before.content_hash


def test_task_without_inputs_omits_the_mount(make_task):
    folder = make_task(input_mount_dir=None)
    shutil.rmtree(folder / "input_files")
    assert read_task(folder).inputs == ()


def test_mount_below_workspace_moves_inputs(make_task):
    task = read_task(make_task(input_mount_dir=f"{DEFAULT_WORKSPACE}/project"))
    assert [file.path for file in task.inputs] == ["project/input/a.csv"]


def test_executable_bit_of_reward_sh_does_not_change_hash(make_task):
    folder = make_task()
    (folder / "reward/reward.sh").chmod(0o755)
    before = read_task(folder).content_hash
    (folder / "reward/reward.sh").chmod(0o644)
    assert read_task(folder).content_hash == before


def test_imports_of_checker_become_packages(make_task):
    folder = make_task()
    assert read_task(folder).sandbox_image == "default"
    check = folder / "reward/check.py"
    check.write_text("try:\n    import yaml\nexcept ImportError:\n    yaml = None\n" + check.read_text())
    task = read_task(folder)
    assert (task.image, task.sandbox_image) == ("default", "default:python3-yaml")
    assert dataclasses.replace(task, packages=()).content_hash == task.content_hash
    own = dataclasses.replace(task, image="default:python3-cryptography")
    assert own.sandbox_image == "default:python3-cryptography,python3-yaml"
    assert own.content_hash != task.content_hash
    assert dataclasses.replace(task, image="python:3.12").sandbox_image == "python:3.12"


def test_imports_of_inputs_become_packages(make_task):
    folder = make_task()
    program = folder / "input_files" / "tool.py"
    program.write_text("import yaml\n")
    assert read_task(folder).packages == ("python3-yaml",)
    program.rename(program.with_suffix(".txt"))
    assert read_task(folder).packages == ()


def test_mentioned_library_is_no_package(make_task):
    folder = make_task()
    check = folder / "reward/check.py"
    check.write_text("# reads config.yaml by hand\n" + check.read_text())
    assert read_task(folder).packages == ()


def test_hash_covers_inputs_verifier_and_instruction(make_task):
    folder = make_task()
    hashes = {read_task(folder).content_hash}
    (folder / "input_files/input/a.csv").write_text("changed")
    hashes.add(read_task(folder).content_hash)
    (folder / "reward/check.py").write_text("print(1)")
    hashes.add(read_task(folder).content_hash)
    entry = json.loads((folder / "data_entry.json").read_text())
    (folder / "data_entry.json").write_text(json.dumps({**entry, "user_query": "Other."}))
    hashes.add(read_task(folder).content_hash)
    assert len(hashes) == 4


ENTRY_ODDITIES = [
    ({"user_query": ""}, "user_query"),
    ({"user_query": " \n"}, "user_query"),
    ({"user_query": 7}, "user_query"),
    ({"user_query": None}, "user_query"),
    ({"metadata": None}, "metadata"),
    ({"metadata": []}, "metadata"),
    ({"task_id": None}, "task_id"),
    ({"task_id": 12}, "task_id"),
    ({"task_id": "a/b"}, "task_id"),
    ({"task_id": ".."}, "task_id"),
    ({"task_id": "x" * 200}, "task_id"),
    ({"input_mount_dir": "/root/.openclaw/workspaceX"}, "input_mount_dir"),
    ({"input_mount_dir": "/root/.openclaw/workspace/../x"}, "input_mount_dir"),
    ({"input_mount_dir": "workspace"}, "input_mount_dir"),
    ({"input_mount_dir": None}, "input_mount_dir"),
    ({"clawgym": {"limits": {"memory_mb": 0}}}, "limits.memory_mb"),
    ({"clawgym": {"limits": {"memory_mb": 1.5}}}, "memory_mb"),
    ({"clawgym": {"limits": {"memory": 1}}}, "limits.memory"),
    ({"clawgym": {"mod": "clean"}}, "clawgym.mod"),
    ({"clawgym": {"mode": "dirty"}}, "clawgym.mode"),
    ({"clawgym": {"workspace": "relative"}}, "relative"),
]


@pytest.mark.parametrize(("changes", "field"), ENTRY_ODDITIES, ids=lambda value: str(value)[:40])
def test_invalid_entry_names_file_and_field(make_task, changes, field):
    folder = make_task()
    entry = {**json.loads((folder / "data_entry.json").read_text()), **changes}
    (folder / "data_entry.json").write_text(json.dumps({k: v for k, v in entry.items() if v is not None}))
    with pytest.raises(TaskError, match=r"data_entry\.json") as error:
        read_task(folder)
    assert field in str(error.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not JSON"),
        (b"[1]", "JSON list"),
        (b"3", "JSON int"),
        (b"{", "not JSON"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"user_query": "\\ud800"}', "surrogate"),
        (b'{"a": "\xff"}', "UTF-8"),
    ],
    ids=["empty", "list", "scalar", "cut", "nan", "huge number", "deep", "surrogate", "latin-1"],
)
def test_entry_that_is_not_a_json_object_raises(make_task, data, message):
    folder = make_task()
    (folder / "data_entry.json").write_bytes(data)
    with pytest.raises(TaskError, match=message):
        read_task(folder)


def damage_missing_inputs(folder: Path):
    shutil.rmtree(folder / "input_files")


def damage_missing_reward(folder: Path):
    (folder / "reward/reward.sh").unlink()


def damage_missing_check(folder: Path):
    (folder / "reward/check.py").unlink()


def damage_crlf_script(folder: Path):
    script = folder / "reward/reward.sh"
    script.write_bytes(script.read_bytes().replace(b"\n", b"\r\n"))


def damage_empty_script(folder: Path):
    (folder / "reward/reward.sh").write_bytes(b"\n")


def damage_latin1_check(folder: Path):
    (folder / "reward/check.py").write_bytes(b"# caf\xe9\n")


def damage_link_out(folder: Path):
    (folder / "input_files/passwd").symlink_to("/etc/passwd")


def damage_link_to_checker(folder: Path):
    (folder / "input_files/answers.py").symlink_to("../reward/check.py")


def damage_dangling_link(folder: Path):
    (folder / "input_files/gone").symlink_to("nowhere")


def damage_link_to_folder(folder: Path):
    (folder / "input_files/loop").symlink_to("input")


def damage_linked_part(folder: Path):
    (folder / "reward").rename(folder.parent.parent / "elsewhere")
    (folder / "reward").symlink_to(folder.parent.parent / "elsewhere")


def damage_fifo(folder: Path):
    os.mkfifo(folder / "input_files/fifo")


def damage_name(folder: Path):
    os.write(os.open(os.fsencode(folder / "input_files") + b"/\xff.txt", os.O_CREAT | os.O_WRONLY), b"x")


def damage_solution_without_entry(folder: Path):
    (folder / "solution").mkdir()
    (folder / "solution/helper.py").write_text("")


def damage_wrong_folder(folder: Path):
    (folder / "wrong").mkdir()
    (folder / "wrong/notes.txt").write_text("x")


def damage_part_is_file(folder: Path):
    (folder / "solution").write_text("x")


DAMAGES = [
    (damage_missing_inputs, "input_files"),
    (damage_missing_reward, r"reward\.sh"),
    (damage_missing_check, r"check\.py"),
    (damage_crlf_script, r"reward\.sh.*Windows"),
    (damage_empty_script, r"reward\.sh.*empty"),
    (damage_latin1_check, r"check\.py.*UTF-8"),
    (damage_link_out, "passwd.*link out of"),
    (damage_link_to_checker, r"answers\.py.*link out of"),
    (damage_dangling_link, "gone.*broken link"),
    (damage_link_to_folder, "loop.*folder"),
    (damage_linked_part, "reward.*link"),
    (damage_fifo, "fifo"),
    (damage_name, "UTF-8"),
    (damage_solution_without_entry, r"solve\.sh"),
    (damage_wrong_folder, r"notes\.txt"),
    (damage_part_is_file, "solution"),
]


@pytest.mark.skipif(os.name != "posix", reason="POSIX files")
@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=lambda value: getattr(value, "__name__", ""))
def test_damaged_folder_is_named(make_task, damage, message):
    folder = make_task()
    read_task(folder)
    damage(folder)
    with pytest.raises(TaskError, match=message):
        read_task(folder)


def test_link_inside_inputs_is_read_as_its_file(make_task):
    folder = make_task()
    (folder / "input_files/copy.csv").symlink_to("input/a.csv")
    copy = next(file for file in read_task(folder).inputs if file.path == "copy.csv")
    assert copy.read() == b"a,b\n1,2\n"


def test_invalid_task_does_not_hide_others(make_task, tmp_path):
    make_task("task_0")
    (make_task("task_1") / "reward/reward.sh").unlink()
    make_task("task_2")
    make_task("task_3", task_id="task_0")
    make_task("task_4", task_id="TASK_2")
    (tmp_path / "set/README.md").write_text("stray")
    (tmp_path / "set/.DS_Store").write_text("hidden")
    (tmp_path / "set/empty").mkdir()
    tasks = read(tmp_path / "set")
    assert [task.id for task in tasks.tasks] == ["task_0", "task_2"]
    assert sorted(tasks.problems) == ["README.md", "empty", "task_1", "task_3", "task_4"]
    assert "taken by task_0" in tasks.problems["task_3"]
    assert "is not a task" in tasks.problems["README.md"]


def test_empty_folder_raises(tmp_path):
    (tmp_path / "notes").mkdir()
    with pytest.raises(TaskError, match="no readable task"):
        read(tmp_path)


def test_clawgym_fields_survive_writing_and_reading(make_task, tmp_path):
    folder = make_task(
        clawgym={
            "workspace": "/srv/job",
            "mode": "fork",
            "mutable_inputs": ["input/*"],
            "limits": {"memory_mb": 2048, "agent_seconds": 5},
            "env": {"A": "1"},
            "verifier_env": {"B": "2"},
            "unsupported": "needs a printer",
        },
        input_mount_dir="/srv/job",
    )
    for name in ("solution/solve.sh", "wrong/a.sh"):
        (folder / name).parent.mkdir()
        (folder / name).write_text("true\n")
    task = read_task(folder)
    assert (task.workspace, task.verifier.mode, task.limits.memory_mb) == ("/srv/job", GradingMode.FORK, 2048)
    assert (task.verifier.env, task.unsupported) == ({"B": "2"}, "needs a printer")
    write_task(task, tmp_path / "again")
    again = read_task(tmp_path / "again")
    assert again.content_hash == task.content_hash
    assert (again.limits, again.metadata, again.unsupported) == (task.limits, task.metadata, task.unsupported)
    assert [f.path for f in (*again.solution, *again.wrong_solutions)] == ["solve.sh", "a.sh"]


def test_empty_list_of_mutable_inputs_overrides_rule(make_task, tmp_path):
    query = "Update input/a.csv in place."
    by_rule = read_task(make_task("ruled", user_query=query))
    assert by_rule.verifier.mutable_inputs == ("input/a.csv",)
    given = read_task(make_task("given", user_query=query, clawgym={"mutable_inputs": []}))
    assert given.verifier.mutable_inputs == ()
    assert given.content_hash != by_rule.content_hash
    for number, task in enumerate((by_rule, given)):
        write_task(task, tmp_path / str(number))
        assert read_task(tmp_path / str(number)).content_hash == task.content_hash


def test_writing_to_existing_folder_raises(make_task):
    folder = make_task()
    with pytest.raises(TaskError, match="cannot be created"):
        write_task(read_task(folder), folder)


def test_folder_with_a_grader_reads_back(tmp_path):
    options = {"rubric": {"clear": "A reader understands it."}, "votes": 5}
    task = Task("t", "Write it.", VerifierSpec("grader", grader="rubric", grader_options=options))
    write_task(task, tmp_path / "t")
    assert not (tmp_path / "t/reward").exists()
    back = read_task(tmp_path / "t")
    assert back.verifier == task.verifier
    assert back.content_hash == task.content_hash
    with pytest.raises(TaskError, match="has a grader, which rows cannot hold"):
        write_row(task)
    with pytest.raises(TaskError, match="has a grader, which Harbor folders cannot hold"):
        harbor.write_task(task, tmp_path / "h")


@pytest.mark.parametrize("name", ["os:system", "subprocess:Popen", "rubrik"])
def test_folder_cannot_name_code_to_import(name, tmp_path):
    task = Task("t", "Write it.", VerifierSpec("grader", grader=name))
    write_task(task, tmp_path / "t")
    with pytest.raises(TaskError, match=r"clawgym\.grader: no grader .* is registered"):
        read_task(tmp_path / "t")


def test_folder_with_a_grader_has_the_program_that_it_runs(make_task, tmp_path):
    folder = make_task(clawgym={"grader": "questions"})
    task = read_task(folder)
    assert (task.verifier.grader, {file.path for file in task.verifier.files}) == (
        "questions",
        {"check.py", "reward.sh"},
    )
    write_task(task, tmp_path / "again")
    assert read_task(tmp_path / "again").content_hash == task.content_hash
    (folder / "reward/check.py").unlink()
    with pytest.raises(TaskError, match=r"has no check\.py"):
        read_task(folder)
