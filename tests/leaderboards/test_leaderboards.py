from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from clawgym.cli.leaderboard import app
from clawgym.leaderboards import load_entry, rank, to_json, to_markdown
from clawgym.records import Episode, Outcome, Task, TaskSet, VerifierResult, VerifierSpec
from clawgym.records.run_folder import RunFolder, make_manifest


def make_run(
    path: Path,
    passes: int,
    *,
    tasks: int = 40,
    done: int | None = None,
    workspace: str = "/w",
    agent: str | None = None,
    executes: int = 0,
    tampered: int = 0,
    judged: int = 0,
) -> Path:
    """A run in which the first ``passes`` tasks are solved; the verifiers of the first ``executes`` run agent code."""
    specs = [VerifierSpec("reward_sh", (), executes_agent_code=how) for how in ("in_process", "subprocess", None)]
    kinds = [specs[0 if i == 0 else 1] if i < executes else specs[2] for i in range(tasks)]
    items = tuple(Task(f"t{i}", "do", kinds[i], workspace=workspace) for i in range(tasks))
    about = {"name": agent or path.name, "version": "1"}
    judges = {f"t{i}": "rubric (judge-1)" for i in range(judged)}
    manifest = make_manifest("eval", TaskSet("bench", items, "1"), agent=about, judged=judges)
    with RunFolder.open(path, manifest) as run:
        for n, task in enumerate(items[: tasks if done is None else done]):
            score = float(n < passes)
            result = VerifierResult(
                {"a": score}, score, score, None, verifier_hash=task.verifier.digest, tampered=n < tampered
            )
            outcome = Outcome.SOLVED if score else Outcome.FAILED
            run.record(Episode(task.id, task.content_hash, 0, 1, "a", outcome, result=result))
    return path


def ranks(*paths: Path, by: str = "strict") -> list[tuple[str, int | None]]:
    (board,) = rank([load_entry(path) for path in paths], by)
    return [(ranked.entry.name, ranked.rank) for ranked in board.entries]


def test_entries_with_overlapping_intervals_share_a_rank(tmp_path: Path):
    a, b = make_run(tmp_path / "a", 20), make_run(tmp_path / "b", 22)
    low, high = make_run(tmp_path / "low", 1), make_run(tmp_path / "high", 40)
    assert ranks(a, b, low, high) == [("high", 1), ("b", 2), ("a", 2), ("low", 4)]


def test_ranking_does_not_depend_on_argument_order(tmp_path: Path):
    paths = [make_run(tmp_path / name, passes) for name, passes in (("a", 9), ("b", 9), ("c", 35))]
    assert ranks(*paths) == ranks(*reversed(paths))


def test_other_task_contents_get_their_own_board(tmp_path: Path):
    boards = rank(
        [load_entry(make_run(tmp_path / "a", 5)), load_entry(make_run(tmp_path / "b", 9, workspace="/elsewhere"))]
    )
    assert [[ranked.entry.name for ranked in board.entries] for board in boards] == [["a"], ["b"]]
    assert boards[0].task_set_hash != boards[1].task_set_hash


def test_missing_and_tampered_episodes_are_flagged(tmp_path: Path):
    path = make_run(tmp_path / "a", 5, done=30, tampered=2)
    entry = load_entry(path)
    assert entry.flags == ("10 of 40 episodes missing", "tampered episodes: 2")
    boards = rank([entry])
    assert "10 of 40 episodes missing" in to_markdown(boards)
    assert to_json(boards)[0]["entries"][0]["flags"] == list(entry.flags)
    assert "10 of 40 episodes missing" in CliRunner().invoke(app, ["show", str(path)]).output


def test_tasks_that_run_agent_code_are_shown_separately(tmp_path: Path):
    entry = load_entry(make_run(tmp_path / "a", 5, executes=3))
    shown = {group.name: group.episodes for group in entry.excluded}
    assert shown == {"runs agent code (in process)": 1, "runs agent code (subprocess)": 2}
    boards = rank([entry])
    assert "could forge the result" in to_markdown(boards)
    assert to_json(boards)[0]["entries"][0]["executes_agent_code"].keys() == shown.keys()
    assert load_entry(make_run(tmp_path / "b", 5)).excluded == ()


def test_model_judged_tasks_are_marked_and_not_in_the_strict_score(tmp_path: Path):
    entry = load_entry(make_run(tmp_path / "a", 20, judged=20))
    assert entry.score("strict").value == 0
    assert entry.flags == ("judged by a model: 20 episodes, rubric (judge-1)",)
    assert entry.summary.judged == {"rubric (judge-1)": 20}
    boards = rank([entry])
    for shown in (to_markdown(boards), CliRunner().invoke(app, ["show", str(tmp_path / "a")]).output):
        assert "judged by a model" in " ".join(shown.split())
    assert to_json(boards)[0]["entries"][0]["judged"]["value"] == 1
    only = load_entry(make_run(tmp_path / "b", 40, judged=40))
    assert only.score("strict") is None
    assert ranks(tmp_path / "b", tmp_path / "a") == [("a", 1), ("b", None)]


def test_forgeable_tasks_are_not_in_the_strict_score(tmp_path: Path):
    forged = load_entry(make_run(tmp_path / "forged", 20, executes=20))  # every flagged task, no other
    assert forged.score("strict").value == 0
    assert forged.score("official").value == 0.5
    honest = load_entry(make_run(tmp_path / "honest", 40, executes=20))
    assert honest.score("strict").value == 1
    assert ranks(tmp_path / "forged", tmp_path / "honest") == [("honest", 1), ("forged", 2)]
    (board,) = rank([forged])
    assert to_json([board])[0]["entries"][0]["strict"]["value"] == 0


def test_set_of_forgeable_tasks_has_no_strict_rank(tmp_path: Path):
    make_run(tmp_path / "a", 40, executes=40)
    assert ranks(tmp_path / "a") == [("a", None)]
    assert ranks(tmp_path / "a", by="official") == [("a", 1)]


def edit(path: Path, change) -> None:
    file = path / "results.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    change(rows)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows[0].update(task_hash="0" * 64),
        lambda rows: rows[0]["result"].update(verifier_hash="0" * 64),
        lambda rows: rows.append(rows[0] | {"sample": 9, "key": "t0#9"}),
        lambda rows: rows.append(rows[0] | {"task_id": "new", "key": "new#0"}),
        lambda rows: rows[30].update(task_id="t0"),
    ],
)
def test_results_that_contradict_the_run_manifest_are_flagged(tmp_path: Path, change):
    path = make_run(tmp_path / "a", 5)
    assert load_entry(path).flags == ()
    edit(path, change)
    assert any("contradict the run manifest: 1" in flag for flag in load_entry(path).flags)


def test_stored_summary_is_ignored(tmp_path: Path):
    path = make_run(tmp_path / "a", 5)
    (path / "summary.json").write_text('{"scores": {"strict": {"value": 1.0}}}')
    score = load_entry(path).score("strict")
    assert score is not None
    assert score.value == 5 / 40


def test_no_rank_by_adjusted_score_without_baselines(tmp_path: Path):
    assert ranks(make_run(tmp_path / "a", 5), by="corrected") == [("a", None)]
    with pytest.raises(ValueError, match="choose one of strict"):
        rank([], "best")


def test_names_are_escaped_in_markdown(tmp_path: Path):
    evil = "x | 99 | <script>alert(1)</script>\n| [link](javascript:1)"
    text = to_markdown(rank([load_entry(make_run(tmp_path / "a", 5, agent=evil))]))
    line = next(line for line in text.splitlines() if "alert" in line)
    assert line.replace("\\|", "").count("|") == 12
    assert "<script" not in line.replace("\\<", "")


def test_command_prints_json(tmp_path: Path):
    result = CliRunner().invoke(app, ["show", str(make_run(tmp_path / "a", 5)), "--json"])
    assert json.loads(result.output)[0]["entries"][0]["strict"]["value"] == 0.125


def test_board_shows_percentages_and_verification(tmp_path: Path):
    path = make_run(tmp_path / "a", 10)
    with RunFolder.open(path, RunFolder.read(path).manifest) as run:
        task = Task("t0", "do", VerifierSpec("reward_sh", ()), workspace="/w")
        for _ in range(20):
            run.record(Episode(task.id, task.content_hash, 0, 1, "a", Outcome.INFRA, cause="fork"))
    entry = load_entry(path)
    board = rank([entry, dataclasses.replace(entry, name="checked", verified="40 of 40")])[0]
    shown = to_json([board])[0]["entries"]
    assert [row["verified"] for row in shown] == [None, "40 of 40"]
    text = to_markdown([board])
    cells = next(line.replace("\\", "").split(" | ") for line in text.splitlines() if line.startswith("| 1 | a"))
    assert entry.score("strict").value == 9 / 39  # the last attempt at one of ten has no result
    assert "23.1 [12.6, 38.3]" in cells
    assert "33.3%" in cells
    assert f"bench 1 ({board.task_set_hash[:12]}), ranked by strict score" in text
    out = CliRunner().invoke(app, ["show", str(path)]).output
    head = next(line for line in out.splitlines() if "agent" in line)
    assert re.findall(r"\w+", head) == ["rank", "agent", "strict", "adjusted", "official", "k"]
