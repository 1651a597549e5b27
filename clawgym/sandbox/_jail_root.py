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
from collections.abc import Iterable, Mapping
from pathlib import Path

from clawgym.errors import SandboxError
from clawgym.records import TaskFile
from clawgym.sandbox import _linux, _rootfs
from clawgym.sandbox._clones import Store, remove_tree
from clawgym.sandbox._link import PRISTINE

__all__ = ["build", "save", "take_down"]

_MAX_DEPTH = 128
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
    :func:`clawgym.sandbox._jail.enter` has to know: ``keep``, paths that stay root's; ``sticky``, folders that the box
    may add to.
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
                _copy_folder(source, top, "", frozenset(), _Room(None))
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
    for name in _rootfs.FOLDERS:
        (root / name).mkdir(parents=True, exist_ok=True)
    for name, text in _rootfs.FILES.items():
        (root / name).write_text(text)
    (root / "var/lib/dpkg/status").touch()
    for name, to in _rootfs.LINKS.items():
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
        _clear(here, name)
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
            here = _linux.open_beneath(top, above or ".", os.O_RDONLY | os.O_DIRECTORY)
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


def _clear(here: int, name: str) -> None:
    try:
        if stat.S_ISDIR(os.stat(name, dir_fd=here, follow_symlinks=False).st_mode):
            remove_tree(Path(f"/proc/self/fd/{here}/{name}"))
        else:
            os.unlink(name, dir_fd=here)
    except FileNotFoundError:
        pass


# -- snapshots


class _Room:
    """How many bytes may still be copied; None for any number."""

    def __init__(self, left: int | None) -> None:
        self.left = left

    def take(self, size: int) -> None:
        if self.left is not None:
            self.left -= size
            if self.left < 0:
                raise SandboxError("the box holds more than limits.disk_mb: too much for a snapshot")


def save(root: Path, folder: Path, others: Iterable[str], max_bytes: int) -> Path:
    """Copy what a box may have changed, so nothing at or below ``others``, to a new folder in ``folder``.

    Raises OSError, :class:`SandboxError`.
    """
    target = folder / f"snapshot-{secrets.token_hex(8)}"
    target.mkdir(mode=0o700)
    skip = frozenset({*_ROOTS, *(path.strip("/") for path in others)})
    source = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    into = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _copy_folder(source, into, "", skip, _Room(max_bytes))
    except BaseException:
        remove_tree(target)
        raise
    finally:
        os.close(source)
        os.close(into)
    return target


def _copy_folder(source: int, target: int, below: str, skip: frozenset[str], room: _Room) -> None:
    """Copy the entries of a folder, of anybody's making, as root's. Sockets and what is too deep stay behind."""
    for name in os.listdir(source):
        if below + name in skip:
            continue
        info = os.stat(name, dir_fd=source, follow_symlinks=False)
        mode = stat.S_IMODE(info.st_mode) & 0o1777
        room.take(512)
        if stat.S_ISDIR(info.st_mode):
            if below.count("/") >= _MAX_DEPTH:
                continue
            os.mkdir(name, 0o700, dir_fd=target)
            inner = _linux.open_beneath(source, name, os.O_RDONLY | os.O_DIRECTORY)
            into = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=target)
            try:
                _copy_folder(inner, into, f"{below}{name}/", skip, room)
                os.fchmod(into, mode)
            finally:
                os.close(inner)
                os.close(into)
        elif stat.S_ISLNK(info.st_mode):
            os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
        elif stat.S_ISFIFO(info.st_mode):
            os.mkfifo(name, mode, dir_fd=target)
        elif stat.S_ISREG(info.st_mode):
            room.take(info.st_size)
            fd = _linux.open_beneath(source, name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
            new = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=target)
            with os.fdopen(fd, "rb") as held, os.fdopen(new, "wb") as out:
                shutil.copyfileobj(held, out, 1 << 20)
                os.fchmod(new, mode)
        else:
            continue
        if not stat.S_ISLNK(info.st_mode):
            os.utime(name, ns=(info.st_atime_ns, info.st_mtime_ns), dir_fd=target, follow_symlinks=False)
