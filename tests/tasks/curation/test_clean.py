"""Cleaned subsets: the list as a file, and the tasks it selects."""

from __future__ import annotations

import dataclasses

import platformdirs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym.errors import TaskError, TaskSetNotFound
from clawgym.records import TaskSet
from clawgym.tasks import available, load, names, write
from clawgym.tasks.curation import clean
from clawgym.tasks.curation.clean import HASH_DIGITS, Verdict, from_csv, select, to_csv
from clawgym.tasks.formats.rows import write_row
from clawgym.tasks.scaffold import starter

NAME = "ClawGym-Task-Clean"
VERDICTS = st.builds(
    Verdict,
    st.text(min_size=1, max_size=12).filter(lambda text: "\r" not in text),
    st.from_regex(rf"[0-9a-f]{{{HASH_DIGITS}}}", fullmatch=True),
    st.lists(st.from_regex(r"[a-z-]{1,9}", fullmatch=True), max_size=3).map(tuple),
)


@given(st.lists(VERDICTS, max_size=5))
def test_list_reads_back_equal(verdicts):
    assert from_csv(to_csv(verdicts), "x") == tuple(verdicts)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "line 1"),
        ("task,hash\n", "line 1"),
        ("task,hash,left_out\na,b,\n", "line 2"),
        (f"task,hash,left_out\n\na,{'0' * 24},\n", "line 2"),
    ],
)
def test_damaged_list_names_the_line(text, line):
    with pytest.raises(TaskError, match=rf"x\.csv: {line}"):
        from_csv(text, "x.csv")


def verdict(task, *left_out: str) -> Verdict:
    return Verdict(task.id, task.content_hash[:HASH_DIGITS], left_out)


@pytest.fixture
def tasks():
    """Three tasks of different content."""
    return [dataclasses.replace(starter(name), instruction=f"do {name}") for name in ("a", "b", "c")]


def test_kept_tasks_are_matched_by_content_and_get_listed_ids(tasks):
    renamed = TaskSet("rows", tuple(dataclasses.replace(task, id=f"row-{task.id}") for task in reversed(tasks)))
    found = select(renamed, [verdict(tasks[0]), verdict(tasks[1], "cheap"), verdict(tasks[2])], "clean")
    assert [task.id for task in found.tasks] == ["a", "c"]
    assert (found.name, dict(found.problems)) == ("clean", {})
    assert found.content_hash == TaskSet("x", (tasks[0], tasks[2])).content_hash


def test_changed_and_missing_tasks_are_problems(tasks):
    changed = dataclasses.replace(tasks[1], instruction="do something else")
    found = select(TaskSet("here", (tasks[0], changed)), [verdict(task) for task in tasks], "clean")
    assert [task.id for task in found.tasks] == ["a"]
    assert list(found.problems) == ["b", "c"]
    assert "changed since the audit" in found.problems["b"]
    assert "not in here" in found.problems["c"]


def test_no_matching_task_raises(tasks):
    with pytest.raises(TaskSetNotFound, match="clawgym tasks audit here"):
        select(TaskSet("here", ()), [verdict(tasks[0])], "clean")


@pytest.fixture
def listed(tasks, monkeypatch, tmp_path):
    """The three are the public training tasks, and ``b`` is left out."""
    monkeypatch.delenv("CLAWGYM_DATA", raising=False)
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda *a, **k: str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: pytest.fail("the Hub was asked"))
    verdicts = (verdict(tasks[0]), verdict(tasks[1], "web"), verdict(tasks[2]))
    monkeypatch.setattr(clean, "shipped", lambda: verdicts)
    return tasks


def test_clean_set_loads_from_folders(listed, tmp_path, monkeypatch):
    write(listed, tmp_path / "data" / "clawgym_train")
    monkeypatch.setenv("CLAWGYM_DATA", str(tmp_path / "data"))
    assert NAME in names()
    assert available(NAME).startswith("in ")
    found = load(NAME)
    assert [task.id for task in found.tasks] == ["a", "c"]
    assert load(f"{NAME}@{found.content_hash[:9]}", limit=1).tasks[0].id == "a"
    assert load(NAME, ids=["c"]).tasks[0].instruction == "do c"
    with pytest.raises(TaskSetNotFound, match="has the content hash"):
        load(f"{NAME}@feedbeef")
    with pytest.raises(TaskSetNotFound, match="no task 'b'"):
        load(NAME, ids=["b"])


def test_clean_set_loads_from_rows(listed, tmp_path, monkeypatch):
    (tmp_path / "syn_task.jsonl").write_bytes(b"".join(map(write_row, listed)))
    monkeypatch.setenv("CLAWGYM_DATA", str(tmp_path))
    assert [task.id for task in load(NAME).tasks] == ["a", "c"]


def test_missing_source_names_searched_locations(listed, monkeypatch):
    class Api:
        def dataset_info(self, *args, **kwargs):
            raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    with pytest.raises(TaskSetNotFound, match="no route"):
        load(NAME)
    assert available(NAME).startswith("not here")


@pytest.mark.data
def test_shipped_list_matches_public_tasks(clawgym_data):
    found = load(NAME)
    assert dict(found.problems) == {}
    assert len(found) == sum(not v.left_out for v in clean.shipped())
    assert len(clean.shipped()) == len(load("ClawGym-Train")) == 2000
