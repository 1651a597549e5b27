"""``clawgym runs verify`` and ``clawgym runs compare`` as somebody meets them who got a run folder."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from clawgym.tasks import load, write

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs a sandbox")

PROGRAM = [sys.executable, "-c", "from clawgym.cli import main; main()"]


def clawgym(*words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PROGRAM, *map(str, words)], cwd=cwd, capture_output=True, text=True, timeout=170)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of eight tasks, and a run of ``sloppy`` on it."""
    place = tmp_path_factory.mktemp("place")
    write(load("terminal-basic", limit=8).tasks, place / "mine", "clawgym")
    done = clawgym("eval", "./mine", "--agent", "sloppy", "--out", "run", cwd=place)
    assert done.returncode == 0, done.stderr
    return place


def test_a_run_is_confirmed_without_being_told_where_its_tasks_are(place: Path) -> None:
    before = (place / "run" / "results.jsonl").read_bytes()
    done = clawgym("runs", "verify", "run", cwd=place)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() == "agrees: 8 same"
    assert (place / "run" / "results.jsonl").read_bytes() == before
    shown = clawgym("leaderboard", "show", "run", cwd=place).stdout
    assert "verified: 8 of 8" in shown


def test_one_edited_score_is_named_and_fails(place: Path) -> None:
    results = place / "run" / "results.jsonl"
    before = results.read_text()
    rows = [json.loads(line) for line in before.splitlines()]
    row = next(row for row in rows if row["result"]["official"] < 1)
    row["result"]["official"] = 1.0
    try:
        results.write_text("".join(json.dumps(row) + "\n" for row in rows))
        done = clawgym("runs", "verify", "run", cwd=place)
        assert done.returncode == 1
        lines = [line for line in done.stdout.splitlines() if line.startswith(row["key"])]
        assert "does not match its seal" in lines[0]
        assert "official 1 -> " in lines[1]
        raw = json.loads(clawgym("runs", "verify", "run", "--json", cwd=place).stdout)
        assert raw["counts"] == {"same": 7, "changed": 1}
        assert raw["agrees"] is False
    finally:
        results.write_text(before)


def test_a_changed_verifier_is_named_and_fails(place: Path) -> None:
    checker = sorted((place / "mine").glob("*/reward/check.py"))[0]
    before = checker.read_text()
    try:
        checker.write_text(before + "\n# one line more\n")
        done = clawgym("runs", "verify", "run", cwd=place)
        assert done.returncode == 1
        assert "same, but verifier changed" in done.stdout
    finally:
        checker.write_text(before)


def test_tasks_that_are_not_found_are_asked_for(place: Path, tmp_path: Path) -> None:
    done = clawgym("runs", "verify", place / "run", cwd=tmp_path)
    assert done.returncode == 2
    assert "--taskset" in done.stderr
    assert "Traceback" not in done.stderr
    assert clawgym("runs", "verify", place / "run", "--taskset", place / "mine", cwd=tmp_path).returncode == 0
    assert clawgym("runs", "verify", tmp_path, cwd=tmp_path).returncode == 2


def test_an_interruption_ends_with_130_and_the_same_command_goes_on(place: Path) -> None:
    words = [*PROGRAM, "runs", "verify", "run", "--concurrency", "1"]
    with subprocess.Popen(words, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("grading again: 1/8 episodes, ")
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out.splitlines()[-1].startswith("unfinished")
    assert "same command goes on" in out
    again = clawgym("runs", "verify", "run", cwd=place)
    assert again.returncode == 0
    assert again.stdout.strip() == "agrees: 8 same"
    assert re.match(r"Resuming: [1-8] of 8 episodes are already there\.\n", again.stderr), "all was done again"


def test_two_runs_are_compared(place: Path) -> None:
    done = clawgym("eval", "./mine", "--agent", "noop", "--out", "none", cwd=place)
    assert done.returncode == 0, done.stderr
    done = clawgym("runs", "compare", "none", "run", cwd=place)
    assert done.returncode == 0, done.stderr
    assert "8 tasks, paired" in done.stdout
    assert "80% power" in done.stdout
    raw = json.loads(clawgym("runs", "compare", "none", "run", "--json", cwd=place).stdout)
    assert raw["tasks"] == 8
    assert raw["scores"]["official"]["value"] > 0
    few = clawgym("eval", "./mine", "--agent", "noop", "--limit", "3", "--out", "few", cwd=place)
    assert few.returncode == 0
    refused = clawgym("runs", "compare", "few", "run", cwd=place)
    assert refused.returncode == 2
    assert "3 tasks in common" in refused.stderr
