"""Rows of mathematics, as they are published: DAPO-Math, AIME."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym.errors import TaskError
from clawgym.tasks import load, read
from clawgym.tasks.formats import math_rows

from .served import Host

DAPO = {
    "data_source": "math_dapo",
    "prompt": [
        {"role": "user", "content": "Solve the problem. The last line is of the form Answer: $Answer.\n\n6 * 7?"}
    ],
    "ability": "MATH",
    "reward_model": {"ground_truth": "42", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
}
ROWS = [
    DAPO,
    {"ID": "2024-I-1", "Problem": "What is 200 + 4?", "Solution": "Add.", "Answer": 204},
    {"id": 61, "problem": "What is 20 + 4?", "solution": "Add.", "answer": "024", "year": "2025", "url": "https://x"},
    {"question": "Which angle?", "answer": "336^\\circ"},
    {"prompt": "What is a half?", "label": "\\frac{1}{2}"},
]


def lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rows_become_tasks_with_an_interpreter(tmp_path: Path) -> None:
    tasks = load(str(lines(tmp_path / "aime.jsonl", ROWS)))
    assert not tasks.problems
    assert [t.id for t in tasks.tasks] == [
        "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079",
        "2024-I-1",
        "row-00061",
        "task_00003",
        "task_00004",
    ]
    for task in tasks.tasks:
        assert [server.name for server in task.tools] == ["python"]
        assert task.metadata["category"] == "math"
    assert tasks.tasks[0].metadata["data_source"] == "math_dapo"
    assert tasks.tasks[1].instruction == "What is 200 + 4?\n\nEnd with a line `Answer: \\boxed{...}`."


def test_parquet_gives_the_same_tasks(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "dapo.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([DAPO]), path)
    rows = lines(tmp_path / "dapo.jsonl", [DAPO])
    assert [t.content_hash for t in read(path).tasks] == [t.content_hash for t in read(rows).tasks]


@pytest.mark.parametrize(
    ("start", "end"),
    [(20, 60), (-200, -8), (-4, None)],
    ids=["pages", "footer", "end"],
)
def test_damaged_parquet_file_is_named(tmp_path: Path, start: int, end: int | None) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "dapo.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([DAPO] * 30), path)
    data = bytearray(path.read_bytes())
    data[start:end] = b"\xff" * len(data[start:end])
    path.write_bytes(data)
    with pytest.raises(TaskError, match=r"(?s)dapo\.parquet: is not a readable Parquet file.*restore the file"):
        read(path)


@pytest.mark.parametrize(
    ("message", "right"),
    [
        ("So it is 42.\nAnswer: \\boxed{42}", True),
        ("Answer: 42", True),
        ("Answer: $42$.", True),
        ("I guess \\boxed{41}; no:\n**Answer:** 42", True),
        ("Answer: 41 or 42", False),
        ("Answer: 42\nAnswer: 41", False),
        ("42 it is not", False),
        ("", False),
    ],
)
def test_published_prompt_form_is_read(message: str, right: bool, tmp_path: Path) -> None:
    task = math_rows.read_row(DAPO)
    if task.unsupported:
        pytest.skip(task.unsupported)
    host = Host(task, tmp_path)
    host.message = message
    assert host.scores() == {"answer": float(right)}


BAD = [
    ({**DAPO, "prompt": []}, "field prompt"),
    ({**DAPO, "prompt": [{"role": "user", "content": " "}]}, r"field prompt\[0\].content"),
    ({**DAPO, "prompt": [{"role": "assistant", "content": "42"}]}, r"field prompt\[0\].role"),
    ({**DAPO, "reward_model": "42"}, "field reward_model"),
    ({**DAPO, "reward_model": {"ground_truth": None}}, "field reward_model.ground_truth"),
    ({**DAPO, "reward_model": {"ground_truth": "1" * 500}}, "field reward_model.ground_truth"),
    ({"Problem": "", "Answer": "1"}, "field problem"),
    ({"Problem": "x", "Answer": ""}, "field answer"),
    ({"Problem": "x", "Answer": True}, "field answer"),
    ({"ID": "a/b", "Problem": "x", "Answer": "1"}, "field id"),
]


@pytest.mark.parametrize(("row", "field"), BAD)
def test_invalid_row_names_line_and_field(row: dict[str, Any], field: str, tmp_path: Path) -> None:
    tasks = load(str(lines(tmp_path / "rows.jsonl", [DAPO, row])))
    assert len(tasks) == 1
    with pytest.raises(TaskError, match=rf"rows.jsonl:2: {field}"):
        raise TaskError(tasks.problems["rows.jsonl:2"])


@given(
    st.dictionaries(
        st.sampled_from(["prompt", "label", "reward_model", "Problem", "answer", "id", "extra_info"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=2)
                | st.dictionaries(st.sampled_from(["content", "role", "ground_truth", "index"]), inner, max_size=3)
            ),
            max_leaves=5,
        ),
    )
)
def test_any_row_is_a_task_or_a_task_error(row: dict[str, Any]) -> None:
    if math_rows.is_row(row):
        try:
            made = math_rows.read_row(row, "x:1").instruction
        except TaskError as error:
            made = str(error).startswith("x:1: ")
        assert made
