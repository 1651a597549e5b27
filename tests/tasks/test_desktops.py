"""Tasks with a desktop, in and out of ClawGym folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawgym.errors import TaskError
from clawgym.records import Desktop, Site, Task, TaskFile, VerifierSpec
from clawgym.tasks.formats import clawgym, harbor, read_task
from clawgym.tasks.formats.rows import read_row, write_row
from clawgym.tasks.packs import gui_basic
from clawgym.verifiers.protocols.reward_sh import standard_reward_sh

SITE = Site(("python3", "/tools/site/server.py"), (TaskFile("server.py", b"print(1)"), TaskFile("a/b", b"", True)))
WEB = Desktop(640, 480, site=SITE, page="/orders")
CALLS = b'[{"name": "computer_use", "arguments": {"action": "done"}}]'


def made(desktop: Desktop | None = WEB, **changes: Any) -> Task:
    files = (TaskFile("reward.sh", standard_reward_sh(), executable=True), TaskFile("check.py", b"print(1)"))
    fields: dict[str, Any] = {"solution": (TaskFile("solve.json", CALLS),)}
    verifier = VerifierSpec("reward_sh", files)
    return Task("the-task", "Do it.", verifier, desktop=desktop, **{**fields, **changes})


def change(folder: Path, desktop: Any, **more: Any) -> None:
    body = json.loads((folder / "data_entry.json").read_text())
    body["clawgym"] |= {"desktop": desktop, **more}
    (folder / "data_entry.json").write_text(json.dumps(body))


def test_folder_keeps_desktop_and_site(tmp_path: Path):
    clawgym.write_task(made(), tmp_path / "the-task")
    copy = read_task(tmp_path / "the-task")
    assert copy.content_hash == made().content_hash
    assert copy.desktop is not None
    assert copy.desktop.site is not None
    assert copy.desktop.site.argv == SITE.argv
    assert [(f.path, f.read(), f.executable) for f in copy.desktop.site.files] == [
        ("a/b", b"", True),
        ("server.py", b"print(1)", False),
    ]
    assert (tmp_path / "the-task" / "site" / "server.py").read_bytes() == b"print(1)"


def test_defaults_are_not_written(tmp_path: Path):
    clawgym.write_task(made(Desktop(programs=(("xfwrite", "note.txt"),))), tmp_path / "the-task")
    entry = json.loads((tmp_path / "the-task" / "data_entry.json").read_text())
    assert entry["clawgym"] == {"desktop": {"programs": [["xfwrite", "note.txt"]]}}


@pytest.mark.parametrize("generator", ["forms-signup", "board-last-gone"])
def test_pack_tasks_survive_writing_and_reading(tmp_path: Path, generator: str):
    task = gui_basic.make(generator, 1)
    clawgym.write_task(task, tmp_path / task.id)
    copy = read_task(tmp_path / task.id)
    assert (copy.content_hash, copy.limits) == (task.content_hash, task.limits)
    assert [f.read() for f in copy.solution] == [f.read() for f in task.solution]
    assert {f.path for f in copy.wrong_solutions} == {f.path for f in task.wrong_solutions}


words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
argvs = st.lists(words, min_size=1, max_size=3).map(tuple)
sizes = {"width": st.integers(320, 3840), "height": st.integers(240, 2160)}
files = st.lists(
    st.builds(TaskFile, st.sampled_from(["a", "b/c", "é"]), words.map(str.encode), st.booleans()),
    max_size=2,
    unique_by=lambda f: f.path,
).map(tuple)
desktops = st.builds(Desktop, **sizes, programs=st.lists(argvs, max_size=3).map(tuple)) | st.builds(
    Desktop, **sizes, site=st.builds(Site, argvs, files), page=st.just("") | words.map(lambda w: "/" + w)
)


@settings(max_examples=40, deadline=None)
@given(desktop=desktops)
def test_any_desktop_survives_writing_and_reading(desktop: Desktop, tmp_path_factory: pytest.TempPathFactory):
    task = made(desktop)
    folder = tmp_path_factory.mktemp("set") / "the-task"
    clawgym.write_task(task, folder)
    copy = clawgym.read_task(folder)
    assert copy.content_hash == task.content_hash
    assert copy.desktop is not None
    assert (copy.desktop.width, copy.desktop.height) == (desktop.width, desktop.height)
    assert (copy.desktop.programs, copy.desktop.page) == (desktop.programs, desktop.page)


@pytest.mark.parametrize(
    ("desktop", "part"),
    [
        ({"width": 10, "site": {"argv": ["x"]}}, "320 x 240"),
        ({"width": "640"}, "desktop.width"),
        ({"page": "orders", "site": {"argv": ["x"]}}, "'orders'"),
        ({"page": "/"}, "needs clawgym.desktop.site"),
        ({"site": {"argv": []}}, "site.argv"),
        ({"site": {"argv": ["x"]}, "programs": [["y"]]}, "not both"),
        ({"site": {"argv": ["x"], "port": 3}}, "port"),
        ({"programs": [[]]}, "programs"),
        (None, "needs clawgym.desktop.site"),
    ],
)
def test_invalid_field_is_named(tmp_path: Path, desktop: Any, part: str):
    folder = tmp_path / "the-task"
    clawgym.write_task(made(solution=()), folder)
    change(folder, desktop)
    with pytest.raises(TaskError) as error:
        clawgym.read_task(folder)
    assert part in str(error.value)
    assert str(folder) in str(error.value)


def test_tools_and_desktop_together_raise(tmp_path: Path):
    clawgym.write_task(made(), tmp_path / "the-task")
    change(tmp_path / "the-task", {"programs": [["x"]]}, tools=[{"name": "one", "argv": ["x"]}])
    (tmp_path / "the-task" / "site").rename(tmp_path / "site")
    with pytest.raises(TaskError, match="both tools and desktop"):
        clawgym.read_task(tmp_path / "the-task")


def test_other_formats_raise(tmp_path: Path):
    with pytest.raises(TaskError, match="has a desktop, which rows cannot hold"):
        write_row(made())
    with pytest.raises(TaskError, match="has a desktop, which Harbor folders cannot hold"):
        harbor.write_task(made(), tmp_path / "h")
    assert not (tmp_path / "h").exists()
    row = json.loads(write_row(made(None, solution=())))
    row["clawgym"] = {"desktop": {"programs": [["x"]]}}
    with pytest.raises(TaskError, match="rows cannot hold"):
        read_row(row)
