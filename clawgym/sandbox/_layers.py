"""Copying a box's writable layer as it is: whiteouts, opaque folders, links; owners mapped to this user."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path

from clawgym.sandbox import _linux

__all__ = ["copy_layer"]

_OPAQUE = "user.overlay.opaque"


def copy_layer(layer: int, kind: str, target: Path) -> None:
    """Copy the folder ``kind`` below the descriptor ``layer`` to the new folder ``target``.

    Raises OSError; FileNotFoundError if the layer has no such folder.
    """
    top = _linux.open_beneath(layer, kind, os.O_RDONLY | os.O_DIRECTORY)
    target.mkdir(mode=0o700)
    stack = [(top, target)]
    try:
        while stack:
            folder, into = stack.pop()
            try:
                info = os.fstat(folder)
                for child in os.listdir(folder):
                    inner = _copy(folder, child, into / child)
                    if inner is not None:
                        stack.append((inner, into / child))
                try:
                    os.setxattr(into, _OPAQUE, os.getxattr(folder, _OPAQUE))
                except OSError:
                    pass
                into.chmod(stat.S_IMODE(info.st_mode) | 0o700)
            finally:
                os.close(folder)
    finally:
        for fd, _ in stack:
            os.close(fd)


def _copy(folder: int, child: str, target: Path) -> int | None:
    """Copy one entry; for a folder, make it and return a descriptor to go on with."""
    info = os.stat(child, dir_fd=folder, follow_symlinks=False)
    mode = stat.S_IMODE(info.st_mode) & 0o777
    if stat.S_ISDIR(info.st_mode):
        target.mkdir(mode=0o700)
        try:
            return _linux.open_beneath(folder, child, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            if error.errno == errno.EXDEV:  # another mount, so not of this layer
                return None
            raise
    if stat.S_ISLNK(info.st_mode):
        target.symlink_to(os.readlink(child, dir_fd=folder))
    elif stat.S_ISCHR(info.st_mode) and info.st_rdev == 0:  # a whiteout; anybody may make one
        os.mknod(target, stat.S_IFCHR | 0o600, 0)
    elif stat.S_ISFIFO(info.st_mode):
        os.mkfifo(target, mode)
    elif stat.S_ISREG(info.st_mode):
        fd = _linux.open_beneath(folder, child, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        with os.fdopen(fd, "rb") as source, target.open("xb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
            os.fchmod(out.fileno(), mode)
        os.utime(target, ns=(info.st_atime_ns, info.st_mtime_ns))
    return None  # sockets mean nothing in a copy
