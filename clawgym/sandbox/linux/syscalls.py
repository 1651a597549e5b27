"""Linux system calls that Python 3.11 lacks, through ctypes. Standard library only.

The supervisor imports it too, which runs without the rest of the package.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = [
    "CAP_DAC_OVERRIDE",
    "CLONE_NEWNET",
    "CLONE_NEWNS",
    "CLONE_NEWUSER",
    "bind_idmapped",
    "clone",
    "close_on_exec_from",
    "drop_capabilities",
    "filter_syscalls",
    "mount",
    "hide_command_line",
    "open_beneath",
    "pivot_root",
    "prctl",
    "setns",
    "syscall",
    "umount",
    "unshare",
    "write_file",
]

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWPID = 0x02000000, 0x04000000, 0x08000000, 0x20000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND = 1, 2, 4, 8, 32, 4096
MS_REC, MS_PRIVATE = 16384, 1 << 18
MNT_DETACH = 2
PR_SET_DUMPABLE, PR_SET_NAME, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER = 4, 15, 22, 24, 36
PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 38, 47, 4
# The same numbers on every architecture (the unified table, Linux 5.x).
_SYS_OPEN_TREE, _SYS_MOVE_MOUNT, _SYS_CLOSE_RANGE, _SYS_OPENAT2, _SYS_MOUNT_SETATTR = 428, 429, 436, 437, 442
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CLOSE_RANGE_CLOEXEC = 4
_OPEN_TREE_CLONE, _MOVE_MOUNT_F_EMPTY_PATH, _AT_EMPTY_PATH, _AT_FDCWD = 1, 4, 0x1000, -100
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID, _MOUNT_ATTR_NODEV, _MOUNT_ATTR_IDMAP = 1, 2, 4, 0x00100000
_RESOLVE_NO_XDEV, _RESOLVE_NO_MAGICLINKS, _RESOLVE_NO_SYMLINKS, _RESOLVE_BENEATH = 1, 2, 4, 8

_libc: Any = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
# Loaded once: each is a class that only the garbage collector frees, and the zygote runs without one.
_locked: Any = ctypes.PyDLL(None, use_errno=True) if sys.platform == "linux" else None
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}
CLONE_PARENT, _SIGCHLD = 0x00008000, 17
CAP_DAC_OVERRIDE = 1
_CAPABILITIES = [ctypes.c_ulong(number) for number in range(64)]
_arguments: list[int] = []


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
    return result


def syscall(what: str, number: int, *args: int | bytes | ctypes.Array[ctypes.c_char]) -> int:
    """Make a system call. Raises OSError with ``what`` as its file name."""
    converted = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    return _check(_libc.syscall(ctypes.c_long(number), *converted), what)


def unshare(flags: int) -> None:
    """unshare(2)."""
    _check(_libc.unshare(flags), "unshare")


def clone(flags: int) -> int:
    """Like os.fork(), with flags of clone(2): CLONE_NEWPID makes the child the first process of a new namespace.

    Only for processes with one thread. Raises OSError.
    """
    python: Any = ctypes.pythonapi  # PyDLL: it keeps the interpreter lock
    call = _locked.syscall
    number = ctypes.c_long(_SYS_CLONE[os.uname().machine])
    zero = ctypes.c_long(0)
    python.PyOS_BeforeFork()
    pid = call(number, ctypes.c_long(flags | _SIGCHLD), zero, zero, zero, zero)
    if pid == 0:
        python.PyOS_AfterFork_Child()
        return 0
    python.PyOS_AfterFork_Parent()
    return _check(pid, "clone")


def setns(fd: int, flags: int) -> None:
    """setns(2)."""
    _check(_libc.setns(fd, flags), "setns")


def write_file(path: str, text: str) -> None:
    """Write ``text`` to a kernel file, with one call."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


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


def umount(target: str, flags: int = 0) -> None:
    """umount2(2)."""
    _check(_libc.umount2(target.encode(), flags), f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    """pivot_root(2)."""
    _check(_libc.syscall(ctypes.c_long(_PIVOT_ROOT[os.uname().machine]), new.encode(), old.encode()), "pivot_root")


def drop_capabilities(keep: int | None = None) -> None:
    """Give up every capability permanently, but for the number ``keep``: the bounding, ambient, inheritable, permitted
    and effective sets.

    With such a bounding set and ``no_new_privs`` no later exec can bring another one back, whatever the uid.
    """
    for capability in _CAPABILITIES:
        if capability.value == keep:
            continue
        if _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break  # EINVAL: past the last one this kernel knows
    _libc.prctl(PR_CAP_AMBIENT, ctypes.c_ulong(PR_CAP_AMBIENT_CLEAR_ALL), 0, 0, 0)
    header = ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0), 8)  # _LINUX_CAPABILITY_VERSION_3
    kept = 0 if keep is None else 1 << keep
    _check(
        _libc.capset(header, ctypes.create_string_buffer(struct.pack("=6I", kept, kept, kept, 0, 0, 0), 24)), "capset"
    )
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def filter_syscalls(program: bytes) -> None:
    """Install a seccomp filter (an array of struct sock_filter); needs ``no_new_privs``."""
    code = ctypes.create_string_buffer(program, len(program))
    fprog = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(code)))
    _check(_libc.prctl(PR_SET_SECCOMP, ctypes.c_ulong(2), fprog, 0, 0), "seccomp")


def hide_command_line(name: bytes) -> None:
    """Replace this process's command line and name by ``name``: every process that sees this one can read them.

    The address of the arguments is looked up once; it is the same in a forked child.
    """
    if not _arguments:
        fd = os.open("/proc/self/stat", os.O_RDONLY)
        fields = os.read(fd, 4096).rpartition(b")")[2].split()
        os.close(fd)
        _arguments.extend((int(fields[45]), int(fields[46])))  # arg_start, arg_end: fields 48 and 49 of proc(5)
    start, end = _arguments
    if 0 < start < end:
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, name, min(len(name), end - start - 1))
    _libc.prctl(PR_SET_NAME, name[:15], 0, 0, 0)


def make_mounts_private() -> None:
    """Make the mounts of this mount namespace invisible to all others."""
    mount("none", "/", None, MS_REC | MS_PRIVATE)


def bind_idmapped(source: str, target: str, userns_fd: int | None) -> None:
    """Bind ``source``, without the mounts below it, read-only at ``target``, with owners mapped as in ``userns_fd``.

    Needs CAP_SYS_ADMIN over the file system of ``source`` (real root), and Linux 5.12.
    """
    tree = syscall("open_tree", _SYS_OPEN_TREE, _AT_FDCWD, source.encode(), _OPEN_TREE_CLONE | os.O_CLOEXEC)
    try:
        attributes = _MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID | _MOUNT_ATTR_NODEV
        if userns_fd is not None:
            attributes |= _MOUNT_ATTR_IDMAP
        packed = ctypes.create_string_buffer(struct.pack("=QQQQ", attributes, 0, 0, userns_fd or 0), 32)
        syscall("mount_setattr", _SYS_MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH, packed, 32)
        syscall("move_mount", _SYS_MOVE_MOUNT, tree, b"", _AT_FDCWD, target.encode(), _MOVE_MOUNT_F_EMPTY_PATH)
    finally:
        os.close(tree)


def userns_mapping_root_to(uid: int) -> int:
    """A descriptor of a new user namespace that maps only uid 0, to ``uid``; for :func:`bind_idmapped`."""
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
    """close_range(2) with CLOSE_RANGE_CLOEXEC for all descriptors from ``first`` on; one by one before Linux 5.11."""
    try:
        syscall("close_range", _SYS_CLOSE_RANGE, first, 0xFFFFFFFF, _CLOSE_RANGE_CLOEXEC)
    except OSError:
        for fd in os.listdir("/proc/self/fd"):
            if int(fd) >= first:
                try:
                    os.set_inheritable(int(fd), False)
                except OSError:
                    pass  # the descriptor of the listing itself


def open_beneath(dirfd: int, path: str, flags: int, *, cross_mounts: bool = False) -> int:
    """openat2(2): open ``path`` below ``dirfd`` without following links or leaving the folder.

    Raises OSError (ELOOP for a link, EXDEV for a path out of the folder).
    """
    resolve = _RESOLVE_BENEATH | _RESOLVE_NO_SYMLINKS | _RESOLVE_NO_MAGICLINKS
    if not cross_mounts:
        resolve |= _RESOLVE_NO_XDEV
    how = ctypes.create_string_buffer(struct.pack("=QQQ", flags | os.O_CLOEXEC, 0, resolve), 24)
    return syscall(f"open {path}", _SYS_OPENAT2, dirfd, os.fsencode(path), how, 24)
