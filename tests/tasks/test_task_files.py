"""What a task folder says is read as it lies there: no link is followed out of it, not even one that comes later."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from clawgym.errors import TaskError
from clawgym.records import TaskFile
from clawgym.tasks import formats
from clawgym.tasks.formats import _files

Maker = Callable[..., Path]
INPUT = "input_files/input/a.csv"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    folder = tmp_path / "private"
    folder.mkdir()
    (folder / "a.csv").write_text("a secret")
    return folder


def by_link(folder: Path, secret: Path) -> None:
    (folder / INPUT).unlink()
    (folder / INPUT).symlink_to(secret / "a.csv")


def by_linked_folder(folder: Path, secret: Path) -> None:
    shutil.rmtree((folder / INPUT).parent)
    (folder / INPUT).parent.symlink_to(secret)


def by_fifo(folder: Path, secret: Path) -> None:
    (folder / INPUT).unlink()
    os.mkfifo(folder / INPUT)


def by_device(folder: Path, secret: Path) -> None:
    (folder / INPUT).unlink()
    (folder / INPUT).symlink_to("/dev/zero")


def by_giant(folder: Path, secret: Path) -> None:
    os.truncate(folder / INPUT, 2**40)


def by_nothing(folder: Path, secret: Path) -> None:
    (folder / INPUT).unlink()


SWAPS = [by_link, by_linked_folder, by_fifo, by_device, by_giant, by_nothing]


@pytest.mark.parametrize("swap", SWAPS)
@pytest.mark.parametrize("hashed", [False, True], ids=["hash not taken", "hash taken"])
def test_file_replaced_by_link_after_loading_raises(make_task: Maker, secret: Path, swap, hashed: bool) -> None:
    folder = make_task()
    task = formats.read_task(folder)
    if hashed:
        assert task.content_hash
    swap(folder, secret)
    with pytest.raises(TaskError, match=r"a\.csv: cannot be read .*: restore the file"):
        task.frozen()


def test_changed_file_raises_after_hash_was_computed(make_task: Maker) -> None:
    folder = make_task()
    task = formats.read_task(folder)
    assert task.content_hash
    (folder / INPUT).write_text("other")
    with pytest.raises(TaskError, match=r"input input/a\.csv was changed"):
        task.frozen()


def test_hashed_files_are_the_ones_that_run(make_task: Maker) -> None:
    folder = make_task()
    copy = formats.read_task(folder).frozen()
    (folder / INPUT).write_text("other")
    assert copy.inputs[0].read() == b"a,b\n1,2\n"
    (folder / INPUT).write_text("a,b\n1,2\n")
    assert copy.content_hash == formats.read_task(folder).content_hash


@pytest.mark.parametrize(
    "name", ["data_entry.json", "reward/reward.sh", "reward/check.py", "reward", "input_files"], ids=str
)
def test_part_that_links_out_of_the_task_raises(make_task: Maker, tmp_path: Path, name: str) -> None:
    other = make_task("other")
    moved = tmp_path / "moved"
    shutil.move(other, moved)
    folder = make_task("task")
    target = folder / name
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    target.symlink_to(moved / name)
    with pytest.raises(TaskError, match="link"):
        formats.read_task(folder)


def test_harbor_step_cannot_name_a_file_outside(make_task: Maker, tmp_path: Path, secret: Path) -> None:
    formats.write([formats.read_task(make_task())], tmp_path / "harbor", "harbor")
    folder = tmp_path / "harbor" / "task_0000"
    instruction = folder / "instruction.md"
    instruction.unlink()
    instruction.symlink_to(secret / "a.csv")
    with pytest.raises(TaskError, match=r"instruction\.md: cannot be read \(is a link"):
        formats.read_task(folder)


def test_task_that_is_a_link_elsewhere_is_a_problem(make_task: Maker, tmp_path: Path) -> None:
    folder = make_task()
    shutil.move(make_task("other"), tmp_path / "elsewhere")
    (folder.parent / "linked").symlink_to(tmp_path / "elsewhere")
    found = formats.read(folder.parent)
    assert [task.id for task in found.tasks] == ["task_0000"]
    assert "is a link out of the set" in found.problems["linked"]


def test_part_beyond_limits_raises(make_task: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = make_task("deep")
    (deep / "input_files" / Path(*"d" * (_files.DEEPEST + 1))).mkdir(parents=True)
    with pytest.raises(TaskError, match=f"more than {_files.DEEPEST} folders deep: reduce the nesting"):
        formats.read_task(deep)
    large = make_task("large")
    for number in range(5):
        (large / f"input_files/{number}").touch()
        os.truncate(large / f"input_files/{number}", 250 * 2**20)
    with pytest.raises(TaskError, match="is too large"):
        formats.read_task(large)
    monkeypatch.setattr(_files, "MOST_FILES", 3)
    wide = make_task("wide")
    for number in range(4):
        (wide / f"input_files/{number}").touch()
    with pytest.raises(TaskError, match="more than 3 files and folders: split the task"):
        formats.read_task(wide)


def test_endless_description_is_not_read(make_task: Maker) -> None:
    folder = make_task()
    os.truncate(folder / "data_entry.json", 2**40)
    with pytest.raises(TaskError, match=r"data_entry\.json: cannot be read \(is larger than"):
        formats.read_task(folder)


def test_task_file_of_a_caller_is_read_from_its_path(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("content")
    (tmp_path / "link").symlink_to("real")
    assert TaskFile("a", tmp_path / "real").read() == b"content"
    with pytest.raises(TaskError, match="is a link"):
        TaskFile("a", tmp_path / "link").read()


def test_row_cannot_refer_to_a_file(make_task: Maker, tmp_path: Path) -> None:
    """Rows hold the contents of files; what names another place is refused."""
    row = {"task_id": "t", "user_query": "q", "input_files": [{"path": "../../etc/passwd", "content": "x"}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(TaskError):
        formats.read(tmp_path / "rows.jsonl")
