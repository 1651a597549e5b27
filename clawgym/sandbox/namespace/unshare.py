"""In the child that becomes process 1 of a namespace sandbox: everything between fork and the first command.

It was cloned as the first process of a new pid namespace. As root it first makes the mounts that only root can make: a
private, size-limited tmpfs, /proc, and the lower folders with their owners mapped. Then it becomes the sandbox's outer
uid and, as that ordinary user, enters new namespaces of every other kind. There it builds the root, gives up every
capability, filters its system calls, and continues as ``guest.py``.

So real root is never inside: root in the sandbox is the outer uid, which has no rights outside. Standard library only;
nothing can be imported once the root has changed.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
from _socket import AF_INET, SOCK_DGRAM, sethostname, socket

from clawgym.sandbox.inside.guest import loads
from clawgym.sandbox.linux import syscalls
from clawgym.sandbox.linux.procfs import SETTINGS, SHOWN

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["enter"]

_EVERYTHING = syscalls.CLONE_NEWNS | syscalls.CLONE_NEWIPC | syscalls.CLONE_NEWUTS | syscalls.CLONE_NEWCGROUP
_QUIET = syscalls.MS_NOSUID | syscalls.MS_NODEV
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_LINKS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}


def enter(plan: dict[str, Any], fds: dict[str, int]) -> list[int]:
    """Become process 1 of the sandbox that ``plan`` describes. Raises OSError.

    ``plan["uid"]`` is the outer uid, or None for a sandbox of an ordinary user, which already has its user namespace
    (``plan["me"]``: uid and gid outside). Of ``fds``: ``userns`` maps root to that uid, for the lower folders;
    ``network`` is a namespace to share; ``blob`` holds the read-only files.

    Returns:
        Descriptors for the owner: the writable layer, and the root.
    """
    uid: int | None = plan["uid"]
    layer = plan["mountpoint"]
    namespaces = _EVERYTHING
    if "network" in fds:
        syscalls.setns(fds["network"], syscalls.CLONE_NEWNET)
    else:
        namespaces |= syscalls.CLONE_NEWNET
    if uid is None:
        _map(*plan["me"])
        syscalls.unshare(namespaces)
        syscalls.make_mounts_private()
        _mount_layer(plan, "")
    else:
        syscalls.unshare(syscalls.CLONE_NEWNS)
        syscalls.make_mounts_private()
        _mount_layer(plan, f",uid={uid},gid={uid}")
        for name, source in plan["lowers"].items():
            _make_folders(f"{layer}/{name}")
            syscalls.bind_idmapped(source, f"{layer}/{name}", fds["userns"])
        for name, source in plan["mounts"].items():
            _make_folders(f"{layer}/{name}")
            try:
                syscalls.bind_idmapped(source, f"{layer}/{name}", fds["userns"])
            except OSError:  # the file system cannot map owners: the sandbox reads what everybody may read
                syscalls.bind_idmapped(source, f"{layer}/{name}", None)
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        # Otherwise /proc/self would belong to root, and the uid map could not be written.
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)
        syscalls.unshare(namespaces | syscalls.CLONE_NEWUSER)
        _map(uid, uid)
        syscalls.make_mounts_private()
    return _build_root(plan, "network" not in fds, fds.get("blob"))


def _map(uid: int, gid: int) -> None:
    """Map root of this user namespace to ``uid`` outside."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        syscalls.write_file(f"/proc/self/{name}", text)


def _make_folders(path: str) -> None:
    parent = path.rpartition("/")[0]
    if parent and not os.path.isdir(parent):
        _make_folders(parent)
    os.mkdir(path)


def _mount_layer(plan: dict[str, Any], owner: str) -> None:
    size = f"size={plan['layer_bytes']},nr_inodes={plan['layer_inodes']},mode=755"
    syscalls.mount("tmpfs", plan["mountpoint"], "tmpfs", _QUIET, size + owner)
    # Mounted by the owner of the pid namespace: root, or the ordinary user's sandbox itself.
    proc = f"{plan['mountpoint']}/proc"
    os.mkdir(proc)
    syscalls.mount("proc", proc, "proc", _QUIET | syscalls.MS_NOEXEC)


def _build_root(plan: dict[str, Any], own_network: bool, blob: int | None) -> list[int]:
    # Short relative names: the options of a mount are limited to one page.
    os.chdir(plan["mountpoint"])
    layer = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    os.mkdir("new")
    for name in plan["mkdirs"]:
        _make_folders(name)
    if blob is not None:
        _read_blob(blob)
    for kind, target, lowers in plan["overlays"]:
        below = ":".join(path.replace("\\", "\\\\").replace(":", "\\:").replace(",", "\\,") for path in lowers)
        upper = f",upperdir={kind},workdir={kind}-work" if kind is not None else ""
        syscalls.mount("overlay", target, "overlay", _QUIET, f"lowerdir={below}{upper},userxattr")
    os.chdir("new")
    root = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    _mount_at(root, "proc", "../proc", None, syscalls.MS_BIND)
    _hide_in_proc(root)
    _devices(root)
    for source, target in plan["binds"]:
        _bind_readonly(root, source, target)
    if own_network:
        _loopback_up()
    sethostname("box")
    syscalls.pivot_root(".", ".")
    syscalls.umount(".", syscalls.MNT_DETACH)
    os.chdir("/")
    os.close(root)
    # One user owns everything here: with this capability it may also open what it forbade itself.
    syscalls.drop_capabilities(syscalls.CAP_DAC_OVERRIDE if plan["filter"] == "one user" else None)
    return [layer, os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)]


def _hide_in_proc(root: int) -> None:
    """Show only the processes and what ``procfs.py`` names in ``/proc``, and make ``/proc/sys`` read-only.

    All other entries are covered by an empty file or folder, except those that only the machine's root may open, which
    no sandbox is.
    """
    # Sandboxes must not make user namespaces: they would reach more of the kernel.
    syscalls.write_file("proc/sys/user/max_user_namespaces", "0")
    _bind_readonly(root, "proc/sys", "proc/sys")
    os.mkdir("../empty")
    syscalls.mount("tmpfs", "../empty", "tmpfs", _QUIET | syscalls.MS_NOEXEC, "mode=555,size=4096,nr_inodes=3")
    os.mkdir("../empty/folder", 0o555)
    os.close(os.open("../empty/file", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o444))
    syscalls.mount("none", "../empty", None, syscalls.MS_REMOUNT | syscalls.MS_RDONLY | _QUIET | syscalls.MS_NOEXEC)
    for folder, shown in (("proc", SHOWN), ("proc/sys", SETTINGS)):
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.isdigit() or entry.name in shown:
                    continue
                if (
                    entry.stat(follow_symlinks=False).st_mode & 0o7
                ):  # the others can only be opened by the machine's root
                    source = "../empty/folder" if entry.is_dir(follow_symlinks=False) else "../empty/file"
                    syscalls.mount(source, f"{folder}/{entry.name}", None, syscalls.MS_BIND)


def _devices(root: int) -> None:
    flags = syscalls.MS_NOSUID | syscalls.MS_NOEXEC
    _mount_at(root, "dev", "tmpfs", "tmpfs", flags, "mode=755,size=65536,nr_inodes=64")
    for name in _DEVICES:
        os.close(os.open(f"dev/{name}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        syscalls.mount(f"/dev/{name}", f"dev/{name}", None, syscalls.MS_BIND)
    for name, target in _LINKS.items():
        os.symlink(target, f"dev/{name}")
    os.mkdir("dev/pts")
    options = "newinstance,ptmxmode=0666,mode=620"
    syscalls.mount("devpts", "dev/pts", "devpts", syscalls.MS_NOSUID | syscalls.MS_NOEXEC, options)
    os.symlink("pts/ptmx", "dev/ptmx")
    os.mkdir("dev/shm", 0o1777)
    syscalls.mount("tmpfs", "dev/shm", "tmpfs", _QUIET, "mode=1777,size=67108864")


def _open_target(root: int, path: str, folder: bool) -> int:
    """Open ``path`` below ``root`` to mount on; missing parts are made.

    In a fork the files may be hostile: whatever is in the way (a link, a file for a folder) is moved aside, and never
    followed.
    """
    here = os.dup(root)
    parts = [part for part in path.split("/") if part]
    for index, part in enumerate(parts):
        wants_folder = folder or index < len(parts) - 1
        try:
            kind = os.stat(part, dir_fd=here, follow_symlinks=False).st_mode
            fits = stat.S_ISDIR(kind) if wants_folder else not (stat.S_ISDIR(kind) or stat.S_ISLNK(kind))
        except FileNotFoundError:
            kind = fits = None
        if not fits:
            if kind is not None:
                os.rename(part, f"{part}.{os.urandom(8).hex()}", src_dir_fd=here, dst_dir_fd=here)
            if wants_folder:
                os.mkdir(part, 0o755, dir_fd=here)
            else:
                os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=here))
        below = os.open(part, os.O_PATH | os.O_NOFOLLOW | (os.O_DIRECTORY if wants_folder else 0), dir_fd=here)
        os.close(here)
        here = below
    return here


def _mount_at(root: int, path: str, source: str, kind: str | None, flags: int, data: str | None = None) -> None:
    target = _open_target(root, path, kind is not None or os.path.isdir(source))
    syscalls.mount(source, f"/proc/self/fd/{target}", kind, flags, data)
    os.close(target)


def _bind_readonly(root: int, source: str, path: str) -> None:
    _mount_at(root, path, source, None, syscalls.MS_BIND)
    folder = os.path.isdir(source)
    target = _open_target(root, path, folder)  # again: the path now leads to the mount
    # The ST_* flags have the same values.
    kept = os.fstatvfs(target).f_flag & (syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC)
    flags = syscalls.MS_BIND | syscalls.MS_REMOUNT | syscalls.MS_RDONLY | syscalls.MS_NOSUID | kept
    if folder:
        flags |= syscalls.MS_NODEV
    syscalls.mount("none", f"/proc/self/fd/{target}", None, flags)
    os.close(target)


def _loopback_up() -> None:
    sock = socket(AF_INET, SOCK_DGRAM)
    # SIOCSIFFLAGS with IFF_UP
    fcntl.ioctl(sock.fileno(), 0x8914, struct.pack("16sH14x", b"lo", 1))
    sock.close()


def _read_blob(fd: int) -> None:
    """Write the read-only files: a line of JSON ``[[path, mode, size], ...]``, then the contents."""
    with os.fdopen(fd, "rb") as blob:
        blob.seek(0)
        for path, mode, size in loads(blob.readline()):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as out:
                out.write(blob.read(size))
