"""Entries whose authors cheat, checked in real sandboxes.

Each attack makes a better entry of the honest one. Most are not noticed by `clawgym leaderboard show RUN`, which only
ranks.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym.errors import SandboxUnavailable
from clawgym.leaderboards import load_entry
from clawgym.leaderboards.boards import BoardFolder, LeaderboardError
from clawgym.leaderboards.check import UNPROVEN, EntryCheck, check_entry, draw
from clawgym.records.run_folder import RunFolder, checksum_of
from clawgym.sandbox import backend as make_backend

PUBLISHED = Path(__file__).parents[2] / "examples" / "leaderboard"
Rows = list[dict[str, Any]]

_shared: dict[str, Any] = {}


@pytest.fixture(scope="module", autouse=True)
def _backend() -> Iterator[None]:
    """One loop and one backend for the module."""
    with asyncio.Runner() as runner:
        made = make_backend("namespace")
        _shared.update(runner=runner, backend=made)
        try:
            runner.run(made.probe())
            yield
        except SandboxUnavailable as error:
            pytest.skip(f"namespace: {error}")
        finally:
            runner.run(made.aclose())


@pytest.fixture
def board(tmp_path: Path) -> BoardFolder:
    """The published board, which grades everything again."""
    path = Path(shutil.copytree(PUBLISHED, tmp_path / "board"))
    shutil.rmtree(path / "entries")
    shutil.copytree(PUBLISHED / "entries" / "oracle", path / "entries" / "oracle")
    rules = json.loads((path / "board.json").read_text()) | {"share": 1.0}
    (path / "board.json").write_text(json.dumps(rules))
    return BoardFolder.read(path)


@pytest.fixture
def entry(board: BoardFolder) -> Path:
    """An honest entry of a small model."""
    return Path(shutil.copytree(PUBLISHED / "entries" / "tiny-trained", board.path / "entries" / "mine"))


def check(board: BoardFolder, entry: Path, **options: Any) -> EntryCheck:
    return _shared["runner"].run(check_entry(entry, board, board.tasks(), _shared["backend"], **options))


def violated(found: EntryCheck) -> dict[str, str]:
    return {rule.rule: rule.text for rule in found.rules if not rule.passed}


def rows_of(entry: Path) -> Rows:
    return [json.loads(line) for line in (entry / "results.jsonl").read_text().splitlines()]


def write_rows(entry: Path, rows: Rows, *, seal: bool = True) -> None:
    for row in rows:
        if seal:
            row["seal"] = checksum_of(row)
    (entry / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def manifest_of(entry: Path, change: Callable[[dict[str, Any]], object]) -> None:
    raw = json.loads((entry / "receipt.json").read_text())
    change(raw)
    (entry / "receipt.json").write_text(json.dumps(raw))


def failed(rows: Rows) -> Rows:
    return [row for row in rows if row["outcome"] != "solved"]


def solve(row: dict[str, Any]) -> None:
    """Make a row say that its task is solved."""
    row["outcome"], row["cause"] = "solved", None
    checks = dict.fromkeys(row["result"]["checks"], 1.0)
    row["result"] |= {"checks": checks, "strict": 1.0, "official": 1.0, "corrected": 1.0, "cause": None}


def place(entry: Path, row: dict[str, Any]) -> Path:
    return RunFolder.read(entry).episode_folder(row["task_id"], row["sample"])


def transcript(entry: Path, row: dict[str, Any], change: Callable[[dict[str, Any]], object]) -> None:
    """Change a transcript, and the digest in its row."""
    path = place(entry, row) / "transcript.json"
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))
    row["files"]["transcript.json"] = hashlib.sha256(path.read_bytes()).hexdigest()


def claim_solved(entry: Path, row: dict[str, Any]) -> None:
    """Make a row and its transcript say that the task is solved."""
    solve(row)
    transcript(entry, row, lambda raw: raw["extra"]["clawgym"].update(outcome="solved"))
    raw = json.loads((place(entry, row) / "transcript.json").read_text())
    if "cause" in raw["extra"]["clawgym"]:
        transcript(entry, row, lambda raw: raw["extra"]["clawgym"].pop("cause"))


# -- attacks; each returns nothing and leaves a better entry


def edited_scores(entry: Path) -> None:
    rows = rows_of(entry)
    for row in failed(rows):
        solve(row)
    write_rows(entry, rows, seal=False)


def resealed_scores(entry: Path) -> None:
    rows = rows_of(entry)
    for row in failed(rows):
        solve(row)
    write_rows(entry, rows)


def resealed_scores_and_transcripts(entry: Path) -> None:
    rows = rows_of(entry)
    for row in failed(rows):
        claim_solved(entry, row)
    write_rows(entry, rows)


def one_resealed_score_and_transcript(entry: Path) -> None:
    rows = rows_of(entry)
    claim_solved(entry, failed(rows)[0])
    write_rows(entry, rows)


def swapped_workspaces(entry: Path) -> None:
    """The workspaces of an agent that solved the tasks."""
    rows = rows_of(entry)
    for row in failed(rows):
        theirs = place(PUBLISHED / "entries" / "oracle", row) / "workspace.tar.gz"
        shutil.copy(theirs, place(entry, row) / "workspace.tar.gz")
        row["files"]["workspace.tar.gz"] = hashlib.sha256(theirs.read_bytes()).hexdigest()
        claim_solved(entry, row)
    write_rows(entry, rows)


def swapped_workspaces_and_tool_names(entry: Path) -> None:
    """Also the tool calls have names that cannot be replayed."""
    swapped_workspaces(entry)
    rows = rows_of(entry)
    for row in rows:
        transcript(
            entry,
            row,
            lambda raw: [
                call.update(function_name="exec") for step in raw["steps"] for call in step.get("tool_calls") or ()
            ],
        )
    write_rows(entry, rows)


def dropped_failures(entry: Path) -> None:
    write_rows(entry, [row for row in rows_of(entry) if row["outcome"] == "solved"])


def dropped_tasks(entry: Path) -> None:
    """The failed tasks are not in the run manifest either."""
    dropped_failures(entry)
    kept = {row["task_id"] for row in rows_of(entry)}
    manifest_of(entry, lambda raw: raw.update(tasks={t: a for t, a in raw["tasks"].items() if t in kept}))


def duplicate_tasks(entry: Path) -> None:
    """A solved task takes the place of each failed one."""
    rows = rows_of(entry)
    solved = next(row for row in rows if row["outcome"] == "solved")
    bad = {row["task_id"] for row in failed(rows)}
    copies = [{**solved, "task_id": t, "key": f"{t}#0"} for t in bad]
    write_rows(entry, [row for row in rows if row["task_id"] not in bad] + copies)

    def change(raw: dict[str, Any]) -> None:
        for task in bad:
            raw["tasks"][task] = raw["tasks"][solved["task_id"]]

    manifest_of(entry, change)


def forged_tokens(entry: Path) -> None:
    rows = rows_of(entry)
    for row in rows:
        row["usage"] |= {"prompt_tokens": 1, "completion_tokens": 1}
    write_rows(entry, rows)


def forged_tokens_in_transcripts(entry: Path) -> None:
    forged_tokens(entry)
    rows = rows_of(entry)
    for row in rows:
        transcript(
            entry,
            row,
            lambda raw: raw["final_metrics"].update(total_prompt_tokens=1, total_completion_tokens=1),
        )
    write_rows(entry, rows)


def failures_as_infrastructure_errors(entry: Path) -> None:
    """Each failed episode was tried again until it was solved; here ten times."""
    rows = rows_of(entry)
    names = ("key", "task_id", "task_hash", "sample", "seed", "finished")
    tries = [
        {name: row[name] for name in names} | {"outcome": "infra", "cause": "the endpoint answered 500"}
        for row in rows
        for _ in range(10)
    ]
    write_rows(entry, tries + rows)


def failures_as_infrastructure_errors_at_last(entry: Path) -> None:
    rows = rows_of(entry)
    for row in failed(rows):
        row.update(outcome="infra", cause="the endpoint answered 500", fault="endpoint", result=None)
    write_rows(entry, rows)


def failures_as_unsupported(entry: Path) -> None:
    rows = rows_of(entry)
    for row in failed(rows):
        row.update(outcome="unsupported", cause="no network here", result=None)
    write_rows(entry, rows)


def other_verifier(entry: Path) -> None:
    rows = rows_of(entry)
    for row in rows:
        solve(row)
        row["result"]["verifier_hash"] = "7" * 64
    write_rows(entry, rows)
    manifest_of(entry, lambda raw: [about.update(verifier="7" * 64) for about in raw["tasks"].values()])


def other_mode(entry: Path) -> None:
    """A result of the running sandbox cannot be graded again."""
    rows = rows_of(entry)
    for row in failed(rows):
        claim_solved(entry, row)
        row["result"]["mode"] = "live"
    write_rows(entry, rows)


def judged_tasks(entry: Path) -> None:
    """What a model judged cannot be graded again."""
    rows = rows_of(entry)
    for row in failed(rows):
        claim_solved(entry, row)
        row["result"]["judged_by"] = "rubric (kind-model)"
    write_rows(entry, rows)


def score_without_grading(entry: Path) -> None:
    """A broken sandbox scores 0 without a grading; here it scores more."""
    rows = rows_of(entry)
    for row in failed(rows):
        row["result"] |= {"cause": "disk-full", "checks": {}, "seconds": 0.0, "official": 1.0, "strict": 0.0}
        row["result"]["corrected"] = None
        row["result"]["floor"] = None
    write_rows(entry, rows)


def raised_limits(entry: Path) -> None:
    manifest_of(entry, lambda raw: raw["config"].update(limits={"max_steps": 10_000}))


def other_task_contents(entry: Path) -> None:
    manifest_of(entry, lambda raw: [about.update(hash="1" * 64) for about in raw["tasks"].values()])


def chosen_seeds(entry: Path) -> None:
    rows = rows_of(entry)
    for row in rows:
        row["seed"] = 12345
        transcript(entry, row, lambda raw: raw["extra"]["clawgym"].update(seed=12345))
    write_rows(entry, rows)


def reads_the_answer(entry: Path) -> None:
    rows = rows_of(entry)
    row = next(row for row in rows if row["outcome"] == "solved")

    def change(raw: dict[str, Any]) -> None:
        step = next(step for step in raw["steps"] if step["source"] == "agent")
        step.setdefault("tool_calls", []).append(
            {"tool_call_id": "peek", "function_name": "bash", "arguments": {"command": "cat /verifier/check.py"}}
        )

    transcript(entry, row, change)
    row["tool_calls"] += 1
    write_rows(entry, rows)


def copied_entry(entry: Path) -> None:
    """The entry of somebody else under another name."""
    for path in entry.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copytree(PUBLISHED / "entries" / "oracle", entry, dirs_exist_ok=True)
    manifest_of(entry, lambda raw: raw["engine"].update(model="our-new-model"))


def no_transcripts(entry: Path) -> None:
    for path in entry.rglob("transcript.json"):
        path.unlink()


def no_workspaces(entry: Path) -> None:
    for path in entry.rglob("workspace.tar.gz"):
        path.unlink()


def scores_above_one(entry: Path) -> None:
    rows = rows_of(entry)
    for row in rows:
        row["result"]["official"] = 1e9
    write_rows(entry, rows)


ATTACKS: dict[Callable[[Path], None], tuple[str, bool]] = {
    edited_scores: ("rows", True),
    resealed_scores: ("transcripts", False),
    resealed_scores_and_transcripts: ("grading again", False),
    one_resealed_score_and_transcript: ("grading again", False),
    swapped_workspaces: ("replay", False),
    swapped_workspaces_and_tool_names: ("replay", False),
    dropped_failures: ("counts", True),
    dropped_tasks: ("tasks", False),
    duplicate_tasks: ("tasks", False),
    forged_tokens: ("transcripts", False),
    forged_tokens_in_transcripts: ("transcripts", False),
    failures_as_infrastructure_errors: ("infrastructure", False),
    failures_as_infrastructure_errors_at_last: ("counts", True),
    failures_as_unsupported: ("counts", True),
    other_verifier: ("tasks", False),
    other_mode: ("rows", False),
    judged_tasks: ("rows", True),
    score_without_grading: ("rows", False),
    raised_limits: ("tasks", False),
    other_task_contents: ("tasks", True),
    chosen_seeds: ("rows", False),
    reads_the_answer: ("scan", False),
    copied_entry: ("transcripts", False),
    no_transcripts: ("transcripts", False),
    no_workspaces: ("workspaces", False),
    scores_above_one: ("schema", False),
}
"""Attack -> the rule that finds it, and whether the plain ranking shows a flag."""


def test_honest_entry_is_accepted_and_says_what_is_not_proven(board: BoardFolder, entry: Path) -> None:
    before = {path: path.read_bytes() for path in entry.rglob("*") if path.is_file()}
    found = check(board, entry)
    assert violated(found) == {}
    assert found.accepted
    assert {rule.rule for rule in found.rules} >= {"schema", "tasks", "counts", "scan", "grading again", "replay"}
    assert found.unproven == UNPROVEN
    assert len(found.drawn) > 8
    assert {path: path.read_bytes() for path in entry.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_attack_is_found(board: BoardFolder, entry: Path, attack: Callable[[Path], None]) -> None:
    rule, flagged = ATTACKS[attack]
    attack(entry)
    assert bool(load_entry(entry).flags) is flagged
    found = check(board, entry)
    assert rule in violated(found), found.rules
    assert not found.accepted


@pytest.mark.parametrize("name", ["link", "foreign", "folder", "fifo"])
def test_strange_files_of_an_entry_are_refused(board: BoardFolder, entry: Path, name: str, tmp_path: Path) -> None:
    import os

    target = entry / "episodes" / "x.0"
    target.mkdir()
    if name == "link":
        (target / "transcript.json").symlink_to("/etc/passwd")
    elif name == "foreign":
        (target / "payload.py").write_text("import os")
    elif name == "folder":
        (tmp_path / "there").mkdir()
        (entry / "pictures").symlink_to(tmp_path / "there")
    else:
        os.mkfifo(target / "transcript.json")
    with pytest.raises(LeaderboardError):
        check(board, entry)


def test_findings_of_the_scan_can_be_accepted_with_a_reason(board: BoardFolder, entry: Path) -> None:
    reads_the_answer(entry)
    found = check(board, entry)
    assert "verifier" in violated(found)["scan"]
    assert dataclasses.replace(found, reviewed="it looked for the tests of the repository").accepted
    resealed_scores(entry)
    assert not check(board, entry, reviewed="fine").accepted


def test_hostile_texts_are_shown_escaped(board: BoardFolder, entry: Path) -> None:
    rows = rows_of(entry)
    rows[0]["key"] = rows[0]["task_id"] = "\x1b[2J" + "x" * 150
    write_rows(entry, rows)
    found = check(board, entry)
    assert "\x1b" not in json.dumps(found.to_dict(), ensure_ascii=False)
    assert not found.accepted


def test_the_same_nonce_repeats_a_check(board: BoardFolder, entry: Path) -> None:
    rules = board.rules.model_copy(update={"share": 0.01})
    board = BoardFolder(board.path, rules)
    first = check(board, entry)
    assert len(first.drawn) == 8
    again = check(board, entry, nonce=first.nonce)
    assert (again.drawn, again.digest) == (first.drawn, first.digest)
    assert "would miss" in first.unproven[-1]


def test_the_draw_depends_on_content_and_nonce() -> None:
    keys = [f"t{n}#0" for n in range(100)]
    draws = {tuple(draw(keys, 0.1, digest, nonce)) for digest in "abcdefgh" for nonce in "12345678"}
    assert len(draws) == 64
    assert draw(keys, 0.1, "a", "1") == draw(keys[::-1], 0.1, "a", "1")


@given(st.integers(0, 60), st.floats(0.01, 1), st.text(max_size=5))
def test_the_draw_has_the_share_and_at_least_eight(count: int, share: float, nonce: str) -> None:
    keys = [f"t{n}#0" for n in range(count)]
    drawn = draw(keys, share, "d", nonce)
    assert len(set(drawn)) == len(drawn)
    assert set(drawn) <= set(keys)
    assert len(drawn) >= min(count, 8, max(1, count))
    assert len(drawn) >= share * count - 1


def test_an_author_cannot_choose_what_is_drawn() -> None:
    """With a digest alone, an author would change a byte until the forged episode is not drawn."""
    keys = [f"t{n}#0" for n in range(100)]
    ground = next(
        d
        for d in map(str, range(1000))
        if "t0#0" not in draw(keys, 0.5, d, "") and "t1#0" not in draw(keys, 0.5, d, "")
    )
    found = sum("t0#0" in draw(keys, 0.5, ground, str(nonce)) for nonce in range(400))
    assert 150 < found < 250
