"""The index of one run: its episodes as a table, and the text of its transcripts for the search.

Invariants:

- The index can be deleted at any time: it is made again from the run folder, which is never written.
- It is made incrementally. A line of ``results.jsonl`` is read once, also while a run is in progress; a file that
  shrank or was replaced is read again from its beginning.
- A damaged line is counted and left out; it does not hide the others.
- Several processes may use one index: each change is one transaction.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from clawgym.errors import RunFolderError
from clawgym.evaluation.answers import episode_line, ordered, transcript_of
from clawgym.files import open_below, read_below
from clawgym.records import Step
from clawgym.records.manifest import RunManifest
from clawgym.records.run_folder import MANIFEST, RESULTS, TRANSCRIPT
from clawgym.statistics import as_float
from clawgym.visible import visible_lines

__all__ = ["EPISODE_FILTERS", "SORT_KEYS", "RunIndex", "read_manifest"]

_VERSION = "1"
_LARGEST_MANIFEST = 64 * 2**20
_LARGEST_LINE = 16 * 2**20
_CHUNK = 8 * 2**20
_TEXT = 20_000
"""Most characters of one text of a step that can be found."""
_MOST_HITS = 1_000
"""A search ends after so many steps."""
_LINES = 500
"""Lines of results that are read in one transaction."""
_AT_ONCE = 20
"""Transcripts that are read in one transaction."""
SORT_KEYS = {
    "order": "ord, sample",
    "task": "task",
    "outcome": "outcome",
    "official": "official",
    "corrected": "corrected",
    "passed": "CAST(passed AS REAL) / MAX(checks, 1)",
    "steps": "steps",
    "tokens": "tokens",
    "cost": "cost",
    "seconds": "seconds",
    "finished": "finished",
}
EPISODE_FILTERS = ("outcome", "category", "check", "q")
_SCHEMA = """
CREATE TABLE about (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE rows (seq INTEGER PRIMARY KEY, name TEXT NOT NULL, json TEXT NOT NULL);
CREATE INDEX rows_by_name ON rows (name, seq);
CREATE TABLE episodes (
  name TEXT PRIMARY KEY, ord INTEGER, sample INTEGER, task TEXT, outcome TEXT, category TEXT, official REAL,
  corrected REAL, passed INTEGER, checks INTEGER, steps INTEGER, tokens INTEGER, cost REAL, seconds REAL,
  finished TEXT, cause TEXT, line TEXT NOT NULL, indexed INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE INDEX episodes_in_order ON episodes (ord, sample);
CREATE INDEX episodes_to_index ON episodes (indexed);
CREATE TABLE failed (name TEXT NOT NULL, episode TEXT NOT NULL, PRIMARY KEY (name, episode)) WITHOUT ROWID;
CREATE INDEX failed_by_episode ON failed (episode);
CREATE TABLE steps (number INTEGER PRIMARY KEY AUTOINCREMENT, episode TEXT NOT NULL, step INTEGER NOT NULL);
CREATE INDEX steps_by_episode ON steps (episode);
CREATE VIRTUAL TABLE texts USING fts5 (text, content='', tokenize='unicode61');
"""
_COLUMNS = ("name", "ord", "sample", "task", "outcome", "category", "official", "corrected", "passed", "checks",
            "steps", "tokens", "cost", "seconds", "finished", "cause", "line")  # fmt: skip
_INSERT = f"INSERT OR REPLACE INTO episodes ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"
# The search holds words only, not the texts: these are in the transcripts. A number of `steps` is never used again, so
# that words of a transcript that was replaced, which stay in `texts`, match nothing.


def read_manifest(run: Path) -> RunManifest:
    """The run manifest of a hostile folder. Raises :class:`~clawgym.errors.RunFolderError`."""
    try:
        raw = json.loads(read_below(run, MANIFEST, _LARGEST_MANIFEST))
        manifest = RunManifest.from_dict(raw)
        for name in ("task_set", "tasks", "agent", "engine", "config", "isolation"):
            if not isinstance(getattr(manifest, name), Mapping):
                raise ValueError(f"{name} is no object")
        if not all(isinstance(task, Mapping) for task in manifest.tasks.values()):
            raise ValueError("a task is no object")
        if not isinstance(manifest.samples, int) or not 0 <= manifest.samples <= 10**6:
            raise ValueError("samples is no count")
        for name in ("kind", "library", "created"):
            if not isinstance(getattr(manifest, name), str):
                raise ValueError(f"{name} is no text")
    except OSError as error:
        raise RunFolderError(f"{run / MANIFEST} {error.strerror}: give a run folder") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise RunFolderError(f"{run / MANIFEST} is damaged ({str(error)[:200]}): restore it from a copy") from error
    return manifest


class RunIndex:
    """The index of the run folder ``run``, in the file ``file``. Not for several threads at once."""

    def __init__(self, run: Path, file: Path) -> None:
        self.run = run
        self._file = file
        self._signature: object = None
        self._order: dict[str, int] = {}
        self._manifest: RunManifest | None = None
        self._tasks = ""
        try:
            self._db = self._open()
        except sqlite3.DatabaseError:  # damaged, or of another version: made again
            for end in ("", "-wal", "-shm"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"{file}{end}")
            self._db = self._open()

    def _open(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._file, timeout=30, isolation_level=None, check_same_thread=False)
        try:
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=OFF")  # it can be made again
            db.execute("PRAGMA cell_size_check=ON")
            with _transaction(db):
                if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'about'").fetchone():
                    for statement in _SCHEMA.split(";\n"):
                        db.execute(statement)
                    db.execute("INSERT INTO about VALUES ('version', ?)", (_VERSION,))
                elif db.execute("SELECT value FROM about WHERE key = 'version'").fetchone() != (_VERSION,):
                    raise sqlite3.DatabaseError("of another version")
        except BaseException:
            db.close()
            raise
        return db

    def close(self) -> None:
        self._db.close()

    # ------------------------------------------------------------------------------------------------------ reading

    @property
    def manifest(self) -> RunManifest:
        """The run manifest, read again when it changes. Raises :class:`~clawgym.errors.RunFolderError`."""
        try:
            info = os.stat(self.run / MANIFEST, follow_symlinks=False)
            signature = (info.st_ino, info.st_size, info.st_mtime_ns)
        except OSError:
            signature = None
        if self._manifest is None or signature != self._signature:
            self._manifest, self._signature = read_manifest(self.run), signature
            self._order = ordered(self._manifest)
            self._tasks = _digest(repr(list(self._manifest.tasks.items())).encode("utf-8", "surrogatepass"))
        return self._manifest

    def get(self, key: str) -> str:
        """What is noted under ``key``; empty if nothing is."""
        found = self._db.execute("SELECT value FROM about WHERE key = ?", (key,)).fetchone()
        return found[0] if found else ""

    def put(self, key: str, value: str) -> None:
        """Note ``value`` under ``key``, for as long as the index lives."""
        self._db.execute("INSERT OR REPLACE INTO about VALUES (?, ?)", (key, value))

    @property
    def state(self) -> str:
        """Names what was read of ``results.jsonl``: changes with each new line."""
        return self.get("offset") + ":" + self.get("mark")

    @property
    def begun(self) -> bool:
        """Whether anything was read of ``results.jsonl``."""
        return bool(self.get("manifest"))

    @property
    def damaged(self) -> int:
        """Number of damaged lines."""
        return int(self.get("damaged") or 0)

    def progress(self) -> tuple[int, int]:
        """How many transcripts the search covers, and how many there are."""
        done, total = self._db.execute("SELECT COALESCE(SUM(indexed), 0), COUNT(*) FROM episodes").fetchone()
        return done, total

    def rows(self) -> list[dict[str, Any]]:
        """All rows of the run that can be read."""
        return [json.loads(text) for (text,) in self._db.execute("SELECT json FROM rows ORDER BY seq")]

    def episode(self, name: str) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
        """``EpisodeLine`` and the rows of the episode with this name, oldest first; None if there is none."""
        found = self._db.execute("SELECT line FROM episodes WHERE name = ?", (name,)).fetchone()
        if found is None:
            return None
        return json.loads(found[0]), self._rows_of(name)

    def _rows_of(self, name: str) -> list[dict[str, Any]]:
        rows = self._db.execute("SELECT json FROM rows WHERE name = ? ORDER BY seq", (name,))
        return [json.loads(text) for (text,) in rows]

    def episodes(
        self, *, offset: int = 0, limit: int = 100, sort: str = "order", where: Mapping[str, str] | None = None
    ) -> tuple[int, int, list[dict[str, Any]]]:
        """A part of the episodes: number after filtering, number of all, and their ``EpisodeLine``.

        ``sort``: one of :data:`SORT_KEYS`, descending with ``-`` before it. ``where``: filter (one of
        :data:`EPISODE_FILTERS`) -> value. Raises ValueError for another key.
        """
        by, down = sort.removeprefix("-"), sort.startswith("-")
        if by not in SORT_KEYS:
            raise ValueError(f"sort={sort[:40]}: choose one of {', '.join(SORT_KEYS)}")
        clauses, values = ["1"], []
        for name, value in (where or {}).items():
            clause, given = self._clause(name, value)
            clauses.append(clause)
            values += given
        condition = " AND ".join(clauses)
        total = self._db.execute(f"SELECT COUNT(*) FROM episodes WHERE {condition}", values).fetchone()[0]
        everything = self._db.execute("SELECT COUNT(*) FROM episodes").fetchone()[0]
        column = SORT_KEYS[by]
        order = ", ".join(f"{part} DESC" for part in column.split(", ")) if down else column
        if by not in ("order", "task", "outcome"):
            order = f"({column}) IS NULL, {order}"
        found = self._db.execute(
            f"SELECT line FROM episodes WHERE {condition} ORDER BY {order}, ord, sample LIMIT ? OFFSET ?",
            [*values, limit, offset],
        )
        return total, everything, [json.loads(line) for (line,) in found]

    def _clause(self, name: str, value: str) -> tuple[str, list[str]]:
        if name in ("outcome", "category"):
            return f"{name} = ?", [value]
        if name == "check":
            return "name IN (SELECT episode FROM failed WHERE name = ?)", [value]
        if name == "q":
            like = "%" + re.sub(r"([%_\\])", r"\\\1", value) + "%"
            clause = "task LIKE ? ESCAPE '\\' OR cause LIKE ? ESCAPE '\\'"
            words = _match(value)
            if not words:
                return f"({clause})", [like, like]
            hits = "SELECT episode FROM texts JOIN steps ON number = texts.rowid WHERE texts MATCH ?"
            return f"({clause} OR name IN ({hits}))", [like, like, words]
        raise ValueError(f"{name[:40]}: there is no such filter: choose one of {', '.join(EPISODE_FILTERS)}")

    def search(self, words: str, offset: int, limit: int) -> tuple[int, list[tuple[str, int]]]:
        """Steps that contain all words, as (name of the episode, index of the step), and how many there are.

        The search ends after a thousand steps.
        """
        match = _match(words)
        if not match:
            return 0, []
        found = self._db.execute(
            "SELECT episode, step FROM texts JOIN steps ON number = texts.rowid WHERE texts MATCH ? LIMIT ?",
            (match, _MOST_HITS),
        ).fetchall()
        return len(found), found[offset : offset + limit]

    # ------------------------------------------------------------------------------------------------------ writing

    def update(self, most: int = _LINES) -> bool:
        """Take in at most ``most`` new lines of ``results.jsonl``. Returns whether more are left.

        Raises :class:`~clawgym.errors.RunFolderError` if the run manifest cannot be read, or a line is huge.
        """
        manifest = self.manifest
        try:
            file = open_below(self.run, RESULTS)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise RunFolderError(f"{self.run / RESULTS} {error.strerror}: give a run folder") from error
        with file, _transaction(self._db):
            offset, damaged = int(self.get("offset") or 0), self.damaged
            size = os.fstat(file.fileno()).st_size
            if (
                self.get("manifest") != self._tasks
                or size < offset
                or (offset and self.get("mark") != _mark(file, offset))
            ):
                self._clear()
                self.put("manifest", self._tasks)
                offset = damaged = 0
            file.seek(offset)
            changed: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
            taken = 0
            for line in _lines(file):
                if taken == most:
                    break
                taken += 1
                offset += len(line)
                try:
                    row = _row(line)
                    made = episode_line(manifest, self._order, [row])
                except ValueError:
                    damaged += 1
                    continue
                self._db.execute("INSERT INTO rows (name, json) VALUES (?, ?)", (made["name"], line.decode()))
                changed.setdefault(made["name"], []).append((row, made))
            for name, new in changed.items():
                self._refresh(manifest, name, new)
            if taken:
                for key, value in (("offset", offset), ("mark", _mark(file, offset)), ("damaged", damaged)):
                    self.put(key, str(value))
        return taken == most

    def _clear(self) -> None:
        for table in ("rows", "episodes", "failed", "steps"):
            self._db.execute(f"DELETE FROM {table}")
        self._db.execute("INSERT INTO texts (texts) VALUES ('delete-all')")
        self._db.execute("DELETE FROM about WHERE key != 'version'")

    def _refresh(self, manifest: RunManifest, name: str, new: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
        """Store the line of an episode that has new rows, each given with the line that it would have alone."""
        row, line = new[-1]
        if self._db.execute("SELECT COUNT(*) FROM rows WHERE name = ?", (name,)).fetchone()[0] > 1:
            line = episode_line(manifest, self._order, self._rows_of(name))
        values = {
            **line,
            "ord": line["order"],
            "tokens": line["prompt_tokens"] + line["completion_tokens"],
            "cost": line["cost_usd"],
            "line": json.dumps(line),
        }
        self._db.execute(_INSERT, [_stored(values[column]) for column in _COLUMNS])
        checks = ((row.get("result") or {}).get("checks") or {}).items()
        self._db.execute("DELETE FROM failed WHERE episode = ?", (name,))
        self._db.executemany(
            "INSERT OR IGNORE INTO failed VALUES (?, ?)",
            [(visible_lines(str(check)[:200]), name) for check, score in checks if not as_float(score) >= 1],
        )

    def index_texts(self, stop: Callable[[], bool] = lambda: False) -> Iterator[tuple[int, int]]:
        """Read the transcripts that the search does not cover, and yield :meth:`progress` after every few."""
        while not stop():
            waiting = self._db.execute("SELECT name FROM episodes WHERE NOT indexed LIMIT ?", (_AT_ONCE,)).fetchall()
            if not waiting:
                return
            read = [(name, self._words(name)) for (name,) in waiting]
            with _transaction(self._db):
                for name, words in read:
                    self._db.execute("DELETE FROM steps WHERE episode = ?", (name,))
                    for step, text in words:
                        number = self._db.execute("INSERT INTO steps (episode, step) VALUES (?, ?)", (name, step))
                        self._db.execute("INSERT INTO texts (rowid, text) VALUES (?, ?)", (number.lastrowid, text))
                    self._db.execute("UPDATE episodes SET indexed = 1 WHERE name = ?", (name,))
                    self.put(f"transcript:{name}", self._signature_of(name))
            yield self.progress()

    def forget_changed(self) -> None:
        """Let transcripts that changed since they were indexed be read again."""
        names = [name for (name,) in self._db.execute("SELECT name FROM episodes WHERE indexed")]
        changed = [(name,) for name in names if self.get(f"transcript:{name}") != self._signature_of(name)]
        with _transaction(self._db):
            self._db.executemany("UPDATE episodes SET indexed = 0 WHERE name = ?", changed)

    def _signature_of(self, name: str) -> str:
        try:
            info = os.stat(self.run / "episodes" / name / TRANSCRIPT, follow_symlinks=False)
        except OSError:
            return ""
        return f"{info.st_size}:{info.st_mtime_ns}"

    def _words(self, name: str) -> list[tuple[int, str]]:
        found = ((n, step_text(step)) for n, step in enumerate(transcript_of(self.run, name).steps))
        return [(n, text) for n, text in found if text]


def _row(line: bytes) -> dict[str, Any]:
    """The row of a line. Raises ValueError for a damaged line."""
    try:
        row = json.loads(line)
    except RecursionError as error:
        raise ValueError("too deep") from error
    if not isinstance(row, dict) or not isinstance(row.get("key"), str) or not isinstance(row.get("task_id"), str):
        raise ValueError("no row")
    return row


def step_text(step: Step) -> str:
    """The text of a step that the search covers."""
    parts = [step.message, str(step.reasoning or "")]
    for call in step.tool_calls:
        parts += [call.name, json.dumps(dict(call.arguments), ensure_ascii=False)]
    parts += [seen.content for seen in step.observations]
    text = "\n".join(part[:_TEXT] for part in parts if part)
    return text.encode("utf-8", "replace").decode()


def words_of(query: str) -> list[str]:
    """The words and quoted phrases of a query that have a letter or a digit."""
    found = (phrase or word for phrase, word in re.findall(r'"([^"]+)"|(\S+)', query[:1_000]))
    return [word.strip('"') for word in found if re.search(r"\w", word)][:20]


def _match(query: str) -> str:
    """A query of FTS5 for texts with all words; the last word may be the beginning of one."""
    words = ['"' + word.replace('"', '""') + '"' for word in words_of(query)]
    return " ".join(words) + ("*" if words and not query.rstrip().endswith('"') else "")


def _stored(value: Any) -> Any:
    """A value that SQLite can hold, with text as the page shows it."""
    if isinstance(value, str):
        return visible_lines(value)
    return float(value) if isinstance(value, int) and abs(value) >= 2**63 else value


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _mark(file: Any, offset: int) -> str:
    """A digest of the beginning of a file and of the bytes before ``offset``, which tell whether it was replaced."""
    file.seek(0)
    head = file.read(min(4096, offset))
    file.seek(max(0, offset - 4096))
    return _digest(head + file.read(min(4096, offset)))


def _lines(file: Any) -> Iterator[bytes]:
    """The complete lines from here on. Raises :class:`~clawgym.errors.RunFolderError` for a huge line."""
    rest = b""
    while chunk := file.read(_CHUNK):
        *whole, rest = (rest + chunk).split(b"\n")
        yield from (line + b"\n" for line in whole)
        if len(rest) > _LARGEST_LINE:
            raise RunFolderError(f"{RESULTS} has a line of more than {_LARGEST_LINE >> 20} MiB: delete the line")


@contextlib.contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")
