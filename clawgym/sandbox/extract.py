"""Copy files out of a sandbox, whose contents are hostile.

No link is followed, only regular files and folders are opened, every size is capped, and links in the result cannot
point out of it. A tree is written to this machine under the same rules (:func:`write_tree`).
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import posixpath
import shutil
import stat
import tarfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, TypeVar

from clawgym.errors import InfraError, SandboxError, TreeTooLarge
from clawgym.offload import offloaded
from clawgym.sandbox.inside.tars import Tarred
from clawgym.sandbox.inside.trees import DEPTH, FOLDER, HOST_ERRORS, PATH, Room, TooMuch, remove, walk
from clawgym.sandbox.linux import syscalls
from clawgym.sandbox.protocol import Archive
from clawgym.tars import open_tar

__all__ = ["DAMAGED", "blamed", "filter_tar", "in_thread", "link_stays_inside", "take_file", "take_tree", "write_tree"]

DAMAGED = (tarfile.TarError, KeyError, EOFError, ValueError, OverflowError, RecursionError, MemoryError)
"""What reading an archive from a sandbox may raise if it is damaged."""
_MOST_DROPPED = 256
"""How many dropped entries are named."""
_T = TypeVar("_T")


@contextlib.contextmanager
def blamed(what: str) -> Iterator[None]:
    """Translate errors of work on a sandbox's files, ``what`` for the message.

    Raises:
        TreeTooLarge: a bound is exceeded.
        InfraError: an error that only this machine can cause, such as a full disk.
        SandboxError: any other OSError.
    """
    try:
        yield
    except TooMuch as error:
        raise TreeTooLarge(f"{what}: {error}: take a smaller part", bound=error.bound) from None
    except OSError as error:
        _check_host(what, error)
        raise SandboxError(f"{what}: cannot be copied ({error.strerror}): take something else") from error


def _check_host(what: str, error: OSError) -> None:
    """Raise :class:`InfraError` if the contents of a sandbox cannot cause ``error``."""
    if error.errno in HOST_ERRORS:
        raise InfraError(
            f"{what}: could not be copied ({error}): free disk space in the state folder, and allow more open files "
            "(ulimit -n)"
        ) from error


def link_stays_inside(name: str, target: str) -> bool:
    """Whether the link ``name`` (relative to the tree) cannot point out of the tree.

    ``..`` may only come first, and not more often than ``name`` is deep: a later ``..`` could climb out
    through a second link.
    """
    if not target or target.startswith("/") or "\0" in target:
        return False
    parts = [p for p in target.split("/") if p not in ("", ".")]
    climb = 0
    while climb < len(parts) and parts[climb] == "..":
        climb += 1
    return ".." not in parts[climb:] and climb <= len([p for p in name.split("/") if p]) - 1


async def in_thread(fd: int, function: Callable[..., _T], *args: Any) -> _T:
    """Run ``function(fd, *args)`` in a thread, on a duplicate of ``fd``: the number itself may be reused meanwhile."""
    with blamed("files of a sandbox"):
        copy = os.dup(fd)

    def work() -> _T:
        try:
            return function(copy, *args)
        finally:
            os.close(copy)

    return await offloaded(work)  # closes the duplicate even if this call is cancelled


def _read_capped(fd: int, limit: int) -> bytes | None:
    """The content of the file, or None if it is longer than ``limit`` (also if it grows while it is read)."""
    chunks: list[bytes] = []
    total = 0
    while True:
        chunk = os.read(fd, min(1 << 20, limit + 1 - total))
        if not chunk:
            return b"".join(chunks)
        total += len(chunk)
        if total > limit:
            return None
        chunks.append(chunk)


def take_file(root: int, path: str, max_bytes: int) -> bytes:
    """Read one regular file below the folder descriptor ``root``.

    Raises:
        SandboxError: not a regular file, behind a link, or larger than ``max_bytes``.
        InfraError: this machine could not read it.
    """
    try:
        fd = syscalls.open_beneath(root, path.lstrip("/"), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY)
    except OSError as error:
        _check_host(path, error)
        raise SandboxError(
            f"{path}: cannot be read from the sandbox ({error.strerror}): give a regular file without links"
        ) from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise SandboxError(f"{path}: not a regular file: give a regular file")
        data = _read_capped(fd, max_bytes)
    finally:
        os.close(fd)
    if data is None:
        raise SandboxError(f"{path}: larger than {max_bytes} bytes: raise max_bytes to read it")
    return data


class _Dropped(OSError):
    """The reason why an entry is left out."""

    def __init__(self, why: str) -> None:
        super().__init__(0, why)


class _Taken(Tarred):
    """Adds to an archive what may leave a sandbox: folders, regular files, and links that stay inside."""

    def __init__(self, tar: tarfile.TarFile, room: Room, path: str, mounts: frozenset[str]) -> None:
        super().__init__(tar, room)
        self._path, self._mounts = "/" + path.lstrip("/"), mounts
        self.dropped = _Names()

    def entry(self, folder: int, name: str, path: str, info: os.stat_result) -> bool:
        if self._mounts and posixpath.normpath(f"{self._path}/{path}") in self._mounts:
            raise _Dropped("mounted from this machine")
        if stat.S_ISLNK(info.st_mode):
            if not link_stays_inside(path, os.readlink(name, dir_fd=folder)):
                raise _Dropped("link out of the tree")
        elif stat.S_ISDIR(info.st_mode):
            os.close(syscalls.open_beneath(folder, name, os.O_RDONLY | os.O_DIRECTORY))  # fails if it is a mount
        elif not stat.S_ISREG(info.st_mode):
            raise _Dropped("not a regular file")
        return super().entry(folder, name, path, info)

    def refused(self, path: str, error: OSError) -> None:
        if error.errno in HOST_ERRORS:
            raise error
        self.dropped.add(path, error.strerror or str(error))


class _Names:
    """The entries that were left out, with reasons."""

    def __init__(self) -> None:
        self._named: list[str] = []
        self._more = 0

    def add(self, name: str, why: str) -> None:
        if len(self._named) < _MOST_DROPPED:
            self._named.append(f"{name}: {why}")
        else:
            self._more += 1

    def all(self) -> tuple[str, ...]:
        return (*self._named, f"and {self._more} more") if self._more else tuple(self._named)


def take_tree(root: int, path: str, max_bytes: int, max_files: int, mounts: frozenset[str] = frozenset()) -> Archive:
    """Archive the tree at ``path`` below the folder descriptor ``root``, without the absolute paths ``mounts``.

    Raises:
        SandboxError: ``path`` is not a folder.
        TreeTooLarge: over ``max_bytes`` or ``max_files``.
        InfraError: this machine could not read it.
    """
    try:
        top = syscalls.open_beneath(root, path.lstrip("/"), os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        _check_host(path, error)
        raise SandboxError(
            f"{path}: not a folder that can be taken from the sandbox ({error.strerror}): give a folder "
            "without links in its path"
        ) from error
    buffer = io.BytesIO()
    try:
        with blamed(path), tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
            room = Room(max_files, max_bytes)
            taken = _Taken(tar, room, path, mounts)
            walk(top, taken, room)
    finally:
        os.close(top)
    return Archive(buffer.getvalue(), taken.dropped.all())


def write_tree(archive: Archive, folder: Path, only: Collection[str] | None = None) -> None:
    """Write an archive of :func:`take_tree` or :func:`filter_tar` below ``folder``; entries there are replaced.

    No link below ``folder`` is followed. Files are this user's, with the modes 0644 and 0755.

    Args:
        archive: the tree.
        folder: is made if it is missing.
        only: paths of the files and links to write; None: the whole tree.

    Raises:
        InfraError: this machine could not write it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        top = os.open(folder, FOLDER)
        try:
            with open_tar(archive.tar) as tar:
                for member in tar:
                    if only is None or member.name in only:
                        _write(tar, member, top)
        finally:
            os.close(top)
    except OSError as error:
        raise InfraError(f"{folder}: cannot be written ({error}): free disk space, or correct its modes") from error


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, top: int) -> None:
    *above, name = member.name.split("/")
    with contextlib.ExitStack() as opened:
        here = top
        for part in (*above, name) if member.isdir() else above:
            here = _entered(here, part)
            opened.callback(os.close, here)
        if member.isdir():
            return
        remove(here, name)
        if member.issym():
            os.symlink(member.linkname, name, dir_fd=here)
        elif (content := tar.extractfile(member)) is not None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(name, flags, 0o600, dir_fd=here), "wb") as file:
                shutil.copyfileobj(content, file)
                os.fchmod(file.fileno(), 0o755 if member.mode & 0o100 else 0o644)


def _entered(folder: int, name: str) -> int:
    """A descriptor of the folder ``name`` in ``folder``, made in place of what is no folder."""
    for _ in range(2):
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o755, dir_fd=folder)
        try:
            return os.open(name, FOLDER, dir_fd=folder)
        except NotADirectoryError:  # a file, or a link
            remove(folder, name)
    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), name)


def filter_tar(data: bytes, strip: str, max_bytes: int, max_files: int) -> Archive:
    """Rebuild an untrusted tar under the rules of :func:`take_tree`; ``strip`` is its leading folder.

    Raises:
        TreeTooLarge: over ``max_bytes`` or ``max_files``.
        SandboxError: the archive is damaged.
    """
    buffer = io.BytesIO()
    try:
        with (
            blamed("an archive"),
            open_tar(data) as source,
            tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as out,
        ):
            dropped = _filtered(source, out, strip, Room(max_files, max_bytes))
    except DAMAGED as error:
        raise SandboxError(f"damaged archive from the sandbox ({error}): take the tree again") from error
    return Archive(buffer.getvalue(), dropped.all())


def _filtered(source: tarfile.TarFile, out: tarfile.TarFile, strip: str, room: Room) -> _Names:
    dropped = _Names()
    links: set[str] = set()
    for member in source:
        name = member.name.removeprefix("./")
        if name == strip or not name:
            continue
        room.entry()
        room.name(len(os.fsencode(name)) + len(os.fsencode(member.linkname)))
        if strip:
            if not name.startswith(strip + "/"):
                dropped.add(name, f"outside {strip}")
                continue
            name = name[len(strip) + 1 :]
        parts = name.split("/")
        if not {"", ".", ".."}.isdisjoint(parts) or "\0" in name:
            dropped.add(name, "not a plain path")
            continue
        if len(parts) > DEPTH + 1:
            raise TooMuch("depth", f"more than {DEPTH} folders deep")
        if len(os.fsencode(name)) > PATH:
            raise TooMuch("path", f"a path of more than {PATH} bytes")
        if any("/".join(parts[:i]) in links for i in range(1, len(parts))):
            dropped.add(name, "below a link")
            continue
        entry = tarfile.TarInfo(name)
        entry.mode, entry.mtime = member.mode & 0o777, int(max(0, member.mtime))
        if member.isdir():
            entry.type = tarfile.DIRTYPE
            out.addfile(entry)
        elif member.issym() and link_stays_inside(name, member.linkname):
            links.add(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, member.linkname
            out.addfile(entry)
        elif member.isreg() or member.islnk():
            if member.islnk() and member.linkname.startswith("/"):
                dropped.add(name, "hard link out of the tree")
                continue
            held = source.extractfile(member)  # for a hard link: the content of its target
            if held is None:
                dropped.add(name, "hard link out of the tree")
                continue
            content = held.read(room.size + 1)
            room.data(len(content))
            entry.size = len(content)
            out.addfile(entry, io.BytesIO(content))
        else:
            dropped.add(name, "not a regular file or a link out of the tree")
    return dropped
