"""Walk, copy and remove trees that hostile code made, whatever their depth, width, names and modes.

No function recurses into folders, follows a link, or passes the kernel a path of more than one name. A walk holds at
most four descriptors, a removal two: it goes down by name and up by ``..``, and checks that the folder it returns to is
the one it left. A tree beyond the bounds raises :class:`TooMuch`.

Standard library only, without imports from this package: the source also runs inside containers
(:func:`clawgym.sandbox.link.as_text`).
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
import time

__all__ = [
    "DEPTH",
    "FOLDER",
    "HOST_ERRORS",
    "NAMES",
    "PATH",
    "Cursor",
    "Room",
    "TooMuch",
    "Visitor",
    "copy_data",
    "open_file",
    "remove",
    "remove_tree",
    "walk",
]

DEPTH = 128
"""Most levels of nested folders."""
PATH = 3072
"""Most bytes of a path from the top of the tree: programs could not open a much longer one."""
NAMES = 8 << 20
"""Most bytes of all paths and link targets together."""
HOST_ERRORS = frozenset(
    (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EROFS, errno.ESTALE)
)
"""Errors that no tree within the bounds can cause: this machine is at fault."""
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags to open a folder."""
_BATCH = 4096


class TooMuch(Exception):
    """A tree exceeds a bound; ``bound`` is ``depth``, ``path``, ``names``, ``entries`` or ``size``."""

    def __init__(self, bound: str, text: str) -> None:
        super().__init__(text)
        self.bound = bound


class Room:
    """How much a tree may still hold. Every method raises :class:`TooMuch` when that is exceeded."""

    def __init__(self, entries: int, size: int) -> None:
        self._entries = self._entries_left = entries
        self._size = self._size_left = size
        self._names_left = NAMES

    @property
    def size(self) -> int:
        """Bytes of content left."""
        return self._size_left

    def entry(self) -> None:
        """Count one file, folder or link."""
        self._entries_left -= 1
        if self._entries_left < 0:
            raise TooMuch("entries", f"more than {self._entries} entries")

    def name(self, size: int) -> None:
        """Count a path from the top, or the target of a link, of ``size`` bytes."""
        self._names_left -= size
        if self._names_left < 0:
            raise TooMuch("names", f"more than {NAMES} bytes of names")

    def data(self, size: int) -> None:
        """Count ``size`` bytes of content."""
        self._size_left -= size
        if self._size_left < 0:
            raise TooMuch("size", f"larger than {self._size} bytes")


class Cursor:
    """The current folder of a walk, held by one descriptor. Its methods raise OSError.

    ``force`` is for a tree of this user's in which nothing runs: a folder without rights for its owner gets them while
    it is visited.
    """

    def __init__(self, top: int, force: bool = False) -> None:
        self.fd = os.dup(top)
        self._force = force
        self._above: list[tuple[int, int]] = []
        self._modes: list[int | None] = []
        self._outer: int | None = None
        """The folder above, kept open while ``..`` cannot be opened because the folder may not be entered."""

    def down(self, name: str) -> None:
        """Enter the folder ``name``."""
        mode = _let_in(self.fd, name) if self._force else None
        info = os.fstat(self.fd)
        inner = os.open(name, FOLDER, dir_fd=self.fd)
        self._close_outer()
        try:
            os.close(os.open("..", FOLDER | os.O_PATH, dir_fd=inner))
            os.close(self.fd)
        except PermissionError:
            self._outer = self.fd
        except OSError:
            os.close(inner)
            raise
        self.fd = inner
        self._above.append((info.st_dev, info.st_ino))
        self._modes.append(mode)

    def up(self) -> None:
        """Return to the folder above. Raises OSError if the folder was moved."""
        above = os.open("..", FOLDER, dir_fd=self.fd) if self._outer is None else self._outer
        self._outer = None
        info = os.fstat(above)
        if (info.st_dev, info.st_ino) != self._above.pop():
            os.close(above)
            raise OSError(errno.EAGAIN, "a folder was moved while it was read")
        mode = self._modes.pop()
        if mode is not None:
            os.fchmod(self.fd, mode)
        os.close(self.fd)
        self.fd = above

    def mode(self) -> int:
        """The mode of the folder before it was visited."""
        forced = self._modes[-1] if self._modes else None
        return stat.S_IMODE(os.fstat(self.fd).st_mode) if forced is None else forced

    def close(self) -> None:
        self._close_outer()
        os.close(self.fd)

    def _close_outer(self) -> None:
        if self._outer is not None:
            os.close(self._outer)
            self._outer = None


def _let_in(folder: int, name: str) -> int | None:
    """Give the owner of ``name`` all rights. Returns the mode before, or None if nothing was or could be changed."""
    fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        mode = stat.S_IMODE(os.fstat(fd).st_mode)
        if mode & 0o700 == 0o700:
            return None
        try:
            os.chmod(f"/proc/self/fd/{fd}", mode | 0o700)
        except OSError:  # owned by another user, or no /proc: opening it fails
            return None
        return mode
    finally:
        os.close(fd)


def open_file(folder: int, name: str, force: bool = False) -> int:
    """Open the regular file ``name`` for reading; ``force`` as for :class:`Cursor`. Raises OSError."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, dir_fd=folder)
    except PermissionError:
        mode = _let_in(folder, name) if force else None
        if mode is None:
            raise
        fd = os.open(name, flags, dir_fd=folder)
        os.fchmod(fd, mode)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EAGAIN, "a file was replaced while it was read")
    return fd


class Visitor:
    """Callbacks of :func:`walk`. The descriptors that it gets are only valid during the call."""

    def entry(self, folder: int, name: str, path: str, info: os.stat_result) -> bool:
        """An entry of ``folder``; ``path`` is relative to the top. For a folder: return whether to enter it."""
        raise NotImplementedError

    def enter(self, name: str) -> None:
        """The walk enters a folder for which :meth:`entry` returned True."""

    def leave(self, folder: int, mode: int) -> None:
        """The walk leaves the folder; ``mode`` is the folder's mode before the walk."""

    def refused(self, path: str, error: OSError) -> None:
        """An entry cannot be examined, or a folder not be entered. Raises ``error`` unless overridden."""
        raise error


def walk(top: int, visitor: Visitor, room: Room, force: bool = False) -> None:
    """Call ``visitor`` for everything below the folder ``top``: first a folder's entries by name, then its subfolders.

    Raises:
        TooMuch: the tree exceeds a bound.
        OSError: from :meth:`Visitor.refused`.
    """
    here = Cursor(top, force)
    try:
        waiting = [_entries(here.fd, "", visitor, room)]  # for each level: the subfolders still to enter, in reverse
        way = [""]
        while waiting:
            if not waiting[-1]:
                waiting.pop()
                way.pop()
                if waiting:
                    visitor.leave(here.fd, here.mode())
                    here.up()
                continue
            name = waiting[-1].pop()
            path = way[-1] + name
            if len(way) > DEPTH:
                raise TooMuch("depth", f"more than {DEPTH} folders deep")
            try:
                here.down(name)
            except OSError as error:
                visitor.refused(path, error)
                continue
            visitor.enter(name)
            way.append(f"{path}/")
            waiting.append(_entries(here.fd, way[-1], visitor, room))
    finally:
        here.close()


def _entries(folder: int, above: str, visitor: Visitor, room: Room) -> list[str]:
    """Report the entries of one folder. Returns the subfolders to enter, in order of name."""
    names = []
    length = len(os.fsencode(above))
    with os.scandir(folder) as found:
        for entry in found:
            room.entry()
            size = length + len(os.fsencode(entry.name))
            if size > PATH:
                raise TooMuch("path", f"a path of more than {PATH} bytes")
            room.name(size)
            names.append(entry.name)
    names.sort()
    folders = []
    for name in names:
        try:
            info = os.stat(name, dir_fd=folder, follow_symlinks=False)
            into = visitor.entry(folder, name, above + name, info)
        except OSError as error:
            visitor.refused(above + name, error)
            continue
        if into and stat.S_ISDIR(info.st_mode):
            folders.append(name)
    return folders


def copy_data(source: int, target: int, size: int, room: Room) -> None:
    """Copy a file of ``size`` bytes; holes stay holes and do not count. Raises OSError, :class:`TooMuch`."""
    at = 0
    while at < size:
        try:
            at = os.lseek(source, at, os.SEEK_DATA)
            end = min(os.lseek(source, at, os.SEEK_HOLE), size)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole is left
                break
            raise
        room.data(max(0, end - at))
        os.lseek(target, at, os.SEEK_SET)
        while at < end:
            sent = os.sendfile(target, source, at, min(end - at, 1 << 24))
            if not sent:
                break
            at += sent
    os.ftruncate(target, size)


# -- removal


def remove(folder: int, name: str, seconds: float = 60.0) -> None:
    """Remove the entry ``name`` of ``folder``, if it exists.

    Nested folders are moved to the top of the tree before they are removed. What cannot be removed does not prevent
    the removal of the rest.

    Raises:
        TimeoutError: after ``seconds``.
        OSError: something cannot be removed.
    """
    deadline = time.monotonic() + seconds
    if _removed(folder, name):
        return
    try:
        top = _open_own(folder, name)
    except FileNotFoundError:
        return
    token, count = os.urandom(8).hex(), itertools.count()
    stuck: dict[str, OSError] = {}
    try:
        while names := _some(top, stuck):
            for entry in names:
                try:
                    if not _removed(top, entry):
                        _empty(top, entry, token, count, deadline)
                except FileNotFoundError:
                    pass  # another process removed it
                except TimeoutError:
                    raise
                except OSError as error:
                    stuck[entry] = error
                _check(deadline)
    finally:
        os.close(top)
    for error in stuck.values():
        raise error
    try:
        os.rmdir(name, dir_fd=folder)
    except FileNotFoundError:
        pass


def remove_tree(path: str | os.PathLike[str], seconds: float = 60.0) -> None:
    """Like :func:`remove`, for the path of a folder."""
    above = os.open(os.path.dirname(path), FOLDER)
    try:
        remove(above, os.path.basename(path), seconds)
    finally:
        os.close(above)


def _check(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError(errno.ETIMEDOUT, "there was more to remove than the time allowed")


def _some(folder: int, without: dict[str, OSError]) -> list[str]:
    """Some names of a folder, without those in ``without``."""
    with os.scandir(folder) as found:
        return list(itertools.islice((entry.name for entry in found if entry.name not in without), _BATCH))


def _removed(folder: int, name: str) -> bool:
    """Remove an entry. Returns False for a folder that is not empty. Raises OSError."""
    try:
        if not stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=folder)
            return True
        os.rmdir(name, dir_fd=folder)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True


def _open_own(folder: int, name: str) -> int:
    _let_in(folder, name)
    return os.open(name, FOLDER, dir_fd=folder)


def _empty(top: int, name: str, token: str, count: itertools.count[int], deadline: float) -> None:
    """Remove the folder ``name`` of ``top``; its non-empty subfolders are moved to ``top``."""
    inner = _open_own(top, name)
    try:
        kept: dict[str, OSError] = {}
        while children := _some(inner, kept):
            for child in children:
                try:
                    if not _removed(inner, child):
                        _let_in(inner, child)  # moving a folder needs write permission on it
                        os.rename(child, f"{token}-{next(count)}", src_dir_fd=inner, dst_dir_fd=top)
                except FileNotFoundError:
                    pass
                except OSError as error:
                    kept[child] = error
                _check(deadline)
    finally:
        os.close(inner)
    for error in kept.values():
        raise error
    os.rmdir(name, dir_fd=top)
