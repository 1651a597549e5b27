"""Taking files out of a box. What is in there is hostile: no link is followed, nothing but regular files
and folders is opened, every size is capped, and links in the result cannot point out of it.
"""

from __future__ import annotations

import asyncio
import io
import os
import posixpath
import stat
import tarfile
from collections.abc import Callable
from typing import Any, TypeVar

from clawgym.errors import SandboxError
from clawgym.sandbox import _linux
from clawgym.sandbox.protocol import Archive

__all__ = ["filter_tar", "in_thread", "link_stays_inside", "take_file", "take_tree"]

_MAX_DEPTH = 64
_T = TypeVar("_T")


def link_stays_inside(name: str, target: str) -> bool:
    """Whether the link ``name`` (relative to the tree) cannot lead out of the tree.

    ``..`` may only come first, and not more often than ``name`` is deep: a ``..`` after another
    component could climb out through a second link.
    """
    if not target or target.startswith("/") or "\0" in target:
        return False
    parts = [p for p in target.split("/") if p not in ("", ".")]
    climb = 0
    while climb < len(parts) and parts[climb] == "..":
        climb += 1
    return ".." not in parts[climb:] and climb <= len([p for p in name.split("/") if p]) - 1


async def in_thread(fd: int, function: Callable[..., _T], *args: Any) -> _T:
    """``function(fd, *args)`` in a thread, on a copy of ``fd``: its number may come to mean another box."""
    copy = os.dup(fd)

    def work() -> _T:
        try:
            return function(copy, *args)
        finally:
            os.close(copy)

    return await asyncio.shield(asyncio.to_thread(work))  # cancelled or not, the copy is closed


def _read_capped(fd: int, limit: int) -> bytes | None:
    """The whole file, or None if it is over ``limit`` (also if it grows while it is read)."""
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
    """Read one regular file below the folder descriptor ``root``. Raises :class:`SandboxError`."""
    try:
        fd = _linux.open_beneath(root, path.lstrip("/"), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY)
    except OSError as error:
        raise SandboxError(
            f"{path}: cannot be read from the box ({error.strerror}): give a regular file without links"
        ) from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise SandboxError(f"{path}: not a regular file: only regular files leave a box")
        data = _read_capped(fd, max_bytes)
    finally:
        os.close(fd)
    if data is None:
        raise SandboxError(f"{path}: larger than {max_bytes} bytes: raise max_bytes to read it")
    return data


def _entry(name: str, info: os.stat_result, kind: bytes) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type = kind
    entry.mode = stat.S_IMODE(info.st_mode) & 0o777
    entry.mtime = max(0, int(info.st_mtime))
    return entry


class _Dropped(Exception):
    """Why one entry is left out."""


class _TooLarge(Exception):
    """The tree is over its cap."""


def _take(folder: int, name: str, child: str, room: int) -> tuple[tarfile.TarInfo, bytes, int | None]:
    """One entry of a folder: its header, its content, and an open descriptor if it is a folder itself."""
    info = os.stat(child, dir_fd=folder, follow_symlinks=False)
    if stat.S_ISLNK(info.st_mode):
        target = os.readlink(child, dir_fd=folder)
        if not link_stays_inside(name, target):
            raise _Dropped("link out of the tree")
        entry = _entry(name, info, tarfile.SYMTYPE)
        entry.linkname = target
        return entry, b"", None
    if stat.S_ISDIR(info.st_mode):
        if name.count("/") >= _MAX_DEPTH:
            raise _Dropped("too deep")
        inner = _linux.open_beneath(folder, child, os.O_RDONLY | os.O_DIRECTORY)
        return _entry(name, info, tarfile.DIRTYPE), b"", inner
    if not stat.S_ISREG(info.st_mode):
        raise _Dropped("not a regular file")
    if info.st_size > room:  # a sparse file costs nothing to make and terabytes to copy
        raise _TooLarge
    fd = _linux.open_beneath(folder, child, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise _Dropped("not a regular file")
        data = _read_capped(fd, room)
    finally:
        os.close(fd)
    if data is None:
        raise _TooLarge
    entry = _entry(name, info, tarfile.REGTYPE)
    entry.size = len(data)
    return entry, data, None


def take_tree(root: int, path: str, max_bytes: int, max_files: int, mounts: frozenset[str] = frozenset()) -> Archive:
    """Archive the tree at ``path`` below ``root``, without the absolute paths ``mounts``.

    Raises :class:`SandboxError` over the caps or without a folder.
    """
    try:
        top = _linux.open_beneath(root, path.lstrip("/"), os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise SandboxError(
            f"{path}: not a folder that can be taken from the box ({error.strerror}): links are not followed"
        ) from error
    buffer = io.BytesIO()
    dropped: list[str] = []
    total = count = 0
    stack: list[tuple[int, str]] = [(top, "")]
    try:
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
            while stack:
                folder, prefix = stack.pop()
                try:
                    for child in sorted(os.listdir(folder)):
                        count += 1
                        if count > max_files:
                            raise SandboxError(f"{path}: more than {max_files} entries: too many to take from the box")
                        try:
                            if mounts and posixpath.normpath(f"/{path.lstrip('/')}/{prefix}{child}") in mounts:
                                raise _Dropped("mounted from this machine")
                            entry, data, inner = _take(folder, prefix + child, child, max_bytes - total)
                        except _Dropped as error:
                            dropped.append(f"{prefix}{child}: {error}")
                        except OSError as error:
                            dropped.append(f"{prefix}{child}: {error.strerror}")
                        else:
                            total += len(data)
                            if inner is not None:
                                stack.append((inner, f"{prefix}{child}/"))
                            tar.addfile(entry, io.BytesIO(data))
                except _TooLarge:
                    raise SandboxError(
                        f"{path}: larger than {max_bytes} bytes: too much to take from the box"
                    ) from None
                finally:
                    os.close(folder)
    finally:
        for fd, _ in stack:
            os.close(fd)
    return Archive(buffer.getvalue(), tuple(dropped))


def filter_tar(data: bytes, strip: str, max_bytes: int, max_files: int) -> Archive:
    """The same promises for a tar that somebody else made (a Docker engine): ``strip`` is the leading folder.

    Raises :class:`SandboxError` over the caps or for a damaged archive.
    """
    buffer = io.BytesIO()
    dropped: list[str] = []
    total = 0
    links: set[str] = set()
    try:
        with (
            tarfile.open(fileobj=io.BytesIO(data)) as source,
            tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as out,
        ):
            for count, member in enumerate(source):
                if count > max_files:
                    raise SandboxError(f"more than {max_files} entries: too many to take from the box")
                name = member.name.removeprefix("./")
                if name == strip or not name:
                    continue
                if strip:
                    if not name.startswith(strip + "/"):
                        dropped.append(f"{name}: outside {strip}")
                        continue
                    name = name[len(strip) + 1 :]
                parts = name.split("/")
                if not {"", ".", ".."}.isdisjoint(parts) or "\0" in name or len(parts) > _MAX_DEPTH:
                    dropped.append(f"{name}: not a plain path")
                    continue
                if any("/".join(parts[:i]) in links for i in range(1, len(parts))):
                    dropped.append(f"{name}: below a link")
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
                    if member.islnk():  # a second name of a file: take the content
                        held = source.extractfile(member) if not member.linkname.startswith("/") else None
                    else:
                        held = source.extractfile(member)
                    if held is None:
                        dropped.append(f"{name}: hard link out of the tree")
                        continue
                    content = held.read(max_bytes - total + 1)
                    total += len(content)
                    if total > max_bytes:
                        raise SandboxError(f"larger than {max_bytes} bytes: too much to take from the box")
                    entry.size = len(content)
                    out.addfile(entry, io.BytesIO(content))
                else:
                    dropped.append(f"{name}: not a regular file or a link out of the tree")
    except (tarfile.TarError, KeyError, EOFError, ValueError, OverflowError, RecursionError) as error:
        raise SandboxError(f"damaged archive from the box ({error}): take the tree again") from error
    return Archive(buffer.getvalue(), tuple(dropped))
