"""Protect a folder against changes: make it read-only, write a list of its entries, compare it with the list later."""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ["LIST", "compare", "freeze", "remove"]

LIST = "files.gz"
"""Name of the list in the folder: ``mode size sha256 path`` of each entry, sorted by path, each ending with NUL."""

Report = Callable[[int], None]
_SHOWN = 5  # most differences that are returned


def _entries(top: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the relative path and status of every entry below ``top``, parents first, except files directly in it."""
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


def _listing(top: Path, report: Report) -> list[str]:
    lines: list[str] = []
    for name, info in _entries(top):
        lines.append(_line(top / name, name, info))
        report(len(lines))
    return sorted(lines, key=lambda line: line.split(" ", 3)[3])


def freeze(top: Path, report: Report) -> tuple[str, int, int, int]:
    """Make everything below ``top`` read-only and readable for all users, and write the list.

    Returns the SHA-256 of the list and the numbers of entries, files and bytes in it. Raises OSError.
    """
    for name, info in _entries(top):
        if not stat.S_ISLNK(info.st_mode):
            runs = stat.S_ISDIR(info.st_mode) or info.st_mode & 0o111
            os.chmod(top / name, 0o555 if runs else 0o444)
    lines = _listing(top, report)
    text = "".join(f"{line}\0" for line in lines).encode("utf-8", "surrogateescape")
    (top / LIST).write_bytes(gzip.compress(text, 6, mtime=0))
    (top / LIST).chmod(0o444)
    sizes = [int(line.split(" ", 2)[1]) for line in lines if line.startswith("100")]
    return hashlib.sha256(text).hexdigest(), len(lines), len(sizes), sum(sizes)


def compare(top: Path, digest: str, report: Report) -> list[str]:
    """Return differences from the list with this SHA-256, as ``path: how``: at most five, and none if all matches."""
    try:
        text = gzip.decompress((top / LIST).read_bytes())
    except (OSError, EOFError, gzip.BadGzipFile) as error:
        return [f"{LIST}: cannot be read ({error})"]
    if hashlib.sha256(text).hexdigest() != digest:
        return [f"{LIST}: was changed"]
    lines = text.decode("utf-8", "surrogateescape").split("\0")[:-1]
    wanted = {line.split(" ", 3)[3]: line for line in lines}
    found: list[str] = []
    for seen, (name, info) in enumerate(_entries(top), 1):
        report(seen)
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
    """Remove a folder, read-only or not, if it exists."""
    if not top.is_dir():
        return
    for folder, _, _ in os.walk(top):
        os.chmod(folder, 0o755)
    shutil.rmtree(top)
