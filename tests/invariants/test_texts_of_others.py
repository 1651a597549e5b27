"""Texts of tasks, endpoints, agents and run folders reach the terminal, logs and reports with nothing that it obeys.

Each of these sent escape sequences to the terminal, or wrote a line of its own there, before there was one console.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
import unicodedata
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from clawgym.records import Episode, Observation, Outcome, Step, Task, TaskSet, ToolCall, VerifierResult, VerifierSpec
from clawgym.records.manifest import now
from clawgym.records.run_folder import RunFolder, make_manifest
from clawgym.tasks.scaffold import new_task

HOSTILE = (
    "\x1bc\x1b[2J\x1b]8;;http://evil\x07\x9b31m\x7f\u202egnp\u2066\u200f\u061c\u2028\x85\r\nFORGED: [link=x]y[/link]"
)


def check(text: str, where: object = "") -> None:
    """Nothing of :data:`HOSTILE` does anything in ``text``, which shows it."""
    for character in text:
        kind, direction = unicodedata.category(character), unicodedata.bidirectional(character)
        assert kind not in ("Cc", "Cs", "Zl", "Zp") or character == "\n", (where, character)
        assert direction not in ("LRO", "RLO", "LRI", "RLI", "FSI", "LRE", "RLE"), (where, character)
        assert character not in "\u200e\u200f\u061c", (where, character)
    assert not [line for line in text.split("\n") if line.startswith("FORGED")], where


def check_file(file: Path) -> None:
    """:func:`check` of a file. Lines of a log are a program's or a traceback's; in HTML a newline is a space."""
    text = file.read_text()
    check(text.replace("\nFORGED", "\n FORGED") if file.suffix in (".log", ".html") else text, file)


def clawgym(*words: str, cwd: Path, shows: bool = True) -> str:
    """What a command prints, on both streams; it has to show the hostile text, made visible."""
    done = subprocess.run(
        [sys.executable, "-c", "from clawgym.cli import main; main()", *words],
        cwd=cwd,
        env={**os.environ, "COLUMNS": "400"},
        capture_output=True,
        timeout=170,
    )
    text = (done.stdout + done.stderr).decode()
    check(text, words)
    assert not shows or r"\x1bc\x1b[2J" in text, text
    return text


def change(folder: Path, **fields: Any) -> None:
    entry = folder / "data_entry.json"
    entry.write_text(json.dumps(json.loads(entry.read_text()) | fields))


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder of tasks: one whose texts are hostile, one that cannot be read, and two hostile names."""
    (tmp_path / "set").mkdir()
    new_task(tmp_path / "set" / "good")
    change(tmp_path / "set" / "good", metadata={"category": HOSTILE}, user_query=f"Do it.\n{HOSTILE}")
    (tmp_path / "set" / "good" / "input_files" / HOSTILE.replace("/", "_")).write_text("x")
    new_task(tmp_path / "set" / "bad")
    change(tmp_path / "set" / "bad", task_id="bad", clawgym={f"surprise{HOSTILE}": 1})
    (tmp_path / "set" / f"name{HOSTILE.replace('/', '_')}").mkdir()
    return tmp_path


def test_task_folders(tasks: Path) -> None:
    clawgym("tasks", "show", "set", cwd=tasks)
    clawgym("tasks", "show", "set", "good", cwd=tasks)
    clawgym("tasks", "show", "set", "bad", cwd=tasks)
    clawgym("tasks", "import", "set", "out", cwd=tasks)
    clawgym("tasks", "show", f"set/name{HOSTILE.replace('/', '_')}", cwd=tasks)
    found = json.loads(clawgym("tasks", "show", "set", "good", "--json", cwd=tasks, shows=False))
    assert found["instruction"] == f"Do it.\n{HOSTILE}"


def test_validation(tasks: Path) -> None:
    text = clawgym("tasks", "validate", "set", cwd=tasks)
    assert "1 readable, 2 unreadable" in text


@pytest.mark.parametrize(
    "row",
    [
        {"input_files": [{"file_path": f"../{HOSTILE}", "content": ""}]},
        {"origin_template": f"---\nid: {HOSTILE[:2]}{HOSTILE.splitlines()[0]}\n---\n"},
        {HOSTILE: 1},
        {"input_files": [{"file_path": "a", HOSTILE: ""}]},
    ],
    ids=["path", "id", "key", "inner-key"],
)
def test_rows(tmp_path: Path, row: dict[str, Any]) -> None:
    whole = {"prompt": "x", "hook_code": "", "input_files": [], "rule": "", "origin_template": "", **row}
    (tmp_path / "rows.jsonl").write_text(json.dumps(whole) + "\n")
    clawgym("tasks", "show", "rows.jsonl", cwd=tmp_path, shows=False)


@pytest.mark.parametrize("words", [("tasks", "show", HOSTILE), (HOSTILE,), ("tasks", "show", f"--{HOSTILE}")])
def test_words_of_the_command_line(tmp_path: Path, words: tuple[str, ...]) -> None:
    clawgym(*words, cwd=tmp_path)


def hostile_run(path: Path, seed: int = 0) -> Path:
    """A run folder in which every text is hostile."""
    tasks = tuple(
        Task(f"t{number}{HOSTILE}", "x", VerifierSpec("reward_sh", ()), metadata={"category": HOSTILE})
        for number in range(8)
    )
    manifest = make_manifest(
        "eval", TaskSet(f"set{HOSTILE}", tasks, HOSTILE), agent={"name": f"a{seed}{HOSTILE}"}, seed=seed
    )
    call = ToolCall("1", HOSTILE, {HOSTILE: HOSTILE})
    steps = (
        Step("system", HOSTILE, now()),
        Step("agent", HOSTILE, now(), (call,), (Observation(HOSTILE),)),
    )
    with RunFolder.open(path, manifest) as run:
        for number, task in enumerate(tasks):
            solved = number % 2 == seed % 2
            worth = float(solved)
            result = VerifierResult({f"c{HOSTILE}": worth}, worth, worth, None, log=HOSTILE)
            run.record(
                Episode(
                    task.id,
                    task.content_hash,
                    0,
                    seed,
                    f"a{HOSTILE}",
                    Outcome.SOLVED if solved else Outcome.FAILED,
                    cause=None if solved else HOSTILE,
                    result=result,
                    steps=steps,
                    final_message=HOSTILE,
                    dropped=(HOSTILE,),
                    error=HOSTILE,
                )
            )
        run.append(dataclasses.asdict(Left(tasks[0].id, HOSTILE)))
    return path


@dataclasses.dataclass
class Left:
    task_id: str
    cause: str
    key: str = "left#0"
    outcome: str = "infra"
    sample: int = 0


def test_run_folders(tmp_path: Path) -> None:
    first, second = hostile_run(tmp_path / "first"), hostile_run(tmp_path / "second", 1)
    clawgym("leaderboard", "show", "first", "second", cwd=tmp_path)
    clawgym("leaderboard", "show", "first", "--markdown", cwd=tmp_path, shows=False)
    clawgym("leaderboard", "show", "first", "--json", cwd=tmp_path, shows=False)
    clawgym("runs", "compare", "first", "second", cwd=tmp_path)
    clawgym("runs", "compare", "first", "second", "--json", cwd=tmp_path, shows=False)
    clawgym("runs", "verify", "first", cwd=tmp_path)
    from clawgym.evaluation.report import write_report

    for run in (first, second):
        write_report(run)
        logs = [file for file in run.rglob("*") if file.suffix in (".log", ".json", ".jsonl", ".html")]
        assert {file.name for file in logs} >= {"error.log", "verifier.log", "transcript.json", "results.jsonl"}
        for file in logs:
            check_file(file)


class _Refuses(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        error = {"message": HOSTILE, "type": HOSTILE, "code": HOSTILE}
        body = json.dumps({"error": error}, ensure_ascii=False).encode()
        self.send_response(400)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[str]:
    """An endpoint that refuses every request with a hostile text."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Refuses) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        server.shutdown()


def test_error_text_of_an_endpoint(tmp_path: Path, endpoint: str) -> None:
    new_task(tmp_path / "task")
    words = ("--agent", "tool-loop", "--model", "m", "--base-url", endpoint, "--out", "run")
    clawgym("eval", "./task", *words, cwd=tmp_path)
    (log,) = (tmp_path / "run").rglob("error.log")
    assert r"\x1bc\x1b[2J" in log.read_text()
    for file in (tmp_path / "run").rglob("*"):
        if file.suffix in (".log", ".html", ".json", ".jsonl"):
            check_file(file)
