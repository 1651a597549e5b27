"""Read files of an untrusted folder.

Invariants: no link below the given folder is followed, so nothing outside of it is read. Only regular files are read,
opening one never blocks, and no more than the limit is held in memory.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path, PurePosixPath
from typing import BinaryIO

__all__ = ["LARGEST_FILE", "open_below", "read_below"]

LARGEST_FILE = 256 * 2**20
"""Most bytes of one file."""


def read_below(folder: Path, name: str, limit: int = LARGEST_FILE) -> bytes:
    """Read the regular file ``name``, a relative path, below ``folder``.

    Raises OSError with ``strerror`` for the message: a link in the path (ELOOP), not a regular file (EINVAL), a path
    out of the folder (EXDEV), more than ``limit`` bytes (EFBIG), or a file that cannot be opened.
    """
    with open_below(folder, name) as file:
        if os.fstat(file.fileno()).st_size <= limit:
            content = file.read(limit + 1)  # it may grow meanwhile
            if len(content) <= limit:
                return content
        raise OSError(errno.EFBIG, f"is larger than {limit} bytes")


def open_below(folder: Path, name: str) -> BinaryIO:
    """Open the regular file ``name``, a relative path, below ``folder`` for reading.

    Raises OSError with ``strerror`` for the message, as :func:`read_below` does; the size is not limited.
    """
    fd = _open_below(folder, PurePosixPath(name).parts)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file")
        return open(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def _open_below(folder: Path, parts: tuple[str, ...]) -> int:
    if not parts or ".." in parts or parts[0].startswith("/"):
        raise OSError(errno.EXDEV, "is not below the folder")
    if os.open not in os.supports_dir_fd:  # Windows, where links can only be checked beforehand
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
