"""Boards: their folder, submissions by pull request, ranks by paired differences, and the site."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from clawgym.cli import app
from clawgym.leaderboards import load_entry, rank
from clawgym.leaderboards.boards import BoardFolder, LeaderboardError, submit
from clawgym.leaderboards.ranking import better
from clawgym.leaderboards.site import build

from .test_leaderboards import make_run

PUBLISHED = Path(__file__).parents[2] / "examples" / "leaderboard"
NAMES = ["noop", "oracle", "sloppy", "tiny-rewarded", "tiny-trained", "tiny-untrained"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(PUBLISHED, tmp_path / "board"))


def clawgym(*words: str | Path) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def git(folder: Path, *words: str) -> str:
    who = {f"GIT_{who}_{what}": "x@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    env = {**os.environ, **who, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    done = subprocess.run(["git", "-C", str(folder), *words], env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit(folder: Path) -> str:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "x")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def repository(folder: Path) -> tuple[Path, str]:
    """A board in git, with one entry held back, and its commit."""
    shutil.move(folder / "entries" / "tiny-trained", folder.parent / "held-back")
    (folder / "checks" / "tiny-trained.json").unlink()
    git(folder, "init", "--quiet")
    return folder, commit(folder)


# -- the published board


def test_published_entries_are_checked_and_ranked(folder: Path) -> None:
    board = BoardFolder.read(folder)
    assert board.names == NAMES
    for name in NAMES:
        record = board.record(name)
        assert record is not None, name
        assert record["accepted"] is True
    (ranked,) = rank([load_entry(board.entry(name)) for name in NAMES], "strict")
    ranks = {one.entry.run: one.rank for one in ranked.entries}
    assert ranks["oracle"] == 1
    assert ranks["tiny-trained"] < ranks["tiny-untrained"] == ranks["noop"]
    assert len(board.tasks()) == 24


def test_record_of_other_content_is_not_shown(folder: Path) -> None:
    board = BoardFolder.read(folder)
    receipt = folder / "entries" / "sloppy" / "receipt.json"
    receipt.write_text(receipt.read_text() + "\n")
    assert board.record("sloppy") is None
    out = clawgym("leaderboard", "show", folder).output
    assert "sloppy: not checked" in out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task_set_hash": "0" * 64}, "content hash"),
        ({"share": 2}, "share"),
        ({"more": 1}, "more"),
        ({"task_set": "no-such-set"}, "cannot be loaded"),
    ],
)
def test_board_with_wrong_rules_is_refused(folder: Path, change: dict[str, Any], message: str) -> None:
    rules = json.loads((folder / "board.json").read_text())
    (folder / "board.json").write_text(json.dumps(rules | change))
    with pytest.raises(LeaderboardError, match=message):
        BoardFolder.read(folder).tasks()


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "", "A", "x" * 65])
def test_entry_names_stay_below_the_board(folder: Path, name: str) -> None:
    with pytest.raises(LeaderboardError, match="cannot name an entry"):
        BoardFolder.read(folder).entry(name)


# -- submissions


def test_submission_has_only_what_a_check_reads(folder: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 3, tasks=4)
    (run / "notes.txt").write_text("mine")
    made = submit(run, BoardFolder.read(folder), "mine")
    names = {path.relative_to(made).as_posix() for path in made.rglob("*") if path.is_file()}
    assert {name.rpartition("/")[2] for name in names} == {"receipt.json", "results.jsonl", "transcript.json"}
    with pytest.raises(LeaderboardError, match="choose another --entry"):
        submit(run, BoardFolder.read(folder), "mine")


def test_submission_with_a_secret_is_refused(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("detect_secrets")
    run = make_run(tmp_path / "run", 3, tasks=4)
    path = next(run.rglob("transcript.json"))
    path.write_text(path.read_text().replace('"message": ""', f'"message": "hf_{"aB3" * 11}"', 1))
    with pytest.raises(LeaderboardError, match="looks like a Hugging Face token"):
        submit(run, BoardFolder.read(folder), "mine")
    assert not (folder / "entries" / "mine").exists()


def workflow_command() -> str:
    """The command of the published workflow that checks a pull request."""
    raw = yaml.safe_load((PUBLISHED / ".github/workflows/check.yml").read_text())
    (step,) = [step for step in raw["jobs"]["check"]["steps"] if "leaderboard check" in step.get("run", "")]
    assert step["env"] == {"BASE": "${{ github.event.pull_request.base.sha }}"}
    assert raw["permissions"] == {"contents": "read"}
    assert "pull_request_target" not in raw[True]  # YAML 1.1 reads the key `on` as true
    return step["run"]


def run_workflow(folder: Path, base: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "BASE": base, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.run(
        ["bash", "-c", workflow_command()], cwd=folder, env=env, capture_output=True, text=True, timeout=170
    )


def test_workflow_accepts_an_honest_pull_request(repository: tuple[Path, str]) -> None:
    folder, base = repository
    shutil.move(folder.parent / "held-back", folder / "entries" / "tiny-trained")
    commit(folder)
    done = run_workflow(folder, base)
    if "namespace" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tiny-trained: accepted" in done.stdout
    assert "that the named model produced the text" in done.stdout
    assert "oracle: accepted" not in done.stdout  # was there before


def test_workflow_refuses_a_forged_pull_request(repository: tuple[Path, str]) -> None:
    folder, base = repository
    entry = folder / "entries" / "tiny-trained"
    shutil.move(folder.parent / "held-back", entry)
    lines = (entry / "results.jsonl").read_text().splitlines(keepends=True)
    (entry / "results.jsonl").write_text("".join(line for line in lines if '"outcome":"solved"' in line))
    commit(folder)
    done = run_workflow(folder, base)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "VIOLATED  counts" in done.stdout


@pytest.mark.parametrize(
    "path",
    [
        *("board.json", "tasks.jsonl", ".github/workflows/check.yml", "checks/mine.json", "entries/mine"),
        *("entries/oracle/results.jsonl", "entries/oracle/episodes/new.0/transcript.json", "entries/A B/receipt.json"),
    ],
)
def test_pull_request_may_only_add_an_entry(repository: tuple[Path, str], path: str) -> None:
    folder, base = repository
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    before = (folder / path).read_text() if (folder / path).exists() else "{}"
    (folder / path).write_text(before + "\n")
    commit(folder)
    done = clawgym("leaderboard", "check", folder, "--since", base)
    assert isinstance(done.exception, LeaderboardError)
    assert "a submission only adds files" in str(done.exception)


def test_deleted_entry_is_refused(repository: tuple[Path, str]) -> None:
    folder, base = repository
    shutil.rmtree(folder / "entries" / "noop")
    commit(folder)
    done = clawgym("leaderboard", "check", folder, "--since", base)
    assert "a submission only adds files" in str(done.exception)


# -- ranks


def test_paired_difference_decides_where_intervals_overlap(tmp_path: Path) -> None:
    """20 and 29 of 40 solved: the intervals overlap, and the second solves all that the first does and nine more."""
    a, b = (load_entry(make_run(tmp_path / name, passes)) for name, passes in (("a", 20), ("b", 29)))
    high, low = b.score("strict"), a.score("strict")
    assert high is not None
    assert low is not None
    assert high.overlaps(low)
    assert better(b, a, "strict")
    assert not better(a, b, "strict")
    assert [one.rank for one in rank([a, b])[0].entries] == [1, 2]


def test_few_tasks_are_ranked_by_their_intervals(tmp_path: Path) -> None:
    a, b = (load_entry(make_run(tmp_path / name, passes, tasks=4)) for name, passes in (("a", 0), ("b", 4)))
    assert better(b, a, "strict") is (b.score("strict").low > a.score("strict").high)  # type: ignore[union-attr]


def test_forgeable_tasks_do_not_count_in_a_paired_difference(tmp_path: Path) -> None:
    a, b = load_entry(make_run(tmp_path / "a", 0, executes=20)), load_entry(make_run(tmp_path / "b", 20, executes=20))
    assert not better(b, a, "strict")
    assert better(b, a, "official")


# -- the site


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [str(value) for name, value in attrs if name in ("href", "src", "action", "data")]


def test_site_has_matrix_costs_and_history(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "site"
    done = clawgym("leaderboard", "build", folder, "--out", out)
    assert done.exit_code == 0, done.exception
    text = (out / "index.html").read_text()
    page = Page(text)
    assert "script" not in page.tags
    assert page.tags.count("svg") == 1
    assert all((out / address).is_file() for address in page.addresses)
    for shown in ("tokens / solved", "Models and agents", "History", "best so far", "tiny-trained", "checked"):
        assert shown in text
    assert json.loads((out / "board.json").read_text())[0]["entries"][0]["agent"] == "oracle"
    assert "that the named model produced the text" in (out / "entries" / "tiny-trained.html").read_text()


def test_site_shows_hostile_names_as_text(folder: Path, tmp_path: Path) -> None:
    receipt = folder / "entries" / "noop" / "receipt.json"
    raw = json.loads(receipt.read_text())
    evil = '<script>alert(1)</script><img src=x onerror=alert(2)>" onload="x'
    raw["agent"] |= {"name": evil, "version": evil}
    raw["engine"]["model"] = raw["created"] = raw["library"] = evil
    raw["isolation"]["tier"] = evil
    receipt.write_text(json.dumps(raw))
    (folder / "checks" / "noop.json").write_text(json.dumps({"digest": "x", "accepted": True}))
    build(BoardFolder.read(folder), tmp_path / "site")
    for path in (tmp_path / "site").rglob("*.html"):
        tags = Page(path.read_text()).tags
        assert not {"script", "img"} & set(tags), path
        assert "default-src 'none'" in path.read_text()


def test_refused_and_damaged_entries_have_no_rank(folder: Path, tmp_path: Path) -> None:
    record = json.loads((folder / "checks" / "sloppy.json").read_text())
    (folder / "checks" / "sloppy.json").write_text(json.dumps(record | {"accepted": False}))
    (folder / "entries" / "noop" / "receipt.json").write_text("{")
    (folder / "entries" / "tiny-untrained" / "results.jsonl").write_text('{"key": "a"}\n')
    build(BoardFolder.read(folder), tmp_path / "site")
    text = (tmp_path / "site" / "index.html").read_text()
    unranked = text.split("<h2>Not ranked</h2>")[1]
    assert "refused by the check" in unranked
    assert "noop" in unranked
    assert {"oracle", "tiny-trained"} <= {
        one["run"] for one in json.loads((tmp_path / "site" / "board.json").read_text())[0]["entries"]
    }
    assert "sloppy" not in [
        one["run"] for one in json.loads((tmp_path / "site" / "board.json").read_text())[0]["entries"]
    ]


def test_damaged_record_does_not_stop_the_site(folder: Path, tmp_path: Path) -> None:
    digest = json.loads((folder / "checks" / "noop.json").read_text())["digest"]
    (folder / "checks" / "noop.json").write_text(json.dumps({"digest": digest, "accepted": True, "rules": 7}))
    build(BoardFolder.read(folder), tmp_path / "site")
    assert "This entry was not checked" in (tmp_path / "site" / "entries" / "noop.html").read_text()
