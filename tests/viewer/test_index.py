from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawgym.evaluation.answers import episode_line, ordered
from clawgym.records.run_folder import RunFolder, safe_name
from clawgym.viewer.index import RunIndex

from .runs import ATTACK, episode, open_run


def full(index: RunIndex) -> RunIndex:
    while index.update():
        pass
    for _ in index.index_texts():
        pass
    return index


def lines(index: RunIndex, **where: str) -> list[dict[str, Any]]:
    return index.episodes(limit=1000, where=where)[2]


@pytest.fixture
def index(tmp_path: Path):
    made = RunIndex(tmp_path / "run", tmp_path / "index.db")
    yield made
    made.close()


ROWS = st.lists(
    st.tuples(
        st.sampled_from("abcdef"),
        st.integers(0, 1),
        st.none() | st.dictionaries(st.sampled_from(("x", "y", "z")), st.sampled_from((0.0, 0.5, 1.0)), min_size=1),
        st.sampled_from(("alpha beta", "beta gamma", "delta")),
    ),
    max_size=12,
)


@settings(max_examples=25, deadline=None)
@given(ROWS, st.lists(st.integers(0, 12), max_size=3), st.integers(1, 4))
def test_index_equals_a_full_read_however_it_grew(tmp_path_factory, rows, stops, portion) -> None:
    folder = tmp_path_factory.mktemp("grown")
    index = RunIndex(folder / "run", folder / "index.db")
    with open_run(folder / "run", "abcdef", samples=2) as run:
        for n, (task, sample, checks, text) in enumerate(rows):
            run.record(episode(task, checks, sample=sample, text=text))
            if n in stops:
                while index.update(portion):
                    pass
                next(index.index_texts(), None)
    full(index)
    read = RunFolder.read(folder / "run")
    by_name: dict[str, list[dict[str, Any]]] = {}
    for row in read.rows:
        by_name.setdefault(safe_name(row["task_id"], row["sample"]), []).append(row)
    order = ordered(read.manifest)
    expected = [episode_line(read.manifest, order, of) for of in by_name.values()]
    expected.sort(key=lambda line: (line["order"], line["sample"]))
    assert lines(index) == json.loads(json.dumps(expected))
    assert index.rows() == read.rows
    for check in "xyz":
        assert [one["name"] for one in lines(index, check=check)] == [
            one["name"]
            for one in expected
            if (by_name[one["name"]][-1]["result"] or {"checks": {}})["checks"].get(check, 1) < 1
        ]
    latest = {safe_name(task, sample): (checks, text) for task, sample, checks, text in rows}
    for word in ("alpha", "beta", "delta"):
        found = {name for name, step in index.search(word, 0, 1000)[1] if step == 0}
        assert found == {name for name, (checks, text) in latest.items() if checks is not None and word in text.split()}
    index.close()


def test_new_lines_of_a_run_in_progress_are_read_once_and_a_partial_line_later(tmp_path: Path, index: RunIndex) -> None:
    with open_run(tmp_path / "run", "ab") as run:
        run.record(episode("a", {"x": 1.0}))
        full(index)
        row = run.record(episode("b", {"x": 0.0}))
        results = tmp_path / "run/results.jsonl"
        whole = results.read_bytes()
        results.write_bytes(whole[:-10])
        full(index)
        assert [line["task"] for line in lines(index)] == ["a"]
        with results.open("ab") as file:
            file.write(whole[-10:])
        full(index)
        assert [line["task"] for line in lines(index)] == ["a", "b"]
        assert index.episode("b.0") == (lines(index)[1], [row])


def test_retried_episode_replaces_its_line_and_its_words(tmp_path: Path, index: RunIndex) -> None:
    with open_run(tmp_path / "run", "a") as run:
        run.record(episode("a", {"x": 0.0, "y": 1.0}, text="walrus"))
        full(index)
        assert index.search("walrus", 0, 10)[0]
        run.record(episode("a", {"x": 1.0, "y": 1.0}, text="badger"), attempt=1)
        full(index)
    (line,) = lines(index)
    assert (line["outcome"], line["attempts"]) == ("solved", 2)
    assert not lines(index, check="x")
    assert not index.search("walrus", 0, 10)[0]
    assert index.search("badger", 0, 10)[0] == 2
    assert len(index.episode("a.0")[1]) == 2  # type: ignore[index]


def test_replaced_results_and_changed_transcripts_are_read_again(tmp_path: Path, index: RunIndex) -> None:
    with open_run(tmp_path / "run", "ab") as run:
        run.record(episode("a", {"x": 1.0}, text="walrus"))
    full(index)
    shutil.rmtree(tmp_path / "run")
    with open_run(tmp_path / "run", "ab") as run:
        run.record(episode("b", {"x": 1.0}, text="badger"))
    full(index)
    assert [line["task"] for line in lines(index)] == ["b"]
    assert not index.search("walrus", 0, 10)[0]
    transcript = tmp_path / "run/episodes/b.0/transcript.json"
    transcript.write_text(transcript.read_text().replace("badger", "ferret"))
    index.forget_changed()
    full(index)
    assert index.search("ferret", 0, 10)[0]
    assert not index.search("badger", 0, 10)[0]


@pytest.mark.parametrize(
    "wrong", [b"{", b"[]", b'{"key": "a#0"}', b'{"key": "a#0", "task_id": "a"}', b"\xff", b"[" * 10_000]
)
def test_damaged_line_is_counted_and_hides_no_other(tmp_path: Path, index: RunIndex, wrong: bytes) -> None:
    with open_run(tmp_path / "run", "ab") as run:
        run.record(episode("a", {"x": 1.0}))
        with (tmp_path / "run/results.jsonl").open("ab") as file:
            file.write(wrong + b"\n")
        run.record(episode("b", {"x": 1.0}))
    full(index)
    assert [line["task"] for line in lines(index)] == ["a", "b"]
    assert index.damaged == 1


def test_damaged_index_is_made_again(tmp_path: Path) -> None:
    with open_run(tmp_path / "run", "a") as run:
        run.record(episode("a", {"x": 1.0}))
    (tmp_path / "index.db").write_bytes(b"SQLite format 3\0" + b"x" * 5000)
    index = full(RunIndex(tmp_path / "run", tmp_path / "index.db"))
    assert len(lines(index)) == 1
    index.close()


def test_links_out_of_the_folder_are_not_read(tmp_path: Path, index: RunIndex) -> None:
    with open_run(tmp_path / "run", "a") as run:
        run.record(episode("a", {"x": 1.0}, text="walrus"))
    transcript = tmp_path / "run/episodes/a.0/transcript.json"
    os.rename(transcript, tmp_path / "elsewhere.json")
    transcript.symlink_to(tmp_path / "elsewhere.json")
    full(index)
    assert len(lines(index)) == 1
    assert not index.search("walrus", 0, 10)[0]


def test_filters_and_sorting(tmp_path: Path, index: RunIndex) -> None:
    with open_run(tmp_path / "run", "abc") as run:
        run.record(episode("a", {"x": 0.5, ATTACK: 0.0}))
        run.record(episode("b", {"x": 1.0}, text="50% of it"))
        run.record(episode("c", None))
    full(index)

    def order(sort: str) -> str:
        return "".join(line["task"] for line in index.episodes(sort=sort)[2])

    assert (order("order"), order("-order"), order("official"), order("-official")) == ("abc", "cba", "abc", "bac")
    assert [line["task"] for line in lines(index, outcome="infra")] == ["c"]
    assert [line["task"] for line in lines(index, q="no answer")] == ["c"]
    assert [line["task"] for line in lines(index, q='"50% of"')] == ["b"]
    assert lines(index, q="%") == []
    assert index.episodes(offset=1, limit=1)[:2] == (3, 3)
    with pytest.raises(ValueError, match="choose one of order"):
        index.episodes(sort="name; DROP TABLE episodes")
    for query in ('"', "NEAR(", "a OR", "text:", "*", "a* -b", "'"):
        lines(index, q=query)
        index.search(query, 0, 10)
