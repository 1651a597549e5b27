"""A folder that must stay as it was: made read-only, its every entry listed, compared with that list later."""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ["LIST", "compare", "remove", "seal"]

LIST = "files.gz"
"""The list, in the folder itself: ``mode size sha256 path`` of each entry, sorted by path, each ended by NUL."""

_Tell = Callable[[int], None]
_SHOWN = 5  # of the differences found


def _entries(top: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Every entry below ``top`` but files right in it, by path relative to it, parents first."""
    stack = [entry.name for entry in os.scandir(top) if entry.is_dir(follow_symlinks=False)]
    while stack:
        name = stack.pop()
        info = os.lstat(top / name)
        yield name, info
        if stat.S_ISDIR(info.st_mode):
            stack.extend(f"{name}/{child}" for child in os.listdir(top / name))


def _line(path: Path, name: str, info: os.stat_result) -> str:
    if stat.S_ISREG(info.st_mode):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        return f"{info.st_mode:o} {info.st_size} {content} {name}"
    content = hashlib.sha256(os.fsencode(os.readlink(path))).hexdigest() if stat.S_ISLNK(info.st_mode) else "-"
    return f"{info.st_mode:o} 0 {content} {name}"


def _listing(top: Path, tell: _Tell) -> list[str]:
    lines: list[str] = []
    for name, info in _entries(top):
        lines.append(_line(top / name, name, info))
        tell(len(lines))
    return sorted(lines, key=lambda line: line.split(" ", 3)[3])


def seal(top: Path, tell: _Tell) -> tuple[str, int, int, int]:
    """Take away everybody's right to write below ``top``, let everybody read, and write the list.

    Returns the digest of the list, and how many entries, files and bytes it names. Raises OSError.
    """
    for name, info in _entries(top):
        if not stat.S_ISLNK(info.st_mode):
            runs = stat.S_ISDIR(info.st_mode) or info.st_mode & 0o111
            os.chmod(top / name, 0o555 if runs else 0o444)
    lines = _listing(top, tell)
    text = "".join(f"{line}\0" for line in lines).encode("utf-8", "surrogateescape")
    (top / LIST).write_bytes(gzip.compress(text, 6, mtime=0))
    (top / LIST).chmod(0o444)
    sizes = [int(line.split(" ", 2)[1]) for line in lines if line.startswith("100")]
    return hashlib.sha256(text).hexdigest(), len(lines), len(sizes), sum(sizes)


def compare(top: Path, digest: str, tell: _Tell) -> list[str]:
    """What differs from the list that has this digest: ``path: how``, at most a few, else nothing."""
    try:
        text = gzip.decompress((top / LIST).read_bytes())
    except (OSError, EOFError, gzip.BadGzipFile) as error:
        return [f"{LIST}: cannot be read ({error})"]
    if hashlib.sha256(text).hexdigest() != digest:
        return [f"{LIST}: is not the list that was written"]
    lines = text.decode("utf-8", "surrogateescape").split("\0")[:-1]
    wanted = {line.split(" ", 3)[3]: line for line in lines}
    found: list[str] = []
    for seen, (name, info) in enumerate(_entries(top), 1):
        tell(seen)
        known = wanted.pop(name, None)
        if known is None:
            found.append(f"{name}: was added")
        elif known.split(" ", 2)[:2] != _line_head(info) or known != _line(top / name, name, info):
            found.append(f"{name}: was changed")
        if len(found) >= _SHOWN:
            return found
    return [*found, *(f"{name}: is missing" for name in sorted(wanted))][:_SHOWN]


def _line_head(info: os.stat_result) -> list[str]:
    return [f"{info.st_mode:o}", str(info.st_size if stat.S_ISREG(info.st_mode) else 0)]


def remove(top: Path) -> None:
    """Remove a folder, sealed or not, if it is there."""
    if not top.is_dir():
        return
    for folder, _, _ in os.walk(top):
        os.chmod(folder, 0o755)
    shutil.rmtree(top)
