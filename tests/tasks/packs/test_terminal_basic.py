"""The pack ``terminal-basic``: every generator's solution passes, nothing cheap or wrong does, and seeds stay apart.

The scripts here are our own, so they run on the host in a temporary folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from clawgym.errors import TaskError, TaskSetNotFound
from clawgym.records import Task, TaskFile
from clawgym.tasks.packs import seeded
from clawgym.tasks.packs import terminal_basic as pack
from clawgym.tasks.packs.terminal_basic import _build
from clawgym.tasks.packs.terminal_basic._sqlite import database

SLOW = {"service-script", "exit-codes"}
"""Generators whose scripts wait for processes: fewer seeds."""

CASES = [(name, seed) for name in pack.GENERATORS for seed in ((1,) if name in SLOW else (0, 1))]
MORE = [(name, seed) for name in pack.GENERATORS if name not in SLOW for seed in (5, 8)]
each_case = pytest.mark.parametrize(("name", "seed"), CASES)
each_generator = pytest.mark.parametrize("name", pack.GENERATORS)

RUN_CHECK = (
    "import sys, runpy; path = sys.argv[1]; sys.argv = sys.argv[1:]; "
    "sys.path.insert(0, path.rpartition('/')[0]); runpy.run_path(path, run_name='__main__')"
)
"""As the grader runs a checker: isolated, with the checker's own folder to import from."""

ENDINGS = (
    "json|jsonl|csv|tsv|txt|md|html|htm|yaml|yml|py|sh|js|ts|xml|ini|toml|log|svg|sql|ics|cfg|conf|css|env|patch|diff|"
    "geojson|ndjson|rst|tex|bib|sha256|db|sqlite|zip|gz|tar|png|jpg|pdf|xlsx|r|R"
)
PATHS = re.compile(rf"(?<![\w/.-])((?:\./)?[A-Za-z0-9_][\w./-]*\.(?:{ENDINGS}))(?![\w-])")


class Host:
    """A workspace in a temporary folder, with the task's verifier beside it."""

    def __init__(self, task: Task, folder: Path) -> None:
        self.task, self.workspace, self.verifier = task, folder / "workspace", folder / "verifier"
        self.workspace.mkdir(parents=True)
        for files, root in [(task.inputs, self.workspace), (task.verifier.files, self.verifier)]:
            for file in files:
                path = root / file.path
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(file.read())

    def run(self, script: TaskFile) -> subprocess.CompletedProcess:
        env = {"PATH": "/usr/bin:/bin", "HOME": str(self.workspace.parent), "LC_ALL": "C.UTF-8"}
        text = script.read().decode()
        return subprocess.run(["bash", "-c", text], cwd=self.workspace, env=env, capture_output=True, timeout=60)

    def scores(self) -> dict[str, float]:
        """The checks, from an isolated interpreter in another folder."""
        before = self.snapshot()
        command = [sys.executable, "-I", "-S", "-c", RUN_CHECK, str(self.verifier / "check.py"), str(self.workspace)]
        done = subprocess.run(command, cwd="/", env={}, capture_output=True, text=True, timeout=110)
        assert done.returncode == 0, done.stderr
        assert self.snapshot() == before, "the checker changed the workspace"
        return json.loads(done.stdout)

    def mean(self) -> float:
        scores = self.scores()
        return sum(scores.values()) / len(scores)

    def snapshot(self) -> list[tuple]:
        """Paths, sizes and times below the workspace."""
        paths = sorted(self.workspace.rglob("*"))
        return [(str(p), (s := p.lstat()).st_mode, s.st_size, s.st_mtime_ns) for p in paths]

    def named_paths(self) -> list[str]:
        """Output paths that the instruction names."""
        found = dict.fromkeys(PATHS.findall(self.task.instruction))
        return [path for path in found if not (self.workspace / path).exists()]

    def outputs(self) -> list[str]:
        """What the solution writes or changes, from a run beside this one."""
        other = Host(self.task, self.workspace.parent / "solved")
        before = {p: p.read_bytes() for p in other.workspace.rglob("*") if p.is_file()}
        other.run(self.task.solution[0])
        files = sorted(p for p in other.workspace.rglob("*") if p.is_file())
        return [str(p.relative_to(other.workspace)) for p in files if before.get(p) != p.read_bytes()]


@pytest.mark.parametrize(("name", "seed"), CASES + MORE)
def test_solution_passes(name: str, seed: int, tmp_path: Path) -> None:
    host = Host(pack.make(name, seed), tmp_path)
    assert host.mean() <= 0.2, "doing nothing must be worth next to nothing"
    done = host.run(host.task.solution[0])
    assert done.returncode == 0, done.stderr
    scores = host.scores()
    assert set(scores.values()) == {1.0}, scores
    assert 3 <= len(scores) <= 8
    if name not in SLOW:
        assert host.scores() == scores


@each_case
def test_wrong_solutions_fail(name: str, seed: int, tmp_path: Path) -> None:
    task = pack.make(name, seed)
    assert len({file.path for file in task.wrong_solutions}) == 3
    for file in task.wrong_solutions:
        assert re.fullmatch(r"[a-z0-9-]+\.sh", file.path)
        host = Host(task, tmp_path / Path(file.path).stem)
        host.run(file)
        assert min(host.scores().values()) < 1.0, f"{file.path} passes"


@each_case
def test_trivial_policies_score_low(name: str, seed: int, tmp_path: Path) -> None:
    task = pack.make(name, seed)
    for policy, text in [("touch", ""), ("echo", task.instruction)]:
        host = Host(task, tmp_path / policy)
        for path in {*host.named_paths(), *host.outputs()}:
            (host.workspace / path).parent.mkdir(parents=True, exist_ok=True)
            (host.workspace / path).write_text(text)
        assert host.mean() <= 0.2, (policy, host.scores())
    empty = Host(task, tmp_path / "empty")
    for file in task.inputs:
        (empty.workspace / file.path).unlink()
    assert empty.mean() <= 0.2


def _folder(path: Path) -> None:
    path.mkdir()


def _link(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _deep(path: Path) -> None:
    path.write_text("[" * 100_000)


GARBAGE: dict[str, Callable[[Path], object]] = {
    "binary": lambda path: path.write_bytes(bytes(range(256)) * 40),
    "huge": lambda path: path.write_bytes(b"1,2\n" * (5 << 18)),
    "folder": _folder,
    "link": _link,
    "fifo": os.mkfifo,
    "deep": _deep,
    "wrong-shape": lambda path: path.write_text('{"id": [1, {"a": null}], "people": NaN}\n'),
    "no-permission": lambda path: (path.write_text("x"), path.chmod(0)),
}


@each_generator
def test_checker_survives_garbage(name: str, tmp_path: Path) -> None:
    task = pack.make(name, 1)
    outputs = Host(task, tmp_path / "first").outputs()
    for kind, leave in GARBAGE.items():
        host = Host(task, tmp_path / kind)
        for output in outputs:
            path = host.workspace / output
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            leave(path)
        assert host.mean() <= 0.2, kind


@pytest.mark.parametrize("name", [name for name in pack.GENERATORS if name in SLOW])
def test_no_process_is_left_running(name: str, tmp_path: Path) -> None:
    host = Host(pack.make(name, 3), tmp_path)
    host.run(host.task.solution[0])
    host.scores()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                where, what = os.readlink(entry / "cwd"), (entry / "cmdline").read_bytes()
            except OSError:
                continue
            assert not where.startswith(str(tmp_path)), what
            assert "/check-" not in where, what


@each_generator
def test_seeds_give_different_instances(name: str) -> None:
    tasks = [pack.make(name, seed) for seed in range(40)]
    assert len({task.content_hash for task in tasks}) == 40
    train, held_out = (
        {
            (t.instruction, tuple(sorted((f.path, f.sha256) for f in t.inputs)))
            for t in tasks
            if t.metadata["seed"] % 2 == side
        }
        for side in (0, 1)
    )
    assert not {text for text, _ in train} & {text for text, _ in held_out}
    assert not {files for _, files in train if files} & {files for _, files in held_out if files}


@each_generator
def test_split_depends_on_instruction(name: str) -> None:
    for seed in (*range(6), 10**12, 10**12 + 1):
        first = hashlib.sha256(pack.make(name, seed).instruction.encode()).digest()[0]
        assert first % 2 == seed % 2


@each_generator
def test_form(name: str) -> None:
    task = pack.make(name, 1)
    assert [f.path for f in task.verifier.files] == ["reward.sh", "check.py", "clawgym_checks.py"]
    assert [f.path for f in task.solution] == ["solve.sh"]
    runs_code = b"run_program" in task.verifier.files[1].read()
    assert task.verifier.executes_agent_code == ("subprocess" if runs_code else None)
    for file in (*task.solution, *task.wrong_solutions):
        assert subprocess.run(["bash", "-n", "-c", file.read().decode()]).returncode == 0


def test_reward_script_is_the_published_one(tmp_path: Path) -> None:
    host = Host(pack.make("csv-join", 1), tmp_path)
    text = host.task.verifier.files[0].read()
    assert hashlib.md5(text).hexdigest() == "7834ff385e85b19803e12645932f7a33"
    host.run(host.task.wrong_solutions[0])
    reward = text.decode().replace("/root/.openclaw/workspace/reward", str(host.verifier))
    reward = reward.replace("/root/.openclaw/workspace", str(host.workspace))
    done = subprocess.run(["bash", "-c", reward], capture_output=True, text=True, check=True)
    assert float(done.stdout.split()[-1]) == pytest.approx(host.mean())


def test_families_and_levels() -> None:
    families = [generator.family for generator in pack.GENERATORS.values()]
    assert len(families) >= 14
    assert set(families) == {"files", "data", "shell", "programs"}
    assert {generator.level for generator in pack.GENERATORS.values()} == {1, 2, 3, 4, 5}


def test_load() -> None:
    tasks = pack.load()
    assert tasks.name == "terminal-basic:heldout"
    assert tasks.version == pack.VERSION
    assert len(tasks) == 2 * len(pack.GENERATORS)
    assert tasks.tasks[0].id == "write-word-h0001"
    assert not {t.content_hash for t in tasks.tasks} & {t.content_hash for t in pack.load("train").tasks}
    assert [t.id for t in pack.load("train", [4]).tasks][:2] == ["write-word-t0004", "file-op-t0004"]


def test_errors_say_what_to_do() -> None:
    with pytest.raises(TaskSetNotFound, match="Did you mean 'csv-join'"):
        pack.make("csv-jion", 1)
    with pytest.raises(TaskSetNotFound, match="Choose one of write-word"):
        pack.make("?", 1)
    with pytest.raises(TaskError, match="seeds that are odd"):
        pack.load("heldout", [1, 2])
    with pytest.raises(TaskSetNotFound, match="choose 'train' or 'heldout'"):
        pack.load("test")  # type: ignore[arg-type]
    with pytest.raises(TaskError, match="negative"):
        pack.make("csv-join", -1)
    fixed = seeded.Generator("fixed", "files", 1, lambda rng: _build.TerminalDraft("same", {}, "", {}, check="pass"))
    with pytest.raises(TaskError, match="do not vary"):
        [_build.build(fixed, seed) for seed in (0, 1)]


def test_words_are_not_substrings_of_each_other() -> None:
    assert [(a, b) for a in seeded.WORDS for b in seeded.WORDS if a != b and a in b] == []
    assert len(set(seeded.WORDS)) == len(seeded.WORDS) >= 120


def test_database_is_read_by_sqlite(tmp_path: Path) -> None:
    values = [0, 1, -1, 127, -129, 40_000, -(2**23) - 1, 2**31, 2**47 - 1, -(2**63)]
    rows = [(k * 3, (None, f"é{k}" * k, values[k % 10], None if k % 3 else "x" * 40 * k)) for k in range(1, 90)]
    blob, roots = database({"t": ("CREATE TABLE t (id INTEGER PRIMARY KEY, a TEXT, b INTEGER, c TEXT)", rows)})
    (tmp_path / "t.db").write_bytes(blob)
    connection = sqlite3.connect(tmp_path / "t.db")
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert connection.execute("SELECT * FROM t").fetchall() == [(k, *rest) for k, (_, *rest) in rows]
    assert connection.execute("SELECT rootpage FROM sqlite_schema").fetchall() == [(roots["t"],)]
    connection.close()
