"""The root folder of a chroot sandbox: the owner, as root, builds it before the start and saves it for snapshots.

Nothing can be mounted, so ownership protects the files. ``/usr``, ``/dev`` and the links into ``/usr`` belong to root
and cannot be changed. ``/``, ``/etc`` and the folders above a read-only one belong to root and are sticky: the sandbox
may add to them, but only remove its own files. All else is given to the sandbox's uid when it starts (``jail.py``).
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from clawgym.records import TaskFile
from clawgym.sandbox.chroot.clones import FolderStore
from clawgym.sandbox.inside.trees import Room, remove, remove_tree
from clawgym.sandbox.link import PRISTINE
from clawgym.sandbox.linux import rootfs, syscalls
from clawgym.sandbox.linux.layers import copy_tree, most_entries

__all__ = ["build", "save", "take_down"]

_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
# The loader reads these before any program: in a fork they must not be the agent's.
_LOADERS = ("etc/ld.so.preload", "etc/ld.so.cache")
_ROOTS = ("usr", "dev", PRISTINE.strip("/"), *_LINKS, *_LOADERS)
"""Paths that belong to root in every sandbox, and are not part of snapshots."""
_DEVICES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}


def build(
    store: FolderStore,
    root: Path,
    readonly: Mapping[str, tuple[TaskFile, ...]],
    mounts: Mapping[str, FolderStore],
    saved: Path | None,
) -> dict[str, list[str]]:
    """Make the folder ``root``, from the files of a snapshot if ``saved`` is given. Raises OSError.

    A copy of each of ``mounts`` is put at its path; :func:`take_down` returns it.

    Returns:
        For :func:`clawgym.sandbox.chroot.jail.enter`: ``keep``, the paths that stay root's, and ``sticky``, the folders
        that the sandbox may add to.
    """
    root.mkdir()
    store.claim(root / "usr")
    top = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if saved is None:
            _lay_out(root)
        else:
            source = os.open(saved, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                copy_tree(source, top, Room(sys.maxsize, sys.maxsize))
                os.fchmod(top, 0o755)
            finally:
                os.close(source)
        for name in _LINKS:
            if Path("/", name).is_symlink():
                (root / name).symlink_to(os.readlink(f"/{name}"))
        shutil.copyfile(store.path / "template" / _LOADERS[1], root / _LOADERS[1])
        (root / _LOADERS[0]).touch()
        for name in _LOADERS:
            (root / name).chmod(0o644)
        pristine = root / PRISTINE.strip("/")
        pristine.mkdir()
        pristine.chmod(0o755)
        (pristine / "usr").symlink_to("/usr")
        _make_devices(root / "dev")
        keep: set[str] = set(_ROOTS)
        sticky = {"", "etc"}
        for folder in (*readonly, *mounts):
            path = folder.strip("/")
            if folder in mounts:
                _put_copy(top, path, mounts[folder])
            else:
                _write_readonly(top, path, readonly[folder])
            keep.add(path)
            parents = path.split("/")[:-1]
            sticky.update("/".join(parents[:depth]) for depth in range(1, len(parents) + 1))
    finally:
        os.close(top)
    return {"keep": sorted(keep), "sticky": sorted(sticky)}


def _lay_out(root: Path) -> None:
    for name in rootfs.FOLDERS:
        (root / name).mkdir(parents=True, exist_ok=True)
    for name, text in rootfs.FILES.items():
        (root / name).write_text(text)
    (root / "var/lib/dpkg/status").touch()
    for name, to in rootfs.LINKS.items():
        (root / name).symlink_to(to)
    for name in ("proc", "sys"):
        (root / name).rmdir()  # missing rather than empty: programs test for it


def _make_devices(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    folder.chmod(0o755)
    for name, (major, minor) in _DEVICES.items():
        os.mknod(folder / name, stat.S_IFCHR, os.makedev(major, minor))
        os.chmod(folder / name, 0o666)
    (folder / "shm").mkdir()
    (folder / "shm").chmod(0o1777)


def _make_way(top: int, path: str) -> tuple[int, str]:
    """A descriptor of the folder above ``path``, and the name there; whatever had that name is removed.

    In a fork the tree is hostile: no link is followed, and what is in the way is replaced.
    """
    *parents, name = path.split("/")
    here = os.dup(top)
    try:
        for parent in parents:
            here = _enter_folder(here, parent)
        remove(here, name)
    except BaseException:
        os.close(here)
        raise
    return here, name


def _put_copy(top: int, path: str, store: FolderStore) -> None:
    here, name = _make_way(top, path)
    try:
        store.claim(Path(f"/proc/self/fd/{here}/{name}"))
    finally:
        os.close(here)


def take_down(root: Path, mounts: Mapping[str, FolderStore]) -> None:
    """Return the copies that :func:`build` took. No process of the sandbox may be left. Raises OSError.

    The folders above them belong to root, so they have not moved.
    """
    top = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for folder, store in mounts.items():
            above, _, name = folder.strip("/").rpartition("/")
            here = syscalls.open_beneath(top, above or ".", os.O_RDONLY | os.O_DIRECTORY)
            try:
                info = os.stat(name, dir_fd=here, follow_symlinks=False)
                if stat.S_ISDIR(info.st_mode) and info.st_uid == 0:
                    store.give_back(Path(f"/proc/self/fd/{here}/{name}"))
            finally:
                os.close(here)
    finally:
        os.close(top)


def _write_readonly(top: int, path: str, files: tuple[TaskFile, ...]) -> None:
    here, name = _make_way(top, path)
    try:
        here = _enter_folder(here, name)
        for file in files:
            *inner, last = file.path.split("/")
            below = os.dup(here)
            try:
                for folder in inner:
                    below = _enter_folder(below, folder)
                fd = os.open(last, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, dir_fd=below)
                with os.fdopen(fd, "wb") as out:
                    out.write(file.read())
                    os.fchmod(out.fileno(), 0o555 if file.executable else 0o444)
            finally:
                os.close(below)
    finally:
        os.close(here)


def _enter_folder(here: int, name: str) -> int:
    """Open the folder ``name``, made if it is missing, and close ``here``."""
    try:
        info = os.stat(name, dir_fd=here, follow_symlinks=False)
        if not stat.S_ISDIR(info.st_mode):
            os.unlink(name, dir_fd=here)
            raise FileNotFoundError
    except FileNotFoundError:
        os.mkdir(name, dir_fd=here)
        os.chmod(name, 0o755, dir_fd=here)
    inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
    os.close(here)
    return inner


# -- snapshots


def save(root: Path, folder: Path, others: Iterable[str], disk_mb: int) -> Path:
    """Copy what a sandbox may have changed to a new folder in ``folder``: all but what is at or below ``others``.

    Raises OSError, :class:`~clawgym.sandbox.inside.trees.TooMuch`.
    """
    target = folder / f"snapshot-{secrets.token_hex(8)}"
    target.mkdir(mode=0o700)
    skip = frozenset({*_ROOTS, *(path.strip("/") for path in others)})
    source = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    into = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        copy_tree(source, into, Room(most_entries(disk_mb), disk_mb << 20), skip)
        os.fchmod(into, 0o700)
    except BaseException:
        remove_tree(target)
        raise
    finally:
        os.close(source)
        os.close(into)
    return target
