"""The Linux calls that Python 3.11 does not have, through ctypes. Standard library only.

Imported by the supervisor too, which runs without the rest of the package.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from typing import Any

__all__ = [
    "CLONE_NEWNET",
    "CLONE_NEWNS",
    "CLONE_NEWUSER",
    "bind_idmapped",
    "close_on_exec_from",
    "mount",
    "open_beneath",
    "prctl",
    "setns",
    "unshare",
]

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 2, 4, 16384, 1 << 18
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36
# The same numbers on every architecture (the unified table, Linux 5.x).
_SYS_OPEN_TREE, _SYS_MOVE_MOUNT, _SYS_CLOSE_RANGE, _SYS_OPENAT2, _SYS_MOUNT_SETATTR = 428, 429, 436, 437, 442
_CLOSE_RANGE_CLOEXEC = 4
_OPEN_TREE_CLONE, _MOVE_MOUNT_F_EMPTY_PATH, _AT_EMPTY_PATH, _AT_FDCWD = 1, 4, 0x1000, -100
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID, _MOUNT_ATTR_NODEV, _MOUNT_ATTR_IDMAP = 1, 2, 4, 0x00100000
_RESOLVE_NO_XDEV, _RESOLVE_NO_MAGICLINKS, _RESOLVE_NO_SYMLINKS, _RESOLVE_BENEATH = 1, 2, 4, 8

_libc: Any = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
    return result


def _syscall(what: str, number: int, *args: int | bytes | ctypes.Array[ctypes.c_char]) -> int:
    converted = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    return _check(_libc.syscall(ctypes.c_long(number), *converted), what)


def unshare(flags: int) -> None:
    """unshare(2)."""
    _check(_libc.unshare(flags), "unshare")


def setns(fd: int, flags: int) -> None:
    """setns(2)."""
    _check(_libc.setns(fd, flags), "setns")


def prctl(option: int, value: int) -> None:
    """prctl(2) with one argument."""
    _check(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """mount(2)."""
    _check(
        _libc.mount(
            source.encode(), target.encode(), kind.encode() if kind else None, flags, data.encode() if data else None
        ),
        f"mount {target}",
    )


def make_mounts_private() -> None:
    """Keep this mount namespace's mounts out of every other."""
    mount("none", "/", None, MS_REC | MS_PRIVATE)


def bind_idmapped(source: str, target: str, userns_fd: int | None) -> None:
    """Bind ``source`` (without what is mounted below it) read-only at ``target``, owners mapped as in ``userns_fd``.

    Needs CAP_SYS_ADMIN over the file system of ``source``, so real root, and Linux 5.12.
    """
    tree = _syscall("open_tree", _SYS_OPEN_TREE, _AT_FDCWD, source.encode(), _OPEN_TREE_CLONE | os.O_CLOEXEC)
    try:
        attributes = _MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID | _MOUNT_ATTR_NODEV
        if userns_fd is not None:
            attributes |= _MOUNT_ATTR_IDMAP
        packed = ctypes.create_string_buffer(struct.pack("=QQQQ", attributes, 0, 0, userns_fd or 0), 32)
        _syscall("mount_setattr", _SYS_MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH, packed, 32)
        _syscall("move_mount", _SYS_MOVE_MOUNT, tree, b"", _AT_FDCWD, target.encode(), _MOVE_MOUNT_F_EMPTY_PATH)
    finally:
        os.close(tree)


def userns_mapping_root_to(uid: int) -> int:
    """A descriptor of a new user namespace that maps 0 to ``uid`` (and nothing else), for :func:`bind_idmapped`."""
    ready_r, ready_w = os.pipe()
    go_r, go_w = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            unshare(CLONE_NEWUSER)
            os.write(ready_w, b"x")
            os.close(go_w)
            os.read(go_r, 1)
        finally:
            os._exit(0)
    try:
        os.close(ready_w)
        if os.read(ready_r, 1) != b"x":
            raise OSError(1, "user namespaces are not allowed")
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {uid} 1")):
            with open(f"/proc/{pid}/{name}", "w") as file:
                file.write(text)
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        for fd in (ready_r, go_r, go_w):
            os.close(fd)
        os.waitpid(pid, 0)


def close_on_exec_from(first: int) -> None:
    """close_range(2) with CLOSE_RANGE_CLOEXEC: every descriptor from ``first`` on (Linux 5.11; one by one before)."""
    try:
        _syscall("close_range", _SYS_CLOSE_RANGE, first, 0xFFFFFFFF, _CLOSE_RANGE_CLOEXEC)
    except OSError:
        for fd in os.listdir("/proc/self/fd"):
            if int(fd) >= first:
                try:
                    os.set_inheritable(int(fd), False)
                except OSError:
                    pass  # the listing's own


def open_beneath(dirfd: int, path: str, flags: int, *, cross_mounts: bool = False) -> int:
    """openat2(2): open ``path`` below ``dirfd`` without following any link or leaving the folder.

    Raises OSError (ELOOP for a link, EXDEV for an escape).
    """
    resolve = _RESOLVE_BENEATH | _RESOLVE_NO_SYMLINKS | _RESOLVE_NO_MAGICLINKS
    if not cross_mounts:
        resolve |= _RESOLVE_NO_XDEV
    how = ctypes.create_string_buffer(struct.pack("=QQQ", flags | os.O_CLOEXEC, 0, resolve), 24)
    return _syscall(f"open {path}", _SYS_OPENAT2, dirfd, os.fsencode(path), how, 24)
