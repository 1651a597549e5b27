"""``clawgym runs verify`` and ``clawgym runs compare`` as commands, on a run folder."""

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
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of eight tasks, and a run of ``sloppy`` on it."""
    folder = tmp_path_factory.mktemp("folder")
    write(load("terminal-basic", limit=8).tasks, folder / "mine", "clawgym")
    done = clawgym("eval", "./mine", "--agent", "sloppy", "--out", "run", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_run_is_verified_without_naming_its_task_set(folder: Path) -> None:
    before = (folder / "run" / "results.jsonl").read_bytes()
    done = clawgym("runs", "verify", "run", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() == "verified: 8 of 8 results reproduced"
    assert (folder / "run" / "results.jsonl").read_bytes() == before
    shown = clawgym("leaderboard", "show", "run", cwd=folder).stdout
    assert "verified: 8 of 8" in shown


def test_edited_score_is_reported_with_exit_status_1(folder: Path) -> None:
    results = folder / "run" / "results.jsonl"
    before = results.read_text()
    rows = [json.loads(line) for line in before.splitlines()]
    row = next(row for row in rows if row["result"]["official"] < 1)
    row["result"]["official"] = 1.0
    try:
        results.write_text("".join(json.dumps(row) + "\n" for row in rows))
        done = clawgym("runs", "verify", "run", cwd=folder)
        assert done.returncode == 1
        lines = [line for line in done.stdout.splitlines() if line.startswith(row["key"])]
        assert "does not match its checksum" in lines[0]
        assert "official 1 -> " in lines[1]
        raw = json.loads(clawgym("runs", "verify", "run", "--json", cwd=folder).stdout)
        assert raw["counts"] == {"same": 7, "changed": 1}
        assert raw["agrees"] is False
    finally:
        results.write_text(before)


def test_changed_verifier_is_reported_with_exit_status_1(folder: Path) -> None:
    checker = sorted((folder / "mine").glob("*/reward/check.py"))[0]
    before = checker.read_text()
    try:
        checker.write_text(before + "\n# one line more\n")
        done = clawgym("runs", "verify", "run", cwd=folder)
        assert done.returncode == 1
        assert "reproduced, but verifier changed" in done.stdout
    finally:
        checker.write_text(before)


def test_missing_task_set_asks_for_taskset_option(folder: Path, tmp_path: Path) -> None:
    done = clawgym("runs", "verify", folder / "run", cwd=tmp_path)
    assert done.returncode == 2
    assert "--taskset" in done.stderr
    assert "Traceback" not in done.stderr
    assert clawgym("runs", "verify", folder / "run", "--taskset", folder / "mine", cwd=tmp_path).returncode == 0
    assert clawgym("runs", "verify", tmp_path, cwd=tmp_path).returncode == 2


def test_interrupted_verification_exits_with_130_and_resumes(folder: Path) -> None:
    words = [*PROGRAM, "runs", "verify", "run", "--concurrency", "1"]
    with subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("grading again: 1/8 episodes, ")
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out.splitlines()[-1].startswith("unfinished")
    assert "run the same command again to resume" in out
    again = clawgym("runs", "verify", "run", cwd=folder)
    assert again.returncode == 0
    assert again.stdout.strip() == "verified: 8 of 8 results reproduced"
    assert re.match(r"Resuming: [1-8] of 8 episodes are done\.\n", again.stderr), "nothing was resumed"


def test_two_runs_are_compared(folder: Path) -> None:
    done = clawgym("eval", "./mine", "--agent", "noop", "--out", "none", cwd=folder)
    assert done.returncode == 0, done.stderr
    done = clawgym("runs", "compare", "none", "run", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "8 tasks, paired" in done.stdout
    assert "80% power" in done.stdout
    raw = json.loads(clawgym("runs", "compare", "none", "run", "--json", cwd=folder).stdout)
    assert raw["tasks"] == 8
    assert raw["scores"]["official"]["value"] > 0
    few = clawgym("eval", "./mine", "--agent", "noop", "--limit", "3", "--out", "few", cwd=folder)
    assert few.returncode == 0
    refused = clawgym("runs", "compare", "few", "run", cwd=folder)
    assert refused.returncode == 2
    assert "share 3 graded tasks" in refused.stderr
