"""Find what can be shown below some paths: runs, pools, trainings, audits, attacks and online services.

Invariants: no link below the given paths is followed. Depth, entries and sources are bounded; what is left out is
reported. Nothing is opened but the run manifests and the first bytes of databases.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from clawgym.errors import RunFolderError
from clawgym.files import open_below
from clawgym.records.run_folder import LOCK, MANIFEST
from clawgym.reporting.page import source_id
from clawgym.viewer.index import read_manifest

__all__ = ["FoundSource", "Search", "find", "is_alive", "writer"]

_DEPTH, _ENTRIES, _SOURCES = 8, 200_000, 2_000
_SKIPPED = {
    *("episodes", "pictures", "checkpoints", "node_modules", "__pycache__", "site-packages"),
    *(".git", ".venv", ".cache", ".hypothesis"),
}
"""Folders that hold no sources, or too many files."""
_WATCHED = {
    "run": (MANIFEST, "results.jsonl", LOCK, "verification.json"),
    "training": (MANIFEST, "metrics.jsonl", "evaluations.jsonl", "timeline.jsonl", LOCK),
    "audit": (MANIFEST, "audit.json", LOCK),
    "attack": (MANIFEST, "attack.json", LOCK),
    "experiment": (MANIFEST, "results.json", LOCK),
    "online": ("service.json", "address.json", "versions/log.jsonl", "gate/latest.json", "gate/watch.json"),
}
_KINDS = {"train": "training", "audit": "audit", "attack": "attack", "bench": "experiment"}
"""Kind of a run manifest -> kind of the source; any other is a run."""
_POOL = b"Claw"
"""The mark of a pool in the header of its file."""


@dataclass(frozen=True)
class FoundSource:
    """One thing that can be shown."""

    id: str
    kind: str
    path: Path
    problem: str = ""
    """Why it cannot be read; otherwise empty."""

    def signature(self) -> tuple[object, ...]:
        """Changes with the files that it is shown from."""
        if self.kind == "pool":
            files = [self.path, self.path.with_name(f"{self.path.name}-wal")]
        else:
            files = [self.path / name for name in _WATCHED[self.kind]]
        return tuple(map(_stamp, files))

    def changed(self) -> float:
        """When a file of it was last written, in seconds since 1970."""
        return max((stamp[2] / 1e9 for stamp in self.signature() if isinstance(stamp, tuple)), default=0.0)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        info = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return info.st_ino, info.st_size, info.st_mtime_ns


@dataclass
class Search:
    """What :func:`find` found."""

    sources: list[FoundSource] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def find(paths: Iterable[Path]) -> Search:
    """Search the paths, which are folders or files."""
    search = Search()
    entries = 0
    seen: set[tuple[int, int]] = set()
    waiting: list[tuple[Path, int]] = []
    for path in paths:
        try:
            mode = path.stat().st_mode
        except OSError as error:
            search.problems.append(f"{path}: {error.strerror}: give a folder or a file that exists")
            continue
        if stat.S_ISDIR(mode):
            waiting.append((path.resolve(), 0))
        elif not _take(search, _of_file(path.resolve())):
            search.problems.append(f"{path}: is not a pool: give a run folder, a pool, or a folder that contains some")
    while waiting:
        folder, depth = waiting.pop()
        try:
            info = folder.stat(follow_symlinks=False)
            with os.scandir(folder) as listed:
                inside = sorted(listed, key=lambda entry: entry.name)
        except OSError as error:
            search.problems.append(f"{folder}: {error.strerror}")
            continue
        if (info.st_dev, info.st_ino) in seen:
            continue
        seen.add((info.st_dev, info.st_ino))
        entries += len(inside)
        if entries > _ENTRIES or len(search.sources) >= _SOURCES:
            search.problems.append(
                f"{folder} and others were not searched: there are too many files; give the folders to show"
            )
            break
        names = {entry.name for entry in inside}
        found = _of_folder(folder, names)
        _take(search, found)
        below: list[tuple[Path, int]] = []
        for entry in inside:
            if entry.is_symlink():
                continue
            if entry.is_dir(follow_symlinks=False):
                if entry.name not in _SKIPPED:
                    below.append((folder / entry.name, depth + 1))
            elif entry.name.endswith(".db"):
                _take(search, _of_file(folder / entry.name))
        if below and depth == _DEPTH:
            search.problems.append(f"{folder}: folders below it are too deep and were not searched")
        elif below:
            waiting += reversed(below)
    search.sources.sort(key=lambda source: str(source.path))
    return search


def _take(search: Search, found: FoundSource | None) -> bool:
    if found is not None and all(found.path != known.path for known in search.sources):
        search.sources.append(found)
    return found is not None


def _of_folder(folder: Path, names: set[str]) -> FoundSource | None:
    if "service.json" in names and "versions" in names:
        return FoundSource(source_id(folder.name, folder), "online", folder)
    if MANIFEST not in names:
        return None
    id = source_id(folder.name, folder)
    try:
        kind = read_manifest(folder).kind
    except RunFolderError as error:
        return FoundSource(id, "run", folder, str(error))
    return FoundSource(id, _KINDS.get(kind, "run"), folder)


def _of_file(path: Path) -> FoundSource | None:
    """The pool in a file; None if it is none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode) or not file.read(16).startswith(b"SQLite format 3"):
            return None
        file.seek(68)
        ours = file.read(4) == _POOL or _has_pool_tables(path)
    return FoundSource(source_id(path.parent.name, path), "pool", path) if ours else None


def _has_pool_tables(path: Path) -> bool:
    """Whether a database without a pool's mark is one, whose mark is still in SQLite's log."""
    if not path.with_name(f"{path.name}-wal").is_file():
        return False
    with (
        contextlib.suppress(sqlite3.Error),
        contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as db,
    ):
        return bool(db.execute("SELECT 1 FROM sqlite_master WHERE name = 'clawgym_pool'").fetchone())
    return False


def writer(folder: Path) -> int | None:
    """The process that writes a run folder now; None if there is none.

    Its lock is looked up in the list of the kernel, as trying to take it would disturb a run that begins."""
    try:
        with open_below(folder, LOCK) as file:
            pid, number = int(file.read(64)), os.fstat(file.fileno()).st_ino
    except (OSError, ValueError):
        return None
    return pid if is_alive(pid) and _is_locked(number) else None


def _is_locked(number: int) -> bool:
    """Whether a process holds a lock on a file with this inode; True where that cannot be known."""
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return True
    return any(" FLOCK " in line and f":{number} " in line for line in lines)


def is_alive(pid: object) -> bool:
    """Whether there is a process with this id."""
    if not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True
