"""The root folder of a chroot box: built before the box starts, saved for a snapshot, by the owner, as root.

Who owns what decides everything, as nothing can be mounted. ``/usr``, ``/dev`` and the links into ``/usr`` are root's
and cannot be changed; ``/``, ``/etc`` and the folders above a read-only one are root's, and the box may add to them but
not remove what is not its own (sticky); all else is given to the box's uid when it starts (``_jail.py``).
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
from clawgym.sandbox.chroot.clones import Store
from clawgym.sandbox.inside.trees import Room, remove, remove_tree
from clawgym.sandbox.link import PRISTINE
from clawgym.sandbox.linux import rootfs, syscalls
from clawgym.sandbox.linux.layers import copy_tree, most_entries

__all__ = ["build", "save", "take_down"]

_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
# The loader reads these two before any program: in a fork they must not be the agent's.
_LOADERS = ("etc/ld.so.preload", "etc/ld.so.cache")
_ROOTS = ("usr", "dev", PRISTINE.strip("/"), *_LINKS, *_LOADERS)
"""What stays root's in every box, and is in no snapshot."""
_DEVICES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}


def build(
    store: Store,
    root: Path,
    readonly: Mapping[str, tuple[TaskFile, ...]],
    mounts: Mapping[str, Store],
    saved: Path | None,
) -> dict[str, list[str]]:
    """Make the folder ``root``, over a snapshot's files if ``saved`` is one. Raises OSError.

    Of each of ``mounts`` a copy is put at its path; :func:`take_down` gives it back. Returns what
    :func:`clawgym.sandbox.chroot.jail.enter` has to know: ``keep``, paths that stay root's; ``sticky``, folders that
    the box may add to.
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
        (root / name).rmdir()  # better missing than empty: programs look whether it is there


def _make_devices(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    folder.chmod(0o755)
    for name, (major, minor) in _DEVICES.items():
        os.mknod(folder / name, stat.S_IFCHR, os.makedev(major, minor))
        os.chmod(folder / name, 0o666)
    (folder / "shm").mkdir()
    (folder / "shm").chmod(0o1777)


def _make_way(top: int, path: str) -> tuple[int, str]:
    """A descriptor of the folder above ``path``, and its name there, which nothing has any more.

    In a fork the tree is the agent's: no link is followed, and what is in the way is replaced.
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


def _put_copy(top: int, path: str, store: Store) -> None:
    here, name = _make_way(top, path)
    try:
        store.claim(Path(f"/proc/self/fd/{here}/{name}"))
    finally:
        os.close(here)


def take_down(root: Path, mounts: Mapping[str, Store]) -> None:
    """Give the copies back that :func:`build` put there. No process of the box may be left. Raises OSError.

    The folders above them are root's, so they are where they were.
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
    """A descriptor of the folder ``name``, made if there is none; ``here`` is closed."""
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
    """Copy what a box may have changed, so nothing at or below ``others``, to a new folder in ``folder``.

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
