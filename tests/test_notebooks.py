"""Results in notebooks and as data frames."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import clawgym
from clawgym import frames
from clawgym.errors import MissingDependency, RunFolderError
from clawgym.evaluation.compare import compare
from clawgym.evaluation.summary import summarize
from clawgym.leaderboards import load_entry, rank
from clawgym.records import Episode, Observation, Outcome, Step, Task, TaskSet, ToolCall, VerifierSpec
from clawgym.records.run_folder import RunFolder

from .leaderboards.test_leaderboards import make_run

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "how-to" / "notebooks.md"
TRAINING = ROOT / "tests" / "data" / "v0.1" / "training"
HOSTILE = (
    '<script>alert(1)</script><img src=x onerror=alert(1)> $\\href{javascript:1}{x}$ \x1b[2J\u202egnp\n" onclick="x'
)
LARGEST = 100_000
"""Most characters of the HTML of these tests: 20 rows of some texts."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "first", 24, done=38)


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The interpreter that a notebook's kernel runs."""
    pytest.importorskip("IPython")
    from IPython.core.interactiveshell import InteractiveShell

    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    yield InteractiveShell.instance()
    InteractiveShell.clear_instance()


class Markup(HTMLParser):
    """The elements and attributes of a page, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.names: set[str] = set()
        self.styles: set[str] = set()
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.names |= {name for name, _ in attrs}
        self.styles |= {value or "" for name, value in attrs if name == "style"}

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


def safe(text: str) -> Markup:
    """The parsed HTML, which has only what this library writes, and no colours."""
    found = Markup(text)
    assert set(found.tags) <= {"div", "strong", "table", "thead", "tbody", "tr", "th", "td"}
    assert found.names <= {"class", "style"}
    assert all(re.fullmatch("vertical-align: top; text-align: (left|right)", style) for style in found.styles)
    assert len(text) < LARGEST
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]", found.text)
    return found


def shown(result: Any) -> Markup:
    return safe(result._repr_html_())


def damage(run: Path, **fields: Any) -> None:
    """Overwrite fields of the last result, which is not solved."""
    lines = (run / "results.jsonl").read_text().splitlines()
    lines[-1] = json.dumps(json.loads(lines[-1]) | fields)
    (run / "results.jsonl").write_text("\n".join(lines) + "\n")


def episode(**fields: Any) -> Episode:
    return Episode("t", "0" * 64, 0, 1, "agent", Outcome.FAILED, **fields)


# -- what is shown


def test_run_is_shown_with_scores_counts_and_first_episodes(run: Path) -> None:
    found = shown(clawgym.RunView(run))
    assert "bench 1: 38 of 40 episodes, incomplete: 2 have no result" in found.text
    assert "strict 63.2 [47, 77]" in found.text
    assert found.tags.count("tr") == 21
    assert "20 of 38 rows; to_pandas() has all" in found.text


def test_large_run_is_shown_in_part(tmp_path: Path) -> None:
    view = clawgym.RunView(make_run(tmp_path / "run", 9, tasks=3))
    row = view._folder.rows[0]
    about = view.manifest.tasks["t0"]
    view._folder.manifest = dataclasses.replace(view.manifest, tasks={f"t{n}": about for n in range(5_000)})
    view._folder.rows = [row | {"key": f"t{n}#0", "task_id": f"t{n}"} for n in range(5_000)]
    found = shown(view)
    assert found.tags.count("tr") == 21
    assert "20 of 5,000 rows" in found.text
    assert len(view.to_pandas()) == 5_000


def test_every_result_is_shown_and_becomes_a_frame(run: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "second", 30)
    (board,) = rank([load_entry(run), load_entry(other)])
    view = clawgym.RunView(run)
    for result in (view, view.summary, view.episode("t3"), view.compare(other), board, clawgym.load("terminal-basic")):
        assert "tr" in shown(result).tags
        for table in result._tables():
            frame = result.to_pandas(table)
            assert len(set(frame.columns)) == len(frame.columns)
        with pytest.raises(ValueError, match=f"choose '{next(iter(result._tables()))}'"):
            result.to_pandas("nothing")


def test_frames_have_the_numbers_of_the_run(run: Path, tmp_path: Path) -> None:
    view = clawgym.RunView(run)
    episodes, checks = view.to_pandas(), view.to_pandas("checks")
    summary = summarize(RunFolder.read(run))
    assert summary.scores.strict is not None
    assert episodes.strict.mean() == pytest.approx(summary.scores.strict.value)
    assert list(episodes.task) == [f"t{n}" for n in range(38)]
    assert checks.score.sum() == 24
    scores = view.summary.to_pandas().set_index("group")
    assert scores.loc["all", "strict_low"] == summary.scores.strict.low
    other = make_run(tmp_path / "second", 30)
    found = view.compare(other).to_pandas().set_index("score")
    assert found.loc["strict", "difference"] == compare(run, other).scores["strict"].value
    (board,) = rank([load_entry(run), load_entry(other)])
    assert list(board.to_pandas().run) == ["second", "first"]


def test_training_has_curves_and_evaluations() -> None:
    view = clawgym.RunView(TRAINING)
    metrics, scores = view.to_pandas(), view.to_pandas("evaluations")
    raw = [json.loads(line) for line in (TRAINING / "metrics.jsonl").read_text().splitlines()]
    assert list(metrics.step) == [row["step"] for row in raw]
    assert set(metrics.columns) >= {"step", "time"}
    assert set(scores.split) <= {"validation", "heldout", "train"}
    assert "evaluations" in shown(view).text
    with pytest.raises(RunFolderError, match="to_pandas\\('evaluations'\\)"):
        _ = view.summary


def test_pool_is_a_frame(tmp_path: Path) -> None:
    pytest.importorskip("sqlalchemy")
    from clawgym.pool import Pool

    from .pool.histories import chain, store

    with Pool(tmp_path / "pool.db") as pool:
        store(pool, chain(3, 4))
        store(pool, chain(4, 2), outcome=None)
        frame = pool.to_pandas()
        assert list(frame.n_turns) == [turns.n_turns for turns in pool.episodes()]
        assert len(pool.to_pandas(state="closed")) == 1
    assert "secret_sha256" not in frame.columns


def test_steps_of_all_episodes_are_one_table(run: Path) -> None:
    with RunFolder.open(run, RunFolder.read(run).manifest) as folder:
        task = folder.manifest.tasks["t39"]
        call = ToolCall("c1", "shell", {"command": "ls"})
        steps = (
            Step("user", "do", "2026-01-01T00:00:00Z"),
            Step("agent", "ok", "2026-01-01T00:00:01Z", (call,), (Observation("a.txt", "c1"),)),
        )
        folder.record(Episode("t39", task["hash"], 0, 1, "a", Outcome.FAILED, steps=steps))
    view = clawgym.RunView(run)
    frame = view.to_pandas("steps")
    assert list(frame.task) == ["t39", "t39"]
    names = ["step", "text", "calls", "arguments", "observations"]
    assert list(frame.iloc[1][names]) == [1, "ok", "shell", "ls", "a.txt"]
    assert view.episode("t39").to_pandas().equals(frame)


def test_frames_become_arrow_tables(run: Path) -> None:
    """``polars.from_pandas`` makes one first."""
    pyarrow = pytest.importorskip("pyarrow")
    for table in ("episodes", "checks", "steps"):
        frame = clawgym.RunView(run).to_pandas(table)
        assert pyarrow.Table.from_pandas(frame, preserve_index=False).column_names == list(frame.columns)


def test_message_names_the_extra_without_pandas(run: Path) -> None:
    code = f"import sys, clawgym; sys.modules['pandas'] = None; clawgym.RunView({str(run)!r}).to_pandas()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert f"{MissingDependency.__name__}: data frames need pandas" in done.stderr
    assert "pip install 'clawgym[notebook]'" in done.stderr
    code = f"import sys, clawgym; clawgym.RunView({str(run)!r})._repr_html_(); assert 'pandas' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# -- what others wrote


def test_hostile_texts_are_shown_as_text(tmp_path: Path, run: Path) -> None:
    task = Task(HOSTILE, HOSTILE, VerifierSpec("reward_sh", ()), metadata={"category": HOSTILE, "level": HOSTILE})
    tasks = TaskSet(HOSTILE, (task,), HOSTILE, {HOSTILE: HOSTILE}, HOSTILE)
    call = ToolCall(HOSTILE, HOSTILE, {HOSTILE: HOSTILE})
    steps = (Step("agent", HOSTILE, HOSTILE, (call,), (Observation(HOSTILE),), HOSTILE, HOSTILE),)
    one = dataclasses.replace(episode(cause=HOSTILE, error=HOSTILE, steps=steps, dropped=(HOSTILE,)), task_id=HOSTILE)
    damage(run, cause=HOSTILE, outcome="truncated", final_message=HOSTILE)
    view = clawgym.RunView(run)
    for result in (tasks, one, view, view.summary):
        found = shown(result)
        assert "<script>alert(1)</script>" in found.text
        assert "mathjax_ignore" in result._repr_html_()
    assert tasks.to_pandas().id[0] == HOSTILE


def test_long_texts_are_cut(tmp_path: Path) -> None:
    long = "<" * 10_000_000
    steps = (Step("agent", long, "", (ToolCall("1", long, {"a": long}),), (Observation(long),)),) * 50
    one = episode(steps=steps, cause=long, error=long, dropped=(long,) * 50)
    assert "20 of 50 rows" in shown(one).text
    frame = one.to_pandas()
    assert frame.text.str.len().max() < 21_000
    assert "9,980,000 characters left out" in frame.text[0]
    tasks = TaskSet(long, tuple(Task(f"{n}", long, VerifierSpec("reward_sh", ())) for n in range(100)))
    assert "20 of 100 rows" in shown(tasks).text


@pytest.mark.parametrize("name", ["receipt.json", "results.jsonl"])
def test_linked_files_are_not_read(run: Path, tmp_path: Path, name: str) -> None:
    (run / name).rename(tmp_path / "elsewhere")
    (run / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunFolderError, match="is a link"):
        clawgym.RunView(run)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_named_pipe_does_not_block(run: Path) -> None:
    (run / "results.jsonl").unlink()
    os.mkfifo(run / "results.jsonl")
    with pytest.raises(RunFolderError, match="not a regular file"):
        clawgym.RunView(run)


def test_linked_transcript_is_not_read(run: Path, tmp_path: Path) -> None:
    path = run / "episodes" / "t0.0" / "transcript.json"
    path.rename(tmp_path / "transcript.json")
    path.symlink_to(tmp_path / "transcript.json")
    one = clawgym.RunView(run).episode("t0")
    assert one.steps == ()
    assert "The transcript cannot be read: it is a link" in shown(one).text


def test_empty_run_is_shown(tmp_path: Path) -> None:
    view = clawgym.RunView(make_run(tmp_path / "run", 0, done=0))
    assert "0 of 40 episodes, incomplete: 40 have no result" in shown(view).text
    for table in ("episodes", "checks", "steps"):
        assert view.to_pandas(table).empty
    assert "task" in view.to_pandas().columns


def test_run_that_is_being_written_is_shown(run: Path) -> None:
    with (run / "results.jsonl").open("a") as file:
        file.write('{"key": "t39#0", "outc')
    assert "38 of 40 episodes" in shown(clawgym.RunView(run)).text


@pytest.mark.parametrize(
    "fields",
    [
        {"outcome": 3},
        {"result": [1]},
        {"result": {"checks": [1]}},
        {"usage": {"prompt_tokens": "x"}},
        {"usage": {"unknown": 1}},
        {"task_id": ["t0"]},
        {"seconds": {"agent": {}}},
        {"sample": "<b>"},
    ],
)
def test_damaged_results_are_a_message(run: Path, fields: dict[str, Any]) -> None:
    damage(run, **fields)
    assert "the results are damaged" in shown(clawgym.RunView(run)).text
    with pytest.raises(RunFolderError, match="restore them from a copy"):
        _ = clawgym.RunView(run).summary, clawgym.RunView(run).to_pandas()


def test_manifest_that_plans_too_much_is_a_message(run: Path) -> None:
    raw = json.loads((run / "receipt.json").read_text())
    (run / "receipt.json").write_text(json.dumps(raw | {"samples": 10**12}))
    with pytest.raises(RunFolderError, match="40 tasks are not 1 to 5,000,000 episodes"):
        clawgym.RunView(run)
    (run / "receipt.json").write_text(json.dumps(raw | {"tasks": [1]}))
    with pytest.raises(RunFolderError, match="field tasks: is no object"):
        clawgym.RunView(run)
    (run / "receipt.json").write_text(json.dumps(raw | {"config": [1]}))
    with pytest.raises(RunFolderError, match="the run manifest is damaged"):
        clawgym.RunView(run)
    (run / "receipt.json").write_text("[" * 100_000)
    with pytest.raises(RunFolderError, match="is damaged"):
        clawgym.RunView(run)


def test_other_folders_are_refused(tmp_path: Path, run: Path) -> None:
    for path in (tmp_path / "nothing", tmp_path, run / "receipt.json"):
        with pytest.raises(RunFolderError, match="give a run folder"):
            clawgym.RunView(path)
    raw = json.loads((run / "receipt.json").read_text())
    (run / "receipt.json").write_text(json.dumps(raw | {"kind": "audit"}))
    with pytest.raises(RunFolderError, match="a run of kind 'audit'"):
        clawgym.RunView(run)
    (run / "receipt.json").write_text(json.dumps(raw))
    with pytest.raises(RunFolderError, match="no episode nothing#0"):
        clawgym.RunView(run).episode("nothing")


def test_columns_of_hostile_metrics_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "receipt.json").write_bytes((TRAINING / "receipt.json").read_bytes())
    rows = [json.dumps({"step": n, f"m{n}": 1.0, "text": HOSTILE, "flag": True}) for n in range(100)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*rows, "damaged", ""]))
    view = clawgym.RunView(tmp_path)
    assert view.to_pandas().shape == (100, 102)
    assert "1 damaged lines of metrics.jsonl are left out" in shown(view).text
    monkeypatch.setattr("clawgym.trainers.common.answers._VALUES", 5_000)
    with pytest.raises(RunFolderError, match="more than 5,000 values"):
        view.to_pandas()


def test_html_has_as_many_columns_and_rows_as_it_says() -> None:
    table = frames.Table([f"c{n}" for n in range(50)], ([1.5] * 50 for _ in range(10**9)))
    text = frames._html(frames.Preview("many", ["line"] * 100, table, 10**9))
    found = safe(text)
    assert found.tags.count("th") == 16
    assert found.tags.count("td") == 16 * frames.MOST_ROWS
    assert found.text.count("line") == frames.MOST_ROWS


# -- IPython


def test_notebook_chooses_the_html(shell: Any, run: Path) -> None:
    view = clawgym.RunView(run)
    for result in (view, view.summary, view.episode("t1"), clawgym.load("terminal-basic")):
        data, _ = shell.display_formatter.format(result)
        assert data["text/html"] == result._repr_html_()
        assert len(data["text/plain"]) < 5_000
        assert "Task(" not in data["text/plain"]
        assert "Scores(" not in data["text/plain"]
    hostile = TaskSet(HOSTILE, ())
    data, _ = shell.display_formatter.format(hostile)
    assert "\x1b" not in data["text/plain"]
    assert "\u202e" not in data["text/plain"]


def test_page_runs_as_a_notebook(shell: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cells of the page, one after the other; each ends with something that a notebook shows as HTML."""
    import pandas

    make_run(tmp_path / "runs" / "first", 24)
    make_run(tmp_path / "runs" / "second", 30)
    monkeypatch.chdir(tmp_path)
    cells = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    assert len(cells) == 7
    for cell in cells:
        done = shell.run_cell(cell)
        done.raise_error()
        assert done.result is not None
        data, _ = shell.display_formatter.format(done.result)
        assert ("text/html" in data) is not isinstance(done.result, pandas.Series)  # pandas shows these as text


def test_tables_of_the_page_are_those_of_the_objects(run: Path) -> None:
    view = clawgym.RunView(run)
    (board,) = rank([load_entry(run)])
    objects = {
        "`RunView` of an evaluation": view,
        "`RunView` of a training": clawgym.RunView(TRAINING),
        "`Summary`": view.summary,
        "`Episode`": episode(),
        "`Comparison`": view.compare(run),
        "`Board`": board,
        "`TaskSet`": TaskSet("x", ()),
    }
    listed = re.findall(r"^\| (.*?) \| .* \| (.*) \|$", PAGE.read_text(), re.M)[1:]
    assert {name: re.findall("`(.*?)`", tables) for name, tables in listed} == {
        name: list(one._tables()) for name, one in objects.items()
    }


async def test_awaited_evaluation_is_shown(tmp_path: Path) -> None:
    """The Summary that a notebook awaits has the same look."""
    summary = await asyncio.to_thread(lambda: summarize(RunFolder.read(make_run(tmp_path / "run", 3, tasks=6))))
    assert "6 of 6 episodes, complete" in shown(summary).text
