"""A tree that an agent left: taken, copied and removed, with no descriptor left open and nothing left behind."""

from __future__ import annotations

import os
import socket

from clawgym.errors import SandboxError
from clawgym.sandbox.extract import take_tree
from clawgym.sandbox.inside.trees import FOLDER, Room, TooMuch, remove_tree
from clawgym.sandbox.linux.layers import copy_tree

from ..source import Source, scratch_folder
from .archive import check_kept

READS = ("sandbox.inside.trees", "sandbox.inside.tars", "sandbox.linux.layers", "sandbox.extract")

_ENTRIES, _BYTES = 60, 4000
_KINDS = ("folder", "file", "folder", "link", "hard link", "fifo", "socket", "whiteout", "sparse")


def fuzz(data: bytes) -> None:
    source = Source(data)
    made, copied = (os.fspath(scratch_folder() / name) for name in ("made", "copied"))
    before = len(os.listdir("/proc/self/fd"))
    try:
        for folder in (made, copied):
            os.mkdir(folder)
        _make(source, made)
        _take(made)
        _copy(made, copied)
    finally:
        for folder in (made, copied):
            remove_tree(folder)
            assert not os.path.lexists(folder)
    assert len(os.listdir("/proc/self/fd")) == before


def _make(source: Source, top: str) -> None:
    """Something at each step, somewhere; what cannot be made is left out. Then odd modes."""
    folders = [top]
    for _ in range(source.number(0, 30)):
        path = os.path.join(source.pick(folders), source.text(20).replace("/", "_").replace("\0", "_") or "x")
        try:
            match source.pick(_KINDS):
                case "folder":
                    for _ in range(source.number(0, 200)):  # a chain
                        os.mkdir(path)
                        folders.append(path)
                        path += "/d"
                case "file":
                    with open(path, "xb") as file:
                        file.write(source.bytes())
                case "link":
                    os.symlink(source.path(), path)
                case "hard link":
                    os.link(os.path.join(source.pick(folders), source.text(20)), path, follow_symlinks=False)
                case "fifo":
                    os.mkfifo(path)
                case "socket":
                    with socket.socket(socket.AF_UNIX) as listener:
                        listener.bind(path)
                case "whiteout":
                    os.mknod(path, 0o20600, 0)
                case "sparse":
                    with open(path, "xb") as file:
                        file.truncate(source.number(0, 1 << 40))
        except (OSError, ValueError):
            continue
    for _ in range(source.number(0, 6)):
        os.chmod(source.pick(folders), source.number(0, 0o7777))


def _take(made: str) -> None:
    top = os.open(made, FOLDER)
    try:
        kept = take_tree(top, ".", _BYTES, _ENTRIES)
    except SandboxError:
        pass
    else:
        check_kept(kept, _BYTES)
    finally:
        os.close(top)


def _copy(made: str, copied: str) -> None:
    source, target = os.open(made, FOLDER), os.open(copied, FOLDER)
    try:
        copy_tree(source, target, Room(_ENTRIES, _BYTES))
        assert sorted(_told(made)) == sorted(_told(copied))
    except TooMuch:
        pass
    finally:
        os.close(source)
        os.close(target)


def _told(top: str) -> list[tuple[str, int, int]]:
    """Names, types and sizes of what a copy has to have."""
    found: list[tuple[str, int, int]] = []
    for folder, folders, files in os.walk(os.fsencode(top)):
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            info = os.lstat(path)
            kind = info.st_mode & 0o170000
            if kind != 0o140000:  # a socket is not copied
                found.append((os.path.relpath(path, os.fsencode(top)).hex(), kind, info.st_size * (kind == 0o100000)))
    return found
