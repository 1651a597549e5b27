"""Files of a folder that somebody else made, each opened once.

Invariants: below the folder that the caller names no link is followed, so nothing outside of it is read; only regular
files are read, and opening one never waits; no more than the limit is held in memory.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path, PurePosixPath

__all__ = ["LARGEST_FILE", "read_below"]

LARGEST_FILE = 256 * 2**20
"""Bytes of one file."""


def read_below(folder: Path, name: str, limit: int = LARGEST_FILE) -> bytes:
    """The content of the regular file ``name``, a relative path, below ``folder``.

    Raises OSError, whose ``strerror`` says what is wrong: a link on the way (ELOOP), another kind of file (EINVAL), a
    path out of the folder (EXDEV), more than ``limit`` bytes (EFBIG), or that it cannot be opened.
    """
    fd = _open_below(folder, PurePosixPath(name).parts)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EINVAL, "is not a regular file")
        if info.st_size <= limit:
            with open(fd, "rb", closefd=False) as file:
                content = file.read(limit + 1)  # it may grow meanwhile
            if len(content) <= limit:
                return content
        raise OSError(errno.EFBIG, f"is larger than {limit} bytes")
    finally:
        os.close(fd)


def _open_below(folder: Path, parts: tuple[str, ...]) -> int:
    if not parts or ".." in parts or parts[0].startswith("/"):
        raise OSError(errno.EXDEV, "is not below the folder")
    if os.open not in os.supports_dir_fd:  # Windows, where nothing but a look beforehand can be had
        if any(folder.joinpath(*parts[:end]).is_symlink() for end in range(1, len(parts) + 1)):
            raise OSError(errno.ELOOP, _LINK)
        return os.open(folder.joinpath(*parts), os.O_RDONLY | getattr(os, "O_BINARY", 0))
    here = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            inner = _open_at(here, part, os.O_DIRECTORY)
            os.close(here)
            here = inner
        return _open_at(here, parts[-1], os.O_NONBLOCK | os.O_NOCTTY)
    finally:
        os.close(here)


_LINK = "is a link, or lies behind one"


def _open_at(folder: int, name: str, flags: int) -> int:
    try:
        return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | flags, dir_fd=folder)
    except OSError as error:
        try:
            link = stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
        except OSError:
            link = False
        if link:
            raise OSError(errno.ELOOP, _LINK) from error
        raise
