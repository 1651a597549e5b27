"""Copy the files of a sandbox with whiteouts, opaque folders, links and modes; all become owned by this user."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from clawgym.sandbox.inside.trees import FOLDER, Cursor, Room, Visitor, copy_data, open_file, walk

__all__ = ["copy_tree", "most_entries", "save_folder"]

_OPAQUE = "user.overlay.opaque"


def most_entries(disk_mb: int) -> int:
    """Most files and folders in a writable layer of ``disk_mb`` MiB."""
    return max(20_000, disk_mb * 100)


def save_folder(layer: int, kind: str, target: Path, room: Room) -> None:
    """Copy the folder ``kind`` of ``layer`` to the new folder ``target``. Raises FileNotFoundError if it is missing."""
    source = os.open(kind, FOLDER, dir_fd=layer)
    try:
        target.mkdir(mode=0o700)
        into = os.open(target, FOLDER)
        try:
            copy_tree(source, into, room)
        finally:
            os.close(into)
    finally:
        os.close(source)


def copy_tree(source: int, target: int, room: Room, skip: frozenset[str] = frozenset()) -> None:
    """Copy the contents of the folder ``source``, in which nothing runs, to the empty folder ``target``.

    Left out: the paths in ``skip`` (relative to ``source``), mounts, sockets, devices and set-uid bits. Raises OSError,
    :class:`~clawgym.sandbox.inside.trees.TooMuch`.
    """
    copy = _Copy(target, room, skip)
    try:
        walk(source, copy, room, force=True)
        _finish(source, target, stat.S_IMODE(os.fstat(source).st_mode))
    finally:
        copy.into.close()


class _Copy(Visitor):
    def __init__(self, target: int, room: Room, skip: frozenset[str]) -> None:
        self.into = Cursor(target)
        self._room = room
        self._skip = skip

    def entry(self, folder: int, name: str, path: str, info: os.stat_result) -> bool:
        into, mode = self.into.fd, stat.S_IMODE(info.st_mode) & 0o1777
        if path in self._skip:
            return False
        if stat.S_ISDIR(info.st_mode):
            if info.st_dev != os.fstat(folder).st_dev:
                return False
            os.mkdir(name, 0o700, dir_fd=into)
            return True
        if stat.S_ISLNK(info.st_mode):
            target = os.readlink(name, dir_fd=folder)
            self._room.name(len(os.fsencode(target)))
            os.symlink(target, name, dir_fd=into)
            os.utime(name, ns=(info.st_atime_ns, info.st_mtime_ns), dir_fd=into, follow_symlinks=False)
        elif stat.S_ISCHR(info.st_mode) and info.st_rdev == 0:  # a whiteout, which needs no privilege to make
            os.mknod(name, stat.S_IFCHR | 0o600, 0, dir_fd=into)
        elif stat.S_ISFIFO(info.st_mode):
            os.mkfifo(name, mode, dir_fd=into)
        elif stat.S_ISREG(info.st_mode):
            self._file(folder, name, mode, info)
        return False

    def _file(self, folder: int, name: str, mode: int, info: os.stat_result) -> None:
        source = open_file(folder, name, force=True)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            target = os.open(name, flags, 0o600, dir_fd=self.into.fd)
            try:
                copy_data(source, target, info.st_size, self._room)
                os.fchmod(target, mode)
                os.utime(target, ns=(info.st_atime_ns, info.st_mtime_ns))
            finally:
                os.close(target)
        finally:
            os.close(source)

    def enter(self, name: str) -> None:
        self.into.down(name)

    def leave(self, folder: int, mode: int) -> None:
        into = os.dup(self.into.fd)
        try:
            self.into.up()  # first: the mode may forbid it
            _finish(folder, into, mode)
        finally:
            os.close(into)


def _finish(source: int, target: int, mode: int) -> None:
    """Set the attributes of a copied folder, after its contents."""
    info = os.fstat(source)
    try:
        if os.getxattr(source, _OPAQUE) == b"y":
            os.setxattr(target, _OPAQUE, b"y")
    except OSError:
        pass  # not set, or not supported by the file system
    os.fchmod(target, mode & 0o1777)
    os.utime(target, ns=(info.st_atime_ns, info.st_mtime_ns))
