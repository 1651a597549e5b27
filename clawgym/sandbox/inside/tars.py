"""Write a tar of a tree that hostile code made. Standard library only; the source also runs inside containers."""

from __future__ import annotations

import errno
import os
import stat
import tarfile

from clawgym.sandbox.inside.trees import Room, Visitor, open_file

__all__ = ["Tarred"]

_LATEST = 1 << 33
"""Seconds since 1970. Not every file system can store a later time."""


class _FixedLength:
    """Reads exactly ``size`` bytes of a file that may change meanwhile; missing bytes are zeros."""

    def __init__(self, fd: int, size: int) -> None:
        self._fd, self._left = fd, size

    def read(self, size: int) -> bytes:
        size = min(size, self._left)
        try:
            data = os.read(self._fd, size)
        except OSError as error:
            raise OSError(errno.EIO, error.strerror) from error
        data += bytes(size - len(data))
        self._left -= size
        return data


class Tarred(Visitor):
    """Writes the entries of a walk to ``tar``, with names below ``top``. Sockets and devices are left out."""

    def __init__(self, tar: tarfile.TarFile, room: Room, top: str = "", force: bool = False) -> None:
        self._tar, self._room, self._force = tar, room, force
        self._top = f"{top}/" if top else ""

    def head(self, folder: int) -> None:
        """Add the top folder itself."""
        self._tar.addfile(_about(self._top.rstrip("/"), os.fstat(folder), tarfile.DIRTYPE))

    def entry(self, folder: int, name: str, path: str, info: os.stat_result) -> bool:
        if stat.S_ISDIR(info.st_mode):
            if info.st_dev != os.fstat(folder).st_dev:  # a mounted file system
                return False
            self._tar.addfile(_about(self._top + path, info, tarfile.DIRTYPE))
            return True
        if stat.S_ISLNK(info.st_mode):
            about = _about(self._top + path, info, tarfile.SYMTYPE)
            about.linkname = os.readlink(name, dir_fd=folder)
            self._room.name(len(os.fsencode(about.linkname)))
            self._tar.addfile(about)
        elif stat.S_ISFIFO(info.st_mode):
            self._tar.addfile(_about(self._top + path, info, tarfile.FIFOTYPE))
        elif stat.S_ISREG(info.st_mode):
            self._room.data(info.st_size)  # a sparse file is free to make, but can hold terabytes of zeros
            about = _about(self._top + path, info, tarfile.REGTYPE)
            about.size = info.st_size
            fd = open_file(folder, name, self._force)
            try:
                self._tar.addfile(about, _FixedLength(fd, info.st_size))  # type: ignore[arg-type]
            finally:
                os.close(fd)
        return False


def _about(name: str, info: os.stat_result, kind: bytes) -> tarfile.TarInfo:
    about = tarfile.TarInfo(name)
    about.type, about.mode = kind, stat.S_IMODE(info.st_mode) & 0o777
    about.mtime = min(max(0, int(info.st_mtime)), _LATEST)
    return about
