"""In the child that will be process 1 of a namespace box: everything between fork and the first command.

It was cloned as the first process of a new pid namespace. As root it first mounts what only root can (a private,
size-limited tmpfs, /proc, and the lower folders with their owners mapped), then becomes the box's outer uid and enters
new namespaces of every other kind as that ordinary user. There it builds the root, gives up every capability, filters
its system calls, and goes on as ``_guest.py``.

Real root is thus never inside: root of the box is the outer uid, and outside it has no rights over anything but
the box. Standard library only; nothing can be imported once the root has changed.
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
    """Become process 1 of the box that ``plan`` describes. Raises OSError.

    ``plan["uid"]`` is the box's outer uid, None for an ordinary user's box, which has its user namespace already
    (``plan["me"]`` are uid and gid outside it). Of ``fds``: ``userns`` maps root to that uid, for the lower folders;
    ``network`` is one to share; ``blob`` holds the read-only files.

    Returns the descriptors that the owner gets: the writable layer, and the root.
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
            except OSError:  # of a file system that cannot map owners: what everybody may read can be read
                syscalls.bind_idmapped(source, f"{layer}/{name}", None)
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        # Without this /proc/self belongs to root, and the uid map cannot be written.
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)
        syscalls.unshare(namespaces | syscalls.CLONE_NEWUSER)
        _map(uid, uid)
        syscalls.make_mounts_private()
    return _build_root(plan, "network" not in fds, fds.get("blob"))


def _map(uid: int, gid: int) -> None:
    """Root of this user namespace is ``uid`` outside."""
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
    # By whoever owns the pid namespace: root, or the ordinary user's box itself.
    proc = f"{plan['mountpoint']}/proc"
    os.mkdir(proc)
    syscalls.mount("proc", proc, "proc", _QUIET | syscalls.MS_NOEXEC)


def _build_root(plan: dict[str, Any], own_network: bool, blob: int | None) -> list[int]:
    # Short relative names: the options of a mount must fit into one page.
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
    syscalls.drop_capabilities()
    return [layer, os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)]


def _hide_in_proc(root: int) -> None:
    """Leave of ``/proc`` the processes and what ``_procfs.py`` names, and make ``/proc/sys`` read-only.

    Whatever else the kernel has there is covered by an empty file or folder, whether or not we know it, unless only the
    machine's root may open it, which no sandbox is.
    """
    # A box may not make user namespaces: no set-up of its own, and less of the kernel to reach.
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
                if entry.stat(follow_symlinks=False).st_mode & 0o7:  # others only the machine's root may open
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
    """A descriptor of ``path`` below ``root`` to mount on, made where it is missing.

    In a fork the files are the agent's: whatever is in the way (a link, a file for a folder) is moved aside,
    never followed.
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
    target = _open_target(root, path, folder)  # again: now the mount is what lies there
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
