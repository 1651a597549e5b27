"""Read the files of a git repository at a commit without executing anything from it.

Invariant: only git objects are read (``ls-tree``, ``cat-file``). Hooks, attributes, filters and settings of the
repository have no effect, and nothing is fetched. A tree is written to the user's cache once; a cached tree is
complete.
"""

from __future__ import annotations

import os
import posixpath
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from clawgym.cache import cache_folder, filled
from clawgym.errors import TaskError, UnsupportedTask
from clawgym.records import TaskFile, check_relative_path

__all__ = ["REPOS", "files_at", "repositories"]

REPOS = "CLAWGYM_REPOS"
"""Environment variable with the folder of clones (``<owner>/<name>`` or ``<owner>/<name>.git``)."""
_LARGEST = 200 * 2**20
_MOST_FILES = 18_000
"""Below the limit of 20,000 entries when a workspace is copied out of a sandbox."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SAFE = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_ALLOW_PROTOCOL": "",
    "LC_ALL": "C",
}


def repositories() -> Path:
    """The folder of clones. Raises :class:`UnsupportedTask` if the variable is not set."""
    root = os.environ.get(REPOS)
    if not root:
        raise UnsupportedTask(f"${REPOS} is not set: set it to a folder with clones of the repositories, OWNER/NAME")
    return Path(root).expanduser()


def files_at(repo: str, commit: str) -> tuple[TaskFile, ...]:
    """The files of ``repo`` (``owner/name``) at ``commit`` (40 hex digits), sorted by path.

    A link is read as the file it points at if that is in the tree; other links and submodules are skipped. Raises
    :class:`UnsupportedTask`, naming repository and commit, if they are missing.
    """
    if not _COMMIT.fullmatch(commit):
        raise TaskError(f"{repo}: base_commit {commit!r} is not a commit id of 40 hex digits: correct it")
    place = cache_folder("repositories") / repo / commit
    clone = None if place.is_dir() else _clone(repo)
    if clone is not None:
        filled(place, lambda folder: _write(clone, repo, commit, folder), lambda *_: None)
    from clawgym.tasks.formats._files import walk

    return walk(place)


def _clone(repo: str) -> Path:
    root = repositories()
    for folder in (root / repo, root / f"{repo}.git"):
        for git in (folder / ".git", folder):
            if (git / "objects").is_dir() and (git / "HEAD").is_file():
                return git
    raise UnsupportedTask(f"{root / repo} is not a clone of {repo}: git clone --bare it to {root / repo}")


def _git(clone: Path, words: Sequence[str], stdin: bytes = b"") -> bytes:
    # safe.directory: a clone may belong to another user; none of its settings has an effect
    settings = ("safe.directory=*", f"core.hooksPath={os.devnull}", "core.fsmonitor=false", "protocol.allow=never")
    argv = ["git", *(word for setting in settings for word in ("-c", setting)), f"--git-dir={clone}", *words]
    env = {**_SAFE, "PATH": os.environ.get("PATH", os.defpath), "HOME": os.devnull}
    try:
        return subprocess.run(argv, input=stdin, capture_output=True, check=True, env=env, cwd="/").stdout
    except FileNotFoundError as error:
        raise UnsupportedTask("git is not installed: install it to read tasks out of repositories") from error


def _write(clone: Path, repo: str, commit: str, folder: Path) -> None:
    try:
        listed = _git(clone, ["ls-tree", "-r", "-l", "-z", "--full-tree", commit]).decode("utf-8", "surrogateescape")
    except subprocess.CalledProcessError as error:
        why = f"the clone of {repo} has no commit {commit}: git --git-dir={clone} fetch origin {commit}"
        raise UnsupportedTask(why) from error
    modes: dict[str, str] = {}
    names: dict[str, str] = {}
    total = 0
    for line in listed.split("\0")[:-1]:
        about, _, path = line.partition("\t")
        mode, kind, name, size = about.split()
        if kind == "blob":
            modes[path], names[path] = mode, name
            total += int(size)
    if total > _LARGEST or len(names) > _MOST_FILES:
        raise UnsupportedTask(
            f"{repo} at {commit} has {len(names)} files of {total >> 20} MiB, more than the limit of a workspace "
            f"({_MOST_FILES} files, {_LARGEST >> 20} MiB): leave the row out"
        )
    blobs = _blobs(clone, dict.fromkeys(names.values()))
    contents = {path: blobs[name] for path, name in names.items()}
    for path, mode in modes.items():
        data = _followed(path, modes, contents)
        if data is None:
            continue
        target = folder / check_relative_path(path, f"{repo} at {commit}")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        if mode == "100755":
            target.chmod(0o755)


def _followed(path: str, modes: dict[str, str], contents: dict[str, bytes]) -> bytes | None:
    for _ in range(8):
        if modes.get(path) != "120000":
            return contents.get(path)
        target = contents[path].decode("utf-8", "surrogateescape")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
    return None


def _blobs(clone: Path, names: dict[str, None]) -> dict[str, bytes]:
    """Contents by object name."""
    out = _git(clone, ["cat-file", "--batch"], "".join(f"{name}\n" for name in names).encode())
    found: dict[str, bytes] = {}
    at = 0
    for name in names:
        end = out.index(b"\n", at)
        head = out[at:end].split()
        if len(head) != 3:
            raise UnsupportedTask(f"{clone}: object {name} is missing: make a full clone")
        size = int(head[2])
        found[name] = out[end + 1 : end + 1 + size]
        at = end + size + 2
    return found
