"""Rows of the Hub data sets: the same task as the folder made of it, and every oddity refused by line and field."""

from __future__ import annotations

import dataclasses
import json

import pytest

from clawgym.errors import TaskError
from clawgym.records import DEFAULT_WORKSPACE, TaskFile, VerifierSpec
from clawgym.tasks import read
from clawgym.tasks.formats._reward import hook_of, normal_hook
from clawgym.tasks.formats.clawgym import read_task
from clawgym.tasks.formats.rows import read_row, write_row
from clawgym.tasks.scaffold import starter
from clawgym.verifiers.protocols.reward_sh import STANDARD_HOOK, standard_reward_sh

CHECK = "import json\nprint(json.dumps({'done': 0.0}))\n"

ROW = {
    "prompt": "Write output/b.csv.",
    "hook_code": "python3 reward/test.py /root/.openclaw/workspace",
    "input_files": [
        {"file_path": "reward/test.py", "content": CHECK},
        {"file_path": "input/a.csv", "content": "a,b\n1,2\n"},
    ],
    "rule": None,
    "origin_template": "---\nid: task_0000\nname: x\n---\nbody",
}


def row(**changes):
    return {**ROW, **changes}


def test_row_and_folder_have_the_same_hash(make_task):
    folder, from_row = read_task(make_task()), read_row(ROW)
    assert from_row.content_hash == folder.content_hash
    assert from_row.id == folder.id
    assert from_row.metadata == folder.metadata


@pytest.mark.parametrize(
    "hook",
    [
        None,
        "",
        " \n",
        "python3 reward/test.py /root/.openclaw/workspace",
        "python3 ./reward/check.py /root/.openclaw/workspace\n",
        f"python3 {DEFAULT_WORKSPACE}/reward/test.py {DEFAULT_WORKSPACE}",
        STANDARD_HOOK,
    ],
)
def test_all_spellings_of_standard_hook_are_equal(hook):
    assert normal_hook(hook) == STANDARD_HOOK
    assert read_row(row(hook_code=hook)).content_hash == read_row(ROW).content_hash


def test_custom_hook_survives():
    hook = f"cd {DEFAULT_WORKSPACE} && python3 reward/test.py . --strict"
    script = standard_reward_sh(normal_hook(hook))
    assert hook_of(script) == f"cd {DEFAULT_WORKSPACE} && python3 {DEFAULT_WORKSPACE}/reward/check.py . --strict"
    task = read_row(row(hook_code=hook))
    assert read_row(json.loads(write_row(task))).content_hash == task.content_hash
    assert task.content_hash != read_row(ROW).content_hash


def test_hook_that_would_be_rewritten_is_not_a_hook():
    assert hook_of(standard_reward_sh("python3 reward/test.py .")) is None
    assert hook_of(standard_reward_sh("")) is None


def test_hook_with_similar_file_name_is_unchanged():
    assert normal_hook("python3 my_reward/test.py .") == "python3 my_reward/test.py ."
    assert normal_hook("python3 reward/test.pyc .") == "python3 reward/test.pyc ."


def test_custom_script_is_stored_whole():
    own = VerifierSpec("reward_sh", (TaskFile("reward.sh", b"echo 1\n", executable=True),))
    task = read_row(json.loads(write_row(starter("x"))))
    assert task.content_hash == starter("x").content_hash

    other = dataclasses.replace(starter("x"), verifier=own)
    assert read_row(json.loads(write_row(other))).content_hash == other.content_hash


def test_rule_goes_to_metadata_and_back():
    task = read_row(row(rule={"criteria": ["clear"]}))
    assert task.metadata["rule"] == {"criteria": ["clear"]}
    assert json.loads(write_row(task))["rule"] == {"criteria": ["clear"]}


def test_clawgym_fields_of_rows_survive():
    task = starter("x")
    again = read_row(json.loads(write_row(task)))
    assert again.metadata == task.metadata
    assert [f.path for f in again.solution] == ["solve.sh"]
    assert [f.path for f in again.wrong_solutions] == [f.path for f in task.wrong_solutions]


ODDITIES = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"input_files": None}, "input_files"),
    ({"input_files": []}, "input_files"),
    ({"input_files": "x"}, "input_files"),
    ({"input_files": [{"file_path": "input/a"}]}, "input_files.0.content"),
    ({"input_files": [{"file_path": "reward/test.py", "content": None}]}, "input_files.0.content"),
    ({"input_files": [{"file_path": "input/a.csv", "content": "no check"}]}, "has no verifier"),
    ({"input_files": [{"file_path": "reward/other.py", "content": ""}]}, "check.py"),
    ({"hook_code": 3}, "hook_code"),
    ({"origin_template": 3}, "origin_template"),
    ({"origin_template": "id: a/b"}, "a/b"),
]


@pytest.mark.parametrize(("changes", "message"), ODDITIES, ids=lambda value: str(value)[:40])
def test_invalid_row_names_its_field(changes, message):
    with pytest.raises(TaskError) as error:
        read_row(row(**changes), "rows.jsonl:7")
    assert "rows.jsonl:7" in str(error.value)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "path",
    [
        "../x",
        "/etc/passwd",
        "a/../b",
        "a//b",
        "",
        ".",
        "a/",
        f"{DEFAULT_WORKSPACE}/a",
        "reward/../x",
        "reward/",
        "a\0b",
    ],
)
def test_unsafe_path_raises(path):
    files = [*ROW["input_files"], {"file_path": path, "content": ""}]
    with pytest.raises(TaskError, match="input_files"):
        read_row(row(input_files=files))


@pytest.mark.parametrize(
    "paths", [("input/a.csv",), ("input/a.csv/b",), ("input",), ("reward/check.py",), ("reward/check.py/x",)], ids=str
)
def test_colliding_files_raise(paths):
    files = [*ROW["input_files"], *({"file_path": path, "content": ""} for path in paths)]
    with pytest.raises(TaskError, match=r"twice|both a file and a folder"):
        read_row(row(input_files=files))


def test_valid_rows_are_kept(tmp_path):
    lines = [
        b"\xef\xbb\xbf" + json.dumps(row(origin_template="id: first")).encode(),
        b"",
        b"{not json",
        b'"scalar"',
        json.dumps(row(origin_template="")).encode() + b"\r",
        json.dumps(row(origin_template=None)).encode(),
        json.dumps(row(origin_template="id: first")).encode(),
        b"\xff",
        json.dumps(row(origin_template="id: 'quoted'")).encode(),
    ]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join(lines))
    tasks = read(path)
    assert [task.id for task in tasks.tasks] == ["first", "task_00001", "task_00002", "quoted"]
    assert sorted(tasks.problems) == [f"rows.jsonl:{n}" for n in (3, 4, 7, 8)]
    assert "taken" in tasks.problems["rows.jsonl:7"]


def test_limit_stops_early(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row(origin_template=f"id: t{n}")) for n in range(5)) + "\n{broken")
    assert [task.id for task in read(path, limit=2).tasks] == ["t0", "t1"]
    assert read(path, limit=2).problems == {}


def test_task_that_rows_cannot_store_raises():

    binary = dataclasses.replace(starter("x"), inputs=(TaskFile("a.bin", b"\xff\xfe"),))
    with pytest.raises(TaskError, match=r"a\.bin.*UTF-8"):
        write_row(binary)
    below_reward = dataclasses.replace(starter("x"), inputs=(TaskFile("reward/a.txt", b""),))
    with pytest.raises(TaskError, match="below reward/"):
        write_row(below_reward)


def test_byte_order_mark_in_input_survives():

    task = dataclasses.replace(starter("x"), inputs=(TaskFile("a.csv", b"\xef\xbb\xbfa;b\r\n", executable=True),))
    assert read_row(json.loads(write_row(task))).inputs == task.inputs


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_too_large_rows_raise(tmp_path, monkeypatch, suffix: str):
    text = json.dumps(ROW)
    path = tmp_path / f"rows.{suffix}"
    path.write_text(f"[{text}]" if suffix == "json" else text)
    monkeypatch.setattr("clawgym.tasks.formats._tables.LARGEST_ROW", len(path.read_bytes()))
    assert len(read(path).tasks) == 1
    path.write_text(path.read_text() + " ")
    with pytest.raises(TaskError, match=rf"rows\.{suffix}.*write smaller tasks"):
        read(path).tasks  # noqa: B018


def test_parquet_bomb_is_not_read(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    count = 20_000_000
    values = pyarrow.array(bytearray(count), pyarrow.int8())
    column = pyarrow.ListArray.from_arrays(pyarrow.array([0, count], pyarrow.int32()), values)
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"prompt": column}), path, compression="zstd")
    assert path.stat().st_size < 2000
    with pytest.raises(TaskError, match=r"rows\.parquet: a row group of 20000000 values.*smaller row groups"):
        read(path).tasks  # noqa: B018
