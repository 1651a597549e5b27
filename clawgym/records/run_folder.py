"""The run folder and the run manifest: what every run leaves behind, resumable by the same command.

Invariants: an episode's files are complete on disk before its line is in ``results.jsonl``; a line is
there whole or not at all (what a killed process tore is cut off at the next opening); one process at a
time writes a folder; a folder never mixes results of two configurations.

The layout is described in ``docs/evaluation.md``.
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
from clawgym.records import Episode, Image, Outcome
from clawgym.records.atif import PICTURES, episode_to_atif, json_safe, picture_name
from clawgym.records.manifest import RunManifest, differences, make_manifest, now
from clawgym.visible import visible_lines

__all__ = [
    "KEPT_WORKSPACE",
    "RunManifest",
    "RunFolder",
    "make_manifest",
    "repair_tail",
    "result_row",
    "safe_name",
    "checksum_of",
    "write_atomic",
    "writer_of",
]

MANIFEST, RESULTS, SUMMARY, LOCK = "receipt.json", "results.jsonl", "summary.json", ".lock"
_PLAIN_ID = re.compile(r"[a-z0-9_][a-z0-9._-]{0,99}")
_TEXT_CAP = 4000
TRANSCRIPT, WORKSPACE, PROGRAM = "transcript.json", "workspace.tar.gz", "agent.tar.gz"
"""What we recorded; what the agent left; what its own program wrote about itself, if it does."""
KEPT_WORKSPACE = 64 * 2**20
"""Largest compressed workspace that is kept, in bytes."""
_TEMPORARY = ".tmp"


def safe_name(task_id: str, sample: int) -> str:
    """A file name for one episode. No two (id, sample) share one, also where case is ignored."""
    if _PLAIN_ID.fullmatch(task_id):
        return f"{task_id}.{sample}"
    digest = hashlib.sha256(task_id.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    slug = re.sub(r"[^a-z0-9_]+", "-", task_id.lower())[:60].strip("-") or "task"
    return f"{slug}~{digest}.{sample}"


def result_row(episode: Episode, *, attempt: int = 0) -> dict[str, Any]:
    """One line of ``results.jsonl``: the episode without transcript, tokens and workspace."""
    result = None
    if episode.result is not None:
        result = {f.name: getattr(episode.result, f.name) for f in dataclasses.fields(episode.result)}
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
        }
    )


def checksum_of(row: Mapping[str, Any]) -> str:
    """Hex SHA-256 over a row without its ``seal``: shows that a line was edited, not who did it."""
    plain = {key: value for key, value in row.items() if key != "seal"}
    return hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def repair_tail(path: Path) -> int:
    """Cut a torn last line off a JSON-lines file; how many bytes went."""
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


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a ``results.jsonl``; an unfinished last line is passed over."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    rows = []
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or not isinstance(row.get("key"), str):
            raise RunFolderError(f"{path}: line {number} is damaged: delete that line, and its episode is run again")
        rows.append(row)
    return rows


_MEND = {
    errno.ENOSPC: "make room on that disk",
    errno.EDQUOT: "make room in your quota",
    errno.EACCES: "make it writable",
    errno.EPERM: "make it writable",
    errno.EROFS: "make it writable",
}


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn the system's refusal to write ``path`` into a :class:`RunFolderError` with the mend."""
    try:
        yield
    except OSError as error:
        mend = _MEND.get(error.errno or 0, "see what ails that disk")
        raise RunFolderError(
            f"{path}: cannot be written ({error.strerror}): {mend}, then run the same command to continue; "
            "what was finished is kept"
        ) from error


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file whole or not at all. Raises :class:`RunFolderError`."""
    temporary = path.with_name(f".{path.name}{_TEMPORARY}")
    with _writing(path):
        try:
            with temporary.open("wb") as file:
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
    """A run folder. Make one with :meth:`open` (to write) or :meth:`read`. Safe to use from several threads."""

    def __init__(self, path: Path, manifest: RunManifest, rows: list[dict[str, Any]], lock: _Lock | None) -> None:
        self.path = path
        self.manifest = manifest
        self.rows = rows
        """Every line of ``results.jsonl``, in order; retried episodes have several."""
        self._lock = lock
        self._append = threading.Lock()
        self._picture = threading.Lock()

    @classmethod
    def open(cls, path: str | Path, manifest: RunManifest) -> Self:
        """Create the folder, or resume it if its run manifest has the same identity.

        Raises :class:`RunFolderError` if it belongs to another configuration, if another process is
        writing it, or if it holds something else.
        """
        path = Path(path)
        manifest = RunManifest.from_dict(manifest.to_dict())
        if path.exists() and not path.is_dir():
            raise RunFolderError(f"{path} is not a folder: choose another --out")
        if path.is_dir() and not (path / MANIFEST).exists() and any(map(_foreign, path.iterdir())):
            raise RunFolderError(f"{path} holds other files and no {MANIFEST}: choose another --out")
        with _writing(path):
            path.mkdir(parents=True, exist_ok=True)
            path.chmod(0o700)  # what agents and people said is nobody else's to read; earlier versions left it open
            lock = _Lock(path)
        try:
            if (path / MANIFEST).exists():
                manifest = _resume(path, manifest)
                for torn in (path / PICTURES).glob(f".*{_TEMPORARY}"):  # no later write has the same name
                    torn.unlink(missing_ok=True)
            write_atomic(path / MANIFEST, _json_bytes(manifest.to_dict()))
            results = path / RESULTS
            with _writing(results):
                results.touch()
                repair_tail(results)
            return cls(path, manifest, read_rows(results), lock)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Open for reading only; also while another process writes it."""
        path = Path(path)
        return cls(path, _read_manifest(path), read_rows(path / RESULTS), None)

    @property
    def latest(self) -> dict[str, dict[str, Any]]:
        """The last row of each episode, by key."""
        return {row["key"]: row for row in self.rows}

    @property
    def done(self) -> set[str]:
        """Keys that need no further run: the last attempt was not ``infra``."""
        return {key for key, row in self.latest.items() if row["outcome"] != Outcome.INFRA}

    def episode_folder(self, task_id: str, sample: int) -> Path:
        """Where one episode's files are."""
        return self.path / "episodes" / safe_name(task_id, sample)

    def record(
        self, episode: Episode, *, attempt: int = 0, agent_version: str = "", model: str | None = None
    ) -> dict[str, Any]:
        """Write the episode's files, then its line; returns that row."""
        folder = self.episode_folder(episode.task_id, episode.sample)
        with _writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        row = result_row(episode, attempt=attempt)
        for step in episode.steps:
            for seen in step.observations:
                if seen.image is not None:
                    self._keep(seen.image)
        transcript = _json_bytes(episode_to_atif(episode, agent_version=agent_version, model=model))
        write_atomic(folder / TRANSCRIPT, transcript)
        row["files"] = {TRANSCRIPT: hashlib.sha256(transcript).hexdigest()}
        workspace = episode.workspace
        if workspace is not None and len(workspace) > KEPT_WORKSPACE:
            row["dropped"].append(
                f"{WORKSPACE}: not kept: {len(workspace) >> 20} MiB, over the {KEPT_WORKSPACE >> 20} MiB kept"
            )
            workspace = None
        if workspace is not None:
            write_atomic(folder / WORKSPACE, workspace)
            row["files"][WORKSPACE] = hashlib.sha256(workspace).hexdigest()
        else:
            with _writing(folder):
                (folder / WORKSPACE).unlink(missing_ok=True)  # an earlier attempt's
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

    def _keep(self, image: Image) -> None:
        """Write a picture, once for the whole run. Its name is its digest, which the transcript pins."""
        if (name := picture_name(image)) is None:
            return
        path = self.path / PICTURES / name
        with self._picture, _writing(path):  # several episodes may have seen the same at once
            if not path.exists():
                path.parent.mkdir(exist_ok=True)
                write_atomic(path, image.data)

    def append(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Append one row; on return it is on disk. A failed append leaves the file as it was."""
        self._check_writable()
        line: dict[str, Any] = json_safe(row)
        line["seal"] = checksum_of(line)
        data = json.dumps(line, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        results = self.path / RESULTS
        with self._append, _writing(results), results.open("ab", buffering=0) as file:
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
        """Write one file of the folder itself (``summary.json``, ``report.html``), atomically."""
        self._check_writable()
        write_atomic(self.path / name, data)
        return self.path / name

    def write_json(self, name: str, value: Any) -> Path:
        """:meth:`write` for JSON data."""
        return self.write(name, _json_bytes(json_safe(value)))

    def close(self) -> None:
        """Let other processes write the folder. Idempotent."""
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
    """A gzipped tar, the same for the same files. Names come out of a box: a tar may hold any, a folder may not."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in sorted(files.items()):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return gzip.compress(buffer.getvalue(), 6, mtime=0)


def _foreign(path: Path) -> bool:
    """Whether a file is none that an opening leaves which was cut off before the run manifest was there."""
    return path.name not in (LOCK, f".{MANIFEST}{_TEMPORARY}")


def _read_manifest(path: Path) -> RunManifest:
    try:
        return RunManifest.from_dict(json.loads((path / MANIFEST).read_bytes()))
    except FileNotFoundError:
        raise RunFolderError(f"{path} has no {MANIFEST}: give a run folder") from None
    except (ValueError, TypeError) as error:
        raise RunFolderError(f"{path / MANIFEST} is damaged ({error}): restore it or choose another --out") from error


def _resume(path: Path, manifest: RunManifest) -> RunManifest:
    """The stored run manifest with this opening added, if the two have the same identity."""
    stored = _read_manifest(path)
    _same_endpoint(path, stored, manifest)
    found = differences(stored.identity, manifest.identity)
    if found:
        shown = "; ".join(found[:4]) + (f"; and {len(found) - 4} more" if len(found) > 4 else "")
        restore = "put the changed tasks back, or " if any(line.startswith("tasks.") for line in found) else ""
        raise RunFolderError(f"{path} belongs to another configuration ({shown}): {restore}choose another --out")
    if manifest.samples < stored.samples:
        raise RunFolderError(
            f"{path} has {stored.samples} episodes of each task, and {manifest.samples} are asked for: give "
            f"-k {stored.samples} (or more) to continue it, or choose another --out"
        )
    opening = {name: getattr(manifest, name) for name in ("created", "library", "grader", "platform")}
    return dataclasses.replace(stored, samples=manifest.samples, resumed=(*stored.resumed, opening))


def _same_endpoint(path: Path, stored: RunManifest, manifest: RunManifest) -> None:
    """Raise :class:`RunFolderError` where the run was made with another endpoint than is asked for now."""
    there, asked = stored.engine.get("base_url"), manifest.engine.get("base_url")
    if asked is None or there == asked:
        return
    if there is None:  # before 0.2, only the host was stored
        raise RunFolderError(
            f"{path} was made by an earlier version, or without {asked}: results of two endpoints are never mixed in a "
            "folder: choose another --out"
        )
    raise RunFolderError(
        f"{path} was made with the endpoint {there}, not {asked}: results of two endpoints are never mixed in a "
        f"folder: give --base-url {there} to continue it, or choose another --out"
    )


def writer_of(path: str | Path) -> int | None:
    """The process that writes the run folder at ``path``, if one does now. Raises :class:`RunFolderError` for what is
    no run folder."""
    path = Path(path)
    _read_manifest(path)
    try:
        owner = (path / LOCK).read_text().strip()
    except OSError:
        return None
    return int(owner) if _alive(owner) else None


class _Lock:
    """An exclusive ``flock``. A child that outlives a killed owner for a moment is waited for."""

    def __init__(self, path: Path, patience: float = 5.0) -> None:
        try:
            import fcntl
        except ImportError:  # not a POSIX system: nothing to lock with
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
