"""Download files of a Hugging Face Hub repository, whose content is untrusted.

Invariants: a download names one commit. A file is written only below the given folder, only as a regular file, and
only if its size and hash are those that the commit lists. The number of files and of bytes is bounded before the first
byte is asked for, and counted again while they arrive.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from clawgym.errors import DownloadError, MissingDependency

__all__ = ["MAX_FILES", "ORIGIN", "Remote", "RemoteFile", "RemoteFiles", "check_paths", "download", "list_files"]

MAX_FILES = 20_000
"""Most files of one download."""
_MAX_ENTRIES = 200_000
"""Most entries of a repository that are looked at."""
_MAX_PATH, _MAX_NAME, _MAX_DEPTH = 512, 200, 16
ORIGIN = "hub.json"
"""The file of a finished download that names its repository and commit."""
_PARTS = ".parts"
"""The folder of the unfinished files of a download."""
_POINTER = b"version https://git-lfs.github.com/spec/"
_TIMEOUT = 60.0
"""Seconds without a byte after which a download fails."""
_REFERENCE = re.compile(
    r"(?:hf://)?(?:(datasets|models)/)?([\w-][\w.-]{0,95}/[\w-][\w.-]{0,95})(?:@([\w./-]{1,200}))?", re.ASCII
)
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")

Kind = Literal["model", "dataset"]


@dataclass(frozen=True, slots=True)
class Remote:
    """A repository of the Hub, and a revision of it."""

    repo: str
    """``owner/name``."""
    kind: Kind = "dataset"
    revision: str | None = None
    """A branch, a tag or a commit; ``None`` for the main branch."""

    @classmethod
    def parse(cls, text: str, kind: Kind = "dataset") -> Remote:
        """Read ``OWNER/NAME``, ``OWNER/NAME@REVISION`` or ``hf://datasets/OWNER/NAME@REVISION``.

        Raises :class:`~clawgym.errors.DownloadError` for other texts, and if the text names another ``kind``.
        """
        match = _REFERENCE.fullmatch(text)
        if match is None or ".." in text or match[1] not in (None, f"{kind}s"):
            raise DownloadError(f"{text!r} names no {kind} on the Hub: write OWNER/NAME or OWNER/NAME@REVISION")
        return cls(match[2], kind, match[3])


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a commit."""

    path: str
    size: int
    """Bytes."""
    sha256: str | None
    """Of a file in LFS."""
    blob: str
    """Git's hash of the blob: of the file, or of its pointer if it is in LFS."""


@dataclass(frozen=True)
class RemoteFiles:
    """The files of one commit that are to be downloaded."""

    remote: Remote
    commit: str
    files: tuple[RemoteFile, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(file.size for file in self.files)


def check_paths(paths: Iterable[str]) -> None:
    """Raise :class:`~clawgym.errors.DownloadError` if the files could not be written side by side below one folder, on
    any file system: a path that is absolute, leads upwards, or has a name that is too long or has control characters;
    two paths that differ only in case; a file where another path needs a folder."""
    taken: dict[str, str] = {}
    folders: dict[str, str] = {}
    for path in paths:
        parts = path.split("/")
        bad = (
            len(path) > _MAX_PATH
            or len(parts) > _MAX_DEPTH
            or any(part in ("", ".", "..") or len(part.encode("utf-8", "replace")) > _MAX_NAME for part in parts)
            or any(not char.isprintable() or char in '\\:*?"<>|' for char in path)
            or any(part.casefold() == ".git" or part.endswith((".", " ")) for part in parts)
        )
        if bad:
            raise DownloadError(f"the path {path[:80]!r} is not allowed: nothing was written, ask its author")
        key = path.casefold()
        if (other := taken.setdefault(key, path)) != path or key in folders:
            raise DownloadError(f"{path!r} and {other!r} would be one file: nothing was written, ask their author")
        for end in range(1, len(parts)):
            above = "/".join(parts[:end])
            if above.casefold() in taken or folders.setdefault(above.casefold(), above) != above:
                raise DownloadError(f"{path!r} lies below a file: nothing was written, ask its author")


def list_files(remote: Remote, wanted: Callable[[str], bool], *, max_bytes: int) -> RemoteFiles:
    """The files of a revision that ``wanted`` accepts, by path.

    Raises :class:`~clawgym.errors.DownloadError` if the Hub does not have the repository or cannot be reached, if the
    files are more than :data:`MAX_FILES` or together larger than ``max_bytes``, and for paths that are not allowed;
    :class:`~clawgym.errors.MissingDependency` without huggingface_hub.
    """
    with _hub_errors(remote):
        from huggingface_hub import HfApi

        api = HfApi(library_name="clawgym")
        info = api.repo_info(remote.repo, repo_type=remote.kind, revision=remote.revision)
        commit = str(info.sha or "")
        if not _COMMIT.fullmatch(commit):
            raise DownloadError(f"{remote.repo}: the server names no commit: try again")
        if _COMMIT.fullmatch(remote.revision or "") and commit != remote.revision:
            raise DownloadError(f"{remote.repo}: the server gave {commit}, not {remote.revision}: try again")
        files: list[RemoteFile] = []
        tree = api.list_repo_tree(remote.repo, recursive=True, revision=commit, repo_type=remote.kind)
        for number, entry in enumerate(tree):
            if number >= _MAX_ENTRIES:
                raise DownloadError(f"{remote.repo} has more than {_MAX_ENTRIES:,} entries: ask its author")
            if hasattr(entry, "tree_id") or not wanted(str(entry.path)):
                continue
            files.append(_file(entry))
            if len(files) > MAX_FILES:
                raise DownloadError(f"{remote.repo} has more than {MAX_FILES:,} files to pull: ask its author")
    check_paths(file.path for file in files)
    found = RemoteFiles(remote, commit, tuple(sorted(files, key=lambda file: file.path)))
    if found.size > max_bytes:
        raise DownloadError(
            f"{remote.repo}: {found.size / 2**30:.2f} GiB are more than the limit of {max_bytes / 2**30:g} GiB: "
            "give a larger --max-gib if you trust it"
        )
    return found


def _file(entry: Any) -> RemoteFile:
    size, lfs = entry.size, entry.lfs
    sha256 = None if lfs is None else str(lfs.sha256)
    if not isinstance(size, int) or size < 0 or (lfs is not None and lfs.size != size):
        raise DownloadError(f"{entry.path!r}: the server lists two sizes, or none: ask its author")
    if sha256 is not None and not re.fullmatch("[0-9a-f]{64}", sha256):
        raise DownloadError(f"{entry.path!r}: the server lists no SHA-256: ask its author")
    return RemoteFile(str(entry.path), size, sha256, str(entry.blob_id))


@contextmanager
def download(snapshot: RemoteFiles, folder: Path) -> Iterator[Path | None]:
    """Download the files into a hidden folder beside ``folder``, yield it, and make it ``folder`` at the end.

    Yields ``None`` if ``folder`` is a finished download of the same commit. Checked files of an interrupted call are
    kept, so the same call resumes. What the caller adds to the yielded folder becomes part of the result.

    Raises :class:`~clawgym.errors.DownloadError` if ``folder`` is something else, and if a file is not the listed one.
    """
    if os.path.lexists(folder):
        if not folder.is_symlink() and _origin(folder) == _about(snapshot):
            yield None
            return
        raise DownloadError(f"{folder} exists and is not this download: name another folder with --out, or remove it")
    staging = folder.with_name(f".{folder.name}.{snapshot.commit[:12]}.part")
    try:
        staging.mkdir(parents=True, exist_ok=True)
        if staging.is_symlink():
            raise DownloadError(f"{staging} is a link: remove it")
        for file in snapshot.files:
            _fetch(snapshot, file, staging)
        shutil.rmtree(staging / _PARTS, ignore_errors=True)
        yield staging
        (staging / ORIGIN).write_text(json.dumps(_about(snapshot), indent=1) + "\n")
        staging.rename(folder)
    except OSError as error:
        raise DownloadError(
            f"{folder}: cannot be written ({error.strerror}): make room or name another --out; the same command resumes"
        ) from error


def _about(snapshot: RemoteFiles) -> dict[str, Any]:
    return {"repo": snapshot.remote.repo, "kind": snapshot.remote.kind, "commit": snapshot.commit}


def _origin(folder: Path) -> Any:
    try:
        return json.loads((folder / ORIGIN).read_bytes())
    except (OSError, ValueError):
        return None


def _fetch(snapshot: RemoteFiles, file: RemoteFile, staging: Path) -> None:
    target = staging / PurePosixPath(file.path)
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists() and _is(target, file):
        return
    part = staging / _PARTS / hashlib.sha256(file.path.encode()).hexdigest()
    part.parent.mkdir(exist_ok=True)
    if part.is_symlink() or (part.exists() and part.stat().st_size > file.size):
        part.unlink()
    with _hub_errors(snapshot.remote):
        _stream(snapshot, file, part)
    if not _is(part, file):
        part.unlink()
        raise DownloadError(
            f"{snapshot.remote.repo}: {file.path!r} does not have the hash that the commit lists: run the same command "
            "again; if it fails again, ask its author"
        )
    if file.sha256 is None and file.size < 1024 and part.read_bytes().startswith(_POINTER):
        part.unlink()
        raise DownloadError(
            f"{snapshot.remote.repo}: {file.path!r} is a pointer of Git LFS in place of the file: ask its author"
        )
    part.replace(target)


def _stream(snapshot: RemoteFiles, file: RemoteFile, part: Path) -> None:
    """Append to ``part`` what it lacks."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    remote = snapshot.remote
    url = hf_hub_url(remote.repo, file.path, repo_type=remote.kind, revision=snapshot.commit)
    have = part.stat().st_size if part.exists() else 0
    if have == file.size and part.exists():
        return
    headers = {**build_hf_headers(library_name="clawgym"), "accept-encoding": "identity"}
    if have:
        headers["range"] = f"bytes={have}-"
    with get_session().stream("GET", url, headers=headers, timeout=_TIMEOUT) as response:
        hf_raise_for_status(response)
        if have and response.status_code != 206:
            have = 0
        flags = os.O_WRONLY | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
        with open(os.open(part, flags | (0 if have else os.O_TRUNC), 0o644), "wb") as out:
            out.seek(have)
            for chunk in response.iter_raw(2**16):
                have += len(chunk)
                if have > file.size:
                    raise DownloadError(
                        f"{remote.repo}: {file.path!r} is larger than the {file.size:,} bytes that the commit lists: "
                        "ask its author"
                    )
                out.write(chunk)


def _is(path: Path, file: RemoteFile) -> bool:
    """Whether ``path`` is a regular file with the listed size and hash."""
    if path.is_symlink() or not path.is_file() or path.stat().st_size != file.size:
        return False
    digest = hashlib.sha256() if file.sha256 else hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
    with path.open("rb") as data:
        while chunk := data.read(2**20):
            digest.update(chunk)
    return digest.hexdigest() == (file.sha256 or file.blob)


@contextmanager
def _hub_errors(remote: Remote) -> Iterator[None]:
    """Turn errors of the client into a :class:`DownloadError`."""
    try:
        import huggingface_hub  # noqa: F401
    except ImportError as error:
        raise MissingDependency(f"the Hub needs huggingface_hub ({error}): pip install 'clawgym[hub]'") from error
    try:
        yield
    except (DownloadError, OSError) as error:
        if isinstance(error, DownloadError) or type(error).__module__ == "builtins":
            raise
        raise _failed(remote, error) from error
    except Exception as error:  # the client raises errors of its own and of its HTTP library
        raise _failed(remote, error) from error


def _failed(remote: Remote, error: BaseException) -> DownloadError:
    reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403, 404):
        return DownloadError(
            f"the Hub has no {remote.kind} {remote.repo} with this revision that you may read ({reason}): check the "
            "name, and log in with `hf auth login` or set HF_TOKEN"
        )
    return DownloadError(f"{remote.repo} was not pulled ({reason}): run the same command again to resume")
