"""The run folder: the run manifest, the results and the files of every episode. A run is resumed from it.

Invariants:

- The files of an episode are complete on disk before its line is in ``results.jsonl``.
- A line is written completely or not at all. A partial line of a killed process is removed when the folder is opened.
- One process at a time writes a folder.
- A folder never mixes results of two configurations.
- The folder may come from somebody else: no link in it is followed, neither to read nor to write.

The layout is described in ``docs/reference/files.md``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import gzip
import hashlib
import io
import json
import os
import re
import tarfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from clawgym.errors import RunFolderError
from clawgym.files import LARGEST_FILE, read_below
from clawgym.records import Episode, Image, Outcome
from clawgym.records.atif import PICTURES, episode_to_atif, json_safe, picture_name
from clawgym.records.manifest import RunManifest, differences, make_manifest, now
from clawgym.visible import visible_lines

__all__ = [
    "LARGEST_RESULTS",
    "MAX_WORKSPACE",
    "RunManifest",
    "RunFolder",
    "make_manifest",
    "repair_tail",
    "result_row",
    "safe_name",
    "checksum_of",
    "write_atomic",
]

MANIFEST, RESULTS, SUMMARY, LOCK = "receipt.json", "results.jsonl", "summary.json", ".lock"
_PLAIN_ID = re.compile(r"[a-z0-9_][a-z0-9._-]{0,99}")
_TEXT_CAP = 4000
TRANSCRIPT, WORKSPACE, PROGRAM = "transcript.json", "workspace.tar.gz", "agent.tar.gz"
"""Files of an episode: the transcript, the final workspace, and the files that the agent's program wrote about its own
work."""
MAX_WORKSPACE = 64 * 2**20
"""Largest compressed workspace that is stored, in bytes."""
LARGEST_RESULTS = 2**30
"""Most bytes of ``results.jsonl`` that are read."""
_TEMPORARY = ".tmp"


def safe_name(task_id: str, sample: int) -> str:
    """A file name for one episode, unique per (id, sample) also on file systems that ignore case."""
    if _PLAIN_ID.fullmatch(task_id):
        return f"{task_id}.{sample}"
    digest = hashlib.sha256(task_id.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    slug = re.sub(r"[^a-z0-9_]+", "-", task_id.lower())[:60].strip("-") or "task"
    return f"{slug}~{digest}.{sample}"


def result_row(episode: Episode, *, attempt: int = 0) -> dict[str, Any]:
    """The row of ``results.jsonl`` for an episode: without transcript, tokens, workspace and verifier log."""
    result = None
    if episode.result is not None:
        result = episode.result.as_dict()
        del result["log"]
    return json_safe(
        {
            "key": episode.key,
            "task_id": episode.task_id,
            "task_hash": episode.task_hash,
            "sample": episode.sample,
            "seed": episode.seed,
            "attempt": attempt,
            "agent": episode.agent,
            "outcome": str(episode.outcome),
            "cause": episode.cause,
            "fault": episode.fault and str(episode.fault),
            "result": result,
            "steps": len(episode.steps),
            "tool_calls": sum(len(step.tool_calls) for step in episode.steps),
            "usage": dataclasses.asdict(episode.usage),
            "final_message": episode.final_message[:_TEXT_CAP],
            "seconds": dict(episode.seconds),
            "dropped": list(episode.dropped),
            "finished": now(),
            **({} if episode.session is None else {"session": episode.session}),
        }
    )


def checksum_of(row: Mapping[str, Any]) -> str:
    """Checksum of a row, stored under its key ``seal``: hex SHA-256 over the other keys.

    It detects edits, unless it was recomputed.
    """
    plain = {key: value for key, value in row.items() if key != "seal"}
    return hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def repair_tail(path: Path) -> int:
    """Remove an incomplete last line from a JSON Lines file. Returns the number of bytes removed."""
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        end = size
        while end > 0:
            start = max(0, end - 65536)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            file.truncate(end)
            os.fsync(file.fileno())
    return size - end


def _read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows of ``results.jsonl`` below ``path``; an incomplete last line is ignored.

    Raises :class:`RunFolderError` for a damaged line, and for a file that cannot be read.
    """
    try:
        data = read_below(path, RESULTS, LARGEST_RESULTS)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _unreadable(path / RESULTS, error) from error
    path = path / RESULTS
    rows = []
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or not isinstance(row.get("key"), str):
            raise RunFolderError(f"{path}: line {number} is damaged: delete the line to run its episode again")
        rows.append(row)
    return rows


_REMEDY = {
    errno.ENOSPC: "free space on that disk",
    errno.EDQUOT: "free space in your quota",
    errno.EACCES: "make it writable",
    errno.EPERM: "make it writable",
    errno.EROFS: "make it writable",
}


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn an OSError of writing ``path`` into a :class:`RunFolderError` that says how to fix it."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDY.get(error.errno or 0, "check that disk")
        raise RunFolderError(
            f"{path}: cannot be written ({error.strerror}): {remedy}, then run the same command again to resume; "
            "finished results are kept"
        ) from error


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file atomically and sync it. Raises :class:`RunFolderError` if it cannot be written."""
    temporary = path.with_name(f".{path.name}{_TEMPORARY}")
    with _writing(path):
        try:
            temporary.unlink(missing_ok=True)  # of a killed process, or a link that somebody planted
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise


def _json_bytes(value: Any) -> bytes:
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()


class RunFolder:
    """A run folder. Create it with :meth:`open` (to write) or :meth:`read`. Thread-safe."""

    def __init__(self, path: Path, manifest: RunManifest, rows: list[dict[str, Any]], lock: _Lock | None) -> None:
        self.path = path
        self.manifest = manifest
        self.rows = rows
        """Every row of ``results.jsonl``, in order. Retried episodes have several."""
        self._lock = lock
        self._append_lock = threading.Lock()
        self._picture_lock = threading.Lock()

    @classmethod
    def open(cls, path: str | Path, manifest: RunManifest) -> Self:
        """Create the folder, or resume it if its run manifest has the same identity.

        Raises :class:`RunFolderError` if the folder belongs to another configuration, is being written by another
        process, or contains other files.
        """
        path = Path(path)
        manifest = RunManifest.from_dict(manifest.to_dict())
        if path.exists() and not path.is_dir():
            raise RunFolderError(f"{path} is not a folder: choose another --out")
        if path.is_dir() and not (path / MANIFEST).exists() and any(map(_foreign, path.iterdir())):
            raise RunFolderError(f"{path} contains other files and no {MANIFEST}: choose another --out")
        with _writing(path):
            path.mkdir(parents=True, exist_ok=True)
            path.chmod(0o700)  # transcripts are private; folders of earlier versions were readable by others
            for inner in path.iterdir():
                _refuse_link(inner)
            lock = _Lock(path)
        try:
            if (path / MANIFEST).exists():
                manifest = _resume(path, manifest)
                for partial in (path / PICTURES).glob(f".*{_TEMPORARY}"):  # left by a killed process
                    partial.unlink(missing_ok=True)
            write_atomic(path / MANIFEST, _json_bytes(manifest.to_dict()))
            results = path / RESULTS
            with _writing(results):
                results.touch()
                repair_tail(results)
            return cls(path, manifest, _read_rows(path), lock)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Open a folder for reading, also while another process writes it.

        Raises :class:`RunFolderError` if it is not a run folder, or damaged.
        """
        path = Path(path)
        return cls(path, _read_manifest(path), _read_rows(path), None)

    def read_file(self, name: str, limit: int = LARGEST_FILE) -> bytes:
        """Read the file ``name``, a relative path, of at most ``limit`` bytes.

        Raises OSError as :func:`clawgym.files.read_below` does: no link is followed.
        """
        return read_below(self.path, name, limit)

    @property
    def latest(self) -> dict[str, dict[str, Any]]:
        """The last row of each episode, by key."""
        return {row["key"]: row for row in self.rows}

    @property
    def done(self) -> set[str]:
        """Keys of the episodes whose last attempt did not end by an infrastructure error."""
        return {key for key, row in self.latest.items() if row["outcome"] != Outcome.INFRA}

    def episode_folder(self, task_id: str, sample: int) -> Path:
        """The folder of one episode's files."""
        return self.path / "episodes" / safe_name(task_id, sample)

    def read_of(self, row: Mapping[str, Any], name: str, limit: int = LARGEST_FILE) -> bytes:
        """:meth:`read_file` for the file ``name`` of the episode of ``row``."""
        return self.read_file(f"{self.place_of(row)}/{name}", limit)

    def place_of(self, row: Mapping[str, Any]) -> str:
        """The folder of the files of the episode of ``row``, relative to the run folder, with slashes."""
        return self.episode_folder(row["task_id"], row["sample"]).relative_to(self.path).as_posix()

    def record(
        self, episode: Episode, *, attempt: int = 0, agent_version: str = "", model: str | None = None
    ) -> dict[str, Any]:
        """Write the episode's files, then its row; returns the row.

        ``attempt``: index of the attempt, from 0. ``model``: name of the model for the transcript. Raises
        :class:`RunFolderError` if a file cannot be written.
        """
        folder = self.episode_folder(episode.task_id, episode.sample)
        _refuse_link(folder)
        with _writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        row = result_row(episode, attempt=attempt)
        for step in episode.steps:
            for seen in step.observations:
                if seen.image is not None:
                    self._write_picture(seen.image)
        transcript = _json_bytes(episode_to_atif(episode, agent_version=agent_version, model=model))
        write_atomic(folder / TRANSCRIPT, transcript)
        row["files"] = {TRANSCRIPT: hashlib.sha256(transcript).hexdigest()}
        workspace = episode.workspace
        if workspace is not None and len(workspace) > MAX_WORKSPACE:
            row["dropped"].append(
                f"{WORKSPACE}: not stored: {len(workspace) >> 20} MiB, limit {MAX_WORKSPACE >> 20} MiB"
            )
            workspace = None
        if workspace is not None:
            write_atomic(folder / WORKSPACE, workspace)
            row["files"][WORKSPACE] = hashlib.sha256(workspace).hexdigest()
        else:
            with _writing(folder):
                (folder / WORKSPACE).unlink(missing_ok=True)  # of an earlier attempt
        if episode.files:
            packed = _packed(episode.files)
            write_atomic(folder / PROGRAM, packed)
            row["files"][PROGRAM] = hashlib.sha256(packed).hexdigest()
        else:
            with _writing(folder):
                (folder / PROGRAM).unlink(missing_ok=True)
        if episode.result is not None:
            write_atomic(folder / "verifier.log", visible_lines(episode.result.log).encode())
        if episode.error:
            write_atomic(folder / "error.log", visible_lines(episode.error).encode())
        return self.append(row)

    def _write_picture(self, image: Image) -> None:
        """Write a picture once per run. Its file name is its digest, to which the transcripts refer."""
        if (name := picture_name(image)) is None:
            return
        path = self.path / PICTURES / name
        with self._picture_lock, _writing(path):  # several episodes may write the same picture at once
            if not path.exists():
                path.parent.mkdir(exist_ok=True)
                write_atomic(path, image.data)

    def append(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Append one row, with its checksum, and sync it to disk; returns the stored row.

        Raises :class:`RunFolderError` if it cannot be written; the file is then unchanged.
        """
        self._check_writable()
        line: dict[str, Any] = json_safe(row)
        line["seal"] = checksum_of(line)
        data = json.dumps(line, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        results = self.path / RESULTS
        with self._append_lock, _writing(results), results.open("ab", buffering=0) as file:
            before = os.fstat(file.fileno()).st_size
            try:
                view = memoryview(data)
                while view:
                    view = view[file.write(view) :]
                os.fsync(file.fileno())
            except OSError:
                file.truncate(before)
                raise
            self.rows.append(line)
        return line

    def write(self, name: str, data: bytes) -> Path:
        """Write a file of the folder (``summary.json``, ``report.html``) atomically; returns its path."""
        self._check_writable()
        write_atomic(self.path / name, data)
        return self.path / name

    def write_json(self, name: str, value: Any) -> Path:
        """:meth:`write` for JSON data."""
        return self.write(name, _json_bytes(json_safe(value)))

    def close(self) -> None:
        """Release the lock, so that other processes can write the folder. Idempotent."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_writable(self) -> None:
        if self._lock is None:
            raise RunFolderError(f"{self.path} is open for reading only: use RunFolder.open")


def _packed(files: Mapping[str, bytes]) -> bytes:
    """A deterministic gzipped tar. File names are untrusted, so the files are not written to a folder."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in sorted(files.items()):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return gzip.compress(buffer.getvalue(), 6, mtime=0)


def _refuse_link(path: Path) -> None:
    if path.is_symlink():
        raise RunFolderError(f"{path} is a link, which could lead out of the run: remove it, or choose another --out")


def _unreadable(path: Path, error: OSError) -> RunFolderError:
    return RunFolderError(f"{path}: cannot be read ({error.strerror}): restore it, or give another run folder")


def _foreign(path: Path) -> bool:
    """Whether a file was not written by :meth:`RunFolder.open`; it may have been killed before the manifest existed."""
    return path.name not in (LOCK, f".{MANIFEST}{_TEMPORARY}")


def _read_manifest(path: Path) -> RunManifest:
    try:
        return RunManifest.from_dict(json.loads(read_below(path, MANIFEST)))
    except (FileNotFoundError, NotADirectoryError):
        raise RunFolderError(f"{path} has no {MANIFEST}: give a run folder") from None
    except OSError as error:
        raise _unreadable(path / MANIFEST, error) from error
    except (ValueError, TypeError, RecursionError) as error:
        raise RunFolderError(f"{path / MANIFEST} is damaged ({error}): restore it or choose another --out") from error


def _resume(path: Path, manifest: RunManifest) -> RunManifest:
    """The stored run manifest with an entry for this resumption.

    Raises :class:`RunFolderError` if the two manifests differ in their identity.
    """
    stored = _read_manifest(path)
    _same_endpoint(path, stored, manifest)
    found = differences(stored.identity, manifest.identity)
    if found:
        shown = "; ".join(found[:4]) + (f"; and {len(found) - 4} more" if len(found) > 4 else "")
        restore = "restore the changed tasks, or " if any(line.startswith("tasks.") for line in found) else ""
        raise RunFolderError(f"{path} belongs to another configuration ({shown}): {restore}choose another --out")
    if manifest.samples < stored.samples:
        raise RunFolderError(
            f"{path} has {stored.samples} samples per task, more than the requested {manifest.samples}: give "
            f"-k {stored.samples} (or more) to resume it, or choose another --out"
        )
    opening = {name: getattr(manifest, name) for name in ("created", "library", "grader", "platform")}
    return dataclasses.replace(stored, samples=manifest.samples, resumed=(*stored.resumed, opening))


def _same_endpoint(path: Path, stored: RunManifest, manifest: RunManifest) -> None:
    """Raise :class:`RunFolderError` if the stored run used another endpoint."""
    old, new = stored.engine.get("base_url"), manifest.engine.get("base_url")
    if new is None or old == new:
        return
    if old is None:  # before 0.2, only the host was stored
        raise RunFolderError(
            f"{path} was made by an earlier version, or without {new}: results of two endpoints are never mixed in a "
            "folder: choose another --out"
        )
    raise RunFolderError(
        f"{path} was made with the endpoint {old}, not {new}: results of two endpoints are never mixed in a "
        f"folder: give --base-url {old} to resume it, or choose another --out"
    )


class _Lock:
    """An exclusive ``flock`` on a run folder.

    Waits up to ``patience`` seconds for the children of a killed owner, which may hold the lock for a moment.
    """

    def __init__(self, path: Path, patience: float = 5.0) -> None:
        try:
            import fcntl
        except ImportError:  # not a POSIX system, so there are no locks
            self._file = None
            return
        self._file = (path / LOCK).open("a+")
        deadline = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                self._file.seek(0)
                owner = self._file.read().strip()
                if _alive(owner) or time.monotonic() > deadline:
                    self._file.close()
                    raise RunFolderError(
                        f"{path} is being written by process {owner or 'unknown'}: wait for it, or choose another --out"
                    ) from None
                time.sleep(0.1)
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True
