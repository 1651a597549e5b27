"""A board: a folder with rules, entries, and the records of their checks.

```
board.json            the rules
entries/NAME/         an entry: the run folder of an evaluation, with transcripts and workspaces
checks/NAME.json      the record of the entry's last check, written by the board's maintainers
```

Invariants: an entry is identified by the digest of all its files. A record is shown only with the entry that it names.
Files of a board are untrusted: they are bounded, and no link is followed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from clawgym import snapshots
from clawgym.cache import cache_folder
from clawgym.credentials import find_secrets, texts_of
from clawgym.errors import ClawGymError, MissingDependency, RunFolderError, TaskSetNotFound
from clawgym.files import open_below, read_below
from clawgym.records import TaskSet
from clawgym.records.atif import PICTURES
from clawgym.records.run_folder import MANIFEST, PROGRAM, RESULTS, TRANSCRIPT, WORKSPACE, RunFolder, write_atomic
from clawgym.tasks import sets

__all__ = ["IN_BOARD", "BoardFolder", "BoardRules", "EntryFiles", "LeaderboardError", "changed_entries", "submit"]

RULES, ENTRIES, CHECKS = "board.json", "entries", "checks"
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_EXTRA = "pip install 'clawgym[hub]'"
_MAX_FILES, _MAX_BYTES, _MAX_FILE = 20_000, 512 * 2**20, 128 * 2**20
_LARGEST_BOARD = 4 * _MAX_BYTES
_KNOWN = re.compile(
    rf"{re.escape(MANIFEST)}|{re.escape(RESULTS)}"
    rf"|episodes/[\w.~-]+/(?:{re.escape(TRANSCRIPT)}|{re.escape(WORKSPACE)}|{re.escape(PROGRAM)})"
    rf"|{PICTURES}/[0-9a-f]{{64}}\.(?:png|jpg|gif|webp)",
    re.ASCII,
)
IN_BOARD = re.compile(rf"{RULES}|{CHECKS}/[\w.-]+\.json|{ENTRIES}/[a-z0-9][a-z0-9._-]{{0,63}}/(?:{_KNOWN.pattern})"
                      r"|[\w.-]+\.jsonl", re.ASCII)  # fmt: skip
"""Matches the files of a board on the Hub."""


class LeaderboardError(ClawGymError):
    """A board or an entry cannot be read or written. The message says what to do."""


class BoardRules(BaseModel):
    """The content of ``board.json``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1, max_length=100)
    about: str = Field("", max_length=2000)
    task_set: str = Field(min_length=1, max_length=300)
    """A name, ``hf://OWNER/NAME@COMMIT``, or a file or folder of the board."""
    task_set_hash: str = Field(pattern=r"^[0-9a-f]{64}$")
    samples: int = Field(1, ge=1, le=100)
    """Least episodes per task."""
    max_infra_rate: float = Field(0.05, ge=0, le=1)
    """Largest share of an entry's attempts that may end by an infrastructure error. Each of them was tried again."""
    share: float = Field(0.2, gt=0, le=1)
    """Share of the episodes with a score that a check grades again, but at least eight."""


class _RecordedRule(BaseModel):
    rule: str
    passed: bool
    text: str


class CheckRecord(BaseModel):
    """The record of a check, as a board stores it (:meth:`EntryCheck.to_dict
    <clawgym.leaderboards.check.EntryCheck.to_dict>`)."""

    entry: str
    digest: str
    nonce: str
    checked: str
    rules: list[_RecordedRule]
    drawn: list[str]
    unproven: list[str]
    reviewed: str
    accepted: bool
    library: str


class EntryFiles:
    """The files of an entry, listed without following links. Raises :class:`LeaderboardError` for a file that an entry
    may not have."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: dict[str, int] = {}
        """Relative path -> bytes."""
        for name, size in _walk(folder):
            if not _KNOWN.fullmatch(name):
                raise LeaderboardError(f"{folder / name}: an entry has no such file: remove it")
            self.names[name] = size
        if sum(self.names.values()) > _MAX_BYTES:
            raise LeaderboardError(f"{folder}: is larger than {_MAX_BYTES >> 20} MiB: leave large workspaces out")
        for name in (MANIFEST, RESULTS):
            if name not in self.names:
                raise LeaderboardError(f"{folder}: has no {name}: make the entry with `clawgym leaderboard submit`")

    def digest(self) -> str:
        """Hex SHA-256 of the paths and contents of all files."""
        rows = [(name, hashlib.sha256(self.read(name)).hexdigest()) for name in sorted(self.names)]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()

    def read(self, name: str) -> bytes:
        """The content of a file. Raises :class:`LeaderboardError` if it cannot be read."""
        try:
            return read_below(self.folder, name, _MAX_FILE)
        except OSError as error:
            raise LeaderboardError(f"{self.folder / name}: {error.strerror}: restore the file") from error


def _walk(folder: Path) -> Iterator[tuple[str, int]]:
    count = 0
    waiting = [""]
    while waiting:
        prefix = waiting.pop()
        try:
            entries = sorted(os.scandir(folder / prefix), key=lambda entry: entry.name)
        except OSError as error:
            raise LeaderboardError(f"{folder / prefix}: cannot be listed ({error.strerror}): restore it") from error
        for entry in entries:
            count += 1
            name = f"{prefix}{entry.name}"
            if count > _MAX_FILES:
                raise LeaderboardError(f"{folder}: has more than {_MAX_FILES} files: leave some out")
            if entry.is_dir(follow_symlinks=False):
                waiting.append(f"{name}/")
            elif entry.is_file(follow_symlinks=False):
                yield name, entry.stat(follow_symlinks=False).st_size
            else:
                raise LeaderboardError(f"{folder / name}: is a link, or no regular file: put the file itself there")


class BoardFolder:
    """A board. Make it with :meth:`read`."""

    def __init__(self, path: Path, rules: BoardRules) -> None:
        self.path = path
        self.rules = rules

    @classmethod
    def read(cls, where: str | Path) -> Self:
        """Read a board: a folder, or a data set ``hf://OWNER/NAME``, which is downloaded into the cache.

        Raises :class:`LeaderboardError` if it is not a board, :class:`~clawgym.errors.DownloadError` if it cannot be
        downloaded.
        """
        path = _downloaded(str(where)) if str(where).startswith("hf://") else Path(where)
        try:
            rules = BoardRules.model_validate_json(read_below(path, RULES, 2**20))
        except OSError as error:
            raise LeaderboardError(f"{path / RULES}: {error.strerror}: give the folder of a board") from error
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"])) or RULES
            raise LeaderboardError(f"{path / RULES}: {field}: {first['msg']}: correct it") from error
        return cls(path, rules)

    @property
    def names(self) -> list[str]:
        """Names of the entries."""
        try:
            there = sorted(path.name for path in (self.path / ENTRIES).iterdir() if path.is_dir())
        except FileNotFoundError:
            return []
        return [name for name in there if NAME.fullmatch(name)]

    def entry(self, name: str) -> Path:
        """The folder of an entry. Raises :class:`LeaderboardError` for a name that no entry may have."""
        if not NAME.fullmatch(name):
            raise LeaderboardError(f"{name!r} cannot name an entry: use up to 64 of a-z, 0-9, '.', '_' and '-'")
        return self.path / ENTRIES / name

    def files(self) -> list[str]:
        """Relative paths of the files that a board has on the Hub: the rules, tasks in a file, entries and records.

        Raises :class:`LeaderboardError` for a file that an entry may not have, for links, and if the board is larger
        than one that can be read from the Hub.
        """
        tasks = self.own_tasks
        found = [RULES]
        if tasks is not None and IN_BOARD.fullmatch(tasks.name):
            found.append(tasks.name)
        for name in self.names:
            found += [f"{ENTRIES}/{name}/{path}" for path in sorted(EntryFiles(self.entry(name)).names)]
            found += [f"{CHECKS}/{name}.json"] * os.path.lexists(self.path / CHECKS / f"{name}.json")
        size = 0
        for name in found:
            try:
                with open_below(self.path, name) as file:
                    size += os.fstat(file.fileno()).st_size
            except OSError as error:
                raise LeaderboardError(f"{self.path / name}: {error.strerror}: put the file itself there") from error
        if len(found) > snapshots.MAX_FILES or size > _LARGEST_BOARD:
            raise LeaderboardError(
                f"{self.path}: is larger than {snapshots.MAX_FILES:,} files or {_LARGEST_BOARD >> 30} GiB: "
                "leave large workspaces or old entries out"
            )
        return found

    @property
    def own_tasks(self) -> Path | None:
        """The file or folder of the board with its tasks; None if ``task_set`` names a set."""
        inside = self.path / self.rules.task_set
        known = "/" not in self.rules.task_set and ".." not in self.rules.task_set and inside.exists()
        return inside if known else None

    def tasks(self) -> TaskSet:
        """The board's task set, as it is here. Raises :class:`LeaderboardError` if its content is another."""
        try:
            tasks = sets.load(str(self.own_tasks or self.rules.task_set))
        except TaskSetNotFound as error:
            raise LeaderboardError(f"the tasks of the board cannot be loaded ({error})") from error
        if tasks.content_hash != self.rules.task_set_hash:
            raise LeaderboardError(
                f"{self.rules.task_set} has the content hash {tasks.content_hash[:12]} here, and the board needs "
                f"{self.rules.task_set_hash[:12]}: install the version of ClawGym that the board names"
            )
        return tasks

    def record(self, name: str) -> Mapping[str, Any] | None:
        """The record of an entry's last check, if it is about the files that are there now."""
        try:
            data = read_below(self.path, f"{CHECKS}/{name}.json", 8 * 2**20)
            record = CheckRecord.model_validate_json(data)
            same = record.digest == EntryFiles(self.entry(name)).digest()
            return record.model_dump() if same else None
        except (OSError, ValueError, LeaderboardError, RecursionError):
            return None

    def write_record(self, name: str, record: Mapping[str, Any]) -> Path:
        """Store the record of a check."""
        path = self.path / CHECKS / f"{self.entry(name).name}.json"
        path.parent.mkdir(exist_ok=True)
        write_atomic(path, (json.dumps(record, indent=1, sort_keys=True) + "\n").encode())
        return path


def _downloaded(where: str) -> Path:
    remote = snapshots.Remote.parse(where)
    found = snapshots.list_files(remote, lambda path: bool(IN_BOARD.fullmatch(path)), max_bytes=_LARGEST_BOARD)
    folder = cache_folder("boards") / remote.repo.replace("/", "--") / found.commit
    with snapshots.download(found, folder):
        pass
    return folder


def submit(run: str | Path, board: BoardFolder, name: str) -> Path:
    """Make an entry of a board from the run folder of an evaluation; returns its folder.

    Raises :class:`LeaderboardError` if the entry exists or holds what looks like a secret, and
    :class:`~clawgym.errors.RunFolderError` if ``run`` is not a run folder.
    """
    folder = RunFolder.read(run)
    if folder.manifest.kind != "eval" or not folder.rows:
        raise RunFolderError(f"{run}: has no results of an evaluation: give the folder of `clawgym eval`")
    target = board.entry(name)
    if target.exists():
        raise LeaderboardError(f"{target} exists: choose another --entry")
    staging = target.with_name(f".{name}.part")
    shutil.rmtree(staging, ignore_errors=True)
    kept = {folder.place_of(row) for row in folder.latest.values()}
    for path, _ in _walk(folder.path):
        if _KNOWN.fullmatch(path) and (path.count("/") < 2 or path.rpartition("/")[0] in kept):
            (staging / path).parent.mkdir(parents=True, exist_ok=True)
            try:
                data = read_below(folder.path, path, _MAX_FILE)
                if found := [line for pair in texts_of(path, data) for line in find_secrets(*pair)]:
                    raise LeaderboardError(f"{found[0]}: take it out of the run, and replace it where it was valid")
            except (OSError, ValueError) as error:
                raise LeaderboardError(f"{folder.path / path}: cannot be read ({error}): restore it") from error
            except ImportError as error:
                raise MissingDependency(f"entries are searched for secrets ({error}): {_EXTRA}") from error
            (staging / path).write_bytes(data)
    EntryFiles(staging)
    staging.rename(target)
    return target


def changed_entries(board: BoardFolder, since: str) -> list[str]:
    """Names of the entries that were added since the commit ``since`` of the board's git repository.

    Raises :class:`LeaderboardError` if anything else was changed: a submission may only add files below a new folder of
    ``entries``.
    """
    root = _git(board.path, "rev-parse", "--show-toplevel").strip()
    prefix = board.path.resolve().relative_to(Path(root).resolve()).as_posix()
    prefix = "" if prefix == "." else f"{prefix}/"
    base = _git(board.path, "merge-base", since, "HEAD").strip()
    words = _git(board.path, "diff", "--no-renames", "--name-status", "-z", base, "HEAD").split("\0")
    before = set(
        _git(board.path, "ls-tree", "--full-tree", "--name-only", "-z", base, f"{prefix}{ENTRIES}/").split("\0")
    )
    names: dict[str, None] = {}
    for status, path in zip(words[::2], words[1::2], strict=False):
        parts = path.removeprefix(prefix).split("/")
        inside = path.startswith(prefix) and len(parts) > 2 and parts[0] == ENTRIES and NAME.fullmatch(parts[1])
        if status != "A" or not inside or f"{prefix}{ENTRIES}/{parts[1]}" in before:
            raise LeaderboardError(
                f"{path[:200]!r} was changed: a submission only adds files below a new folder of {ENTRIES}/: take the "
                "other changes back"
            )
        names[parts[1]] = None
    return list(names)


def _git(folder: Path, *words: str) -> str:
    argv = ["git", "-C", str(folder), "-c", "core.quotePath=false", *words]
    try:
        done = subprocess.run(argv, capture_output=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LeaderboardError(f"git cannot be run ({error}): install git") from error
    if done.returncode:
        why = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or ["it failed"]
        raise LeaderboardError(f"git {words[0]}: {why[0]}: fetch the whole history, and name a commit of it")
    return done.stdout.decode("utf-8", "surrogateescape")
