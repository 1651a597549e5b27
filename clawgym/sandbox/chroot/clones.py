"""Hard-linked copies of this machine's folders for chroot sandboxes, and the removal of what a sandbox wrote.

No sandbox can change such a copy: its folders and files belong to root and only root may write them. So copies are
reused. Nothing else of a sandbox is: the rest of its root is removed.

A *store* (``<state>/chroot/<fingerprint>`` for ``/usr``, ``<state>/mounts/<fingerprint>`` for mounted folders; both
accessible to root only) holds the ``template`` and the ``idle`` copies. A sandbox's root is a folder in its owner's
``chroot-<fingerprint>``. Copies move there and back by rename, so each has one user at any moment, even if processes
are killed. Standard library only.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import shutil
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from clawgym.sandbox.inside.trees import remove_tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from clawgym.sandbox.linux.rootfs import Root

__all__ = ["LEFT_OUT", "FolderStore", "recover", "store_of", "store_of_usr"]

LEFT_OUT = frozenset(
    f"share/{name}" for name in ("doc", "gtk-doc", "help", "icons", "info", "locale", "man", "sounds")
) | {"games", "lib/debug", "src"}
"""Folders of ``/usr`` that are left out: each folder has to be made for each copy."""

_PREFIX = "chroot-"
_OLD = ".old"
_NEW = "new-"
"""Prefix of unfinished folders. They are ignored, and removed by the next process that finds the store unused."""


class FolderStore:
    """The template of a folder and its copies. It stays locked by this process until :meth:`close`."""

    def __init__(
        self, folder: Path, source: str, made_from: object, make: Callable[[Path], None], stale: Callable[[str], bool]
    ) -> None:
        """Have ``make`` build the template in ``folder``, unless there is one of the same ``source`` and ``made_from``.

        Other unused stores, whose source is ``stale``, are removed. Takes seconds the first time. Raises OSError.
        """
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        self.fingerprint = hashlib.sha256(json.dumps([source, made_from]).encode()).hexdigest()[:16]
        self.path = folder / self.fingerprint
        self._lock = self._hold(folder / f"{self.fingerprint}.lock")  # the kernel unlocks it when the process ends
        try:
            for other in folder.iterdir():
                if other.is_dir() and other != self.path and stale(_source(other)):
                    _remove_unused(other)
            self.path.mkdir(exist_ok=True)
            making = _open_lock(self.path / "making")
            try:
                fcntl.flock(making, fcntl.LOCK_EX)  # one process builds, the others wait
                if not (self.path / "template").is_dir():
                    (self.path / "idle").mkdir(exist_ok=True)
                    (self.path / "source").write_text(source)
                    scratch = self.path / f"{_NEW}{secrets.token_hex(8)}"
                    scratch.mkdir()
                    make(scratch)
                    scratch.rename(self.path / "template")
            finally:
                os.close(making)
        except BaseException:
            self.close()
            raise

    def _hold(self, path: Path) -> int:
        while True:
            lock = _open_lock(path)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for broken in self.path.glob(f"{_NEW}*"):
                    shutil.rmtree(broken, ignore_errors=True)
            except OSError:
                pass  # another process uses it
            fcntl.flock(lock, fcntl.LOCK_SH)
            if os.fstat(lock).st_nlink:
                return lock
            os.close(lock)  # the store was just removed, with its lock file

    def roots(self, owner: Path) -> Path:
        """The folder for the roots of an owner's sandboxes."""
        return owner / f"{_PREFIX}{self.fingerprint}"

    def claim(self, target: Path) -> None:
        """Put a copy at ``target``: an idle one, or else a new one, which takes a second or two. Raises OSError."""
        for name in os.listdir(self.path / "idle"):
            try:
                os.rename(self.path / "idle" / name, target)
                return
            except FileNotFoundError:
                continue  # taken by another process
        scratch = self.path / f"{_NEW}{secrets.token_hex(8)}"
        _clone(self.path / "template" / _TREE, scratch)
        scratch.rename(target)

    def give_back(self, copy: Path) -> None:
        """Keep a copy for reuse. Raises OSError."""
        os.rename(copy, self.path / "idle" / secrets.token_hex(8))

    def recycle(self, root: Path) -> None:
        """Keep the copy of ``/usr`` in ``root``, and remove the rest. No process of the sandbox may be left."""
        _recycle(self.path, root)

    def close(self) -> None:
        """Unlock the store."""
        os.close(self._lock)


_TREE = "usr"
"""The folder of a template that is copied."""


def store_of_usr(state: Path, root: Root) -> FolderStore:
    """The store of this host's ``/usr``, with the folders that ``root`` hides or replaces."""
    source = f"/usr {root.fingerprint} {os.stat('/usr/bin').st_mtime_ns}"
    made_from = [sorted(LEFT_OUT), os.stat("/usr").st_dev, root.shown.name]

    def make(target: Path) -> None:
        _copy("/usr", target / _TREE, LEFT_OUT.union(root.hidden), _aim)
        for folder in sorted(set(root.hidden) - LEFT_OUT):
            if not (root.shown / folder).is_dir():
                continue
            (target / _TREE / folder).parent.mkdir(parents=True, exist_ok=True)
            _copy(str(root.shown / folder), target / _TREE / folder, frozenset(), os.readlink)
        _cache_libraries(target)

    return FolderStore(state / "chroot", source, made_from, make, lambda other: other != source)


def store_of(state: Path, source: str) -> FolderStore:
    """The store of the folder ``source`` in its present state. Examines every file: 60,000 take half a second."""
    return FolderStore(
        state / "mounts",
        source,
        _contents(source),
        lambda target: _copy(source, target / _TREE, frozenset(), os.readlink),
        lambda other: other == source or not os.path.isdir(other),
    )


def _contents(source: str) -> str:
    """A digest of the names, kinds, sizes and times below ``source``, not of file contents."""
    found = hashlib.sha256()
    stack = [source]
    while stack:
        folder = stack.pop()
        with os.scandir(folder) as entries:
            rows = sorted((entry.name, entry.stat(follow_symlinks=False)) for entry in entries)
        for name, info in rows:
            row = folder, name, info.st_mode, info.st_uid, info.st_gid, info.st_size, info.st_mtime_ns, info.st_ino
            found.update(repr(row).encode("utf-8", "surrogateescape"))
            if stat.S_ISDIR(info.st_mode):
                stack.append(f"{folder}/{name}")
    return found.hexdigest()


def _source(store: Path) -> str:
    """The source of a store; '' if unknown."""
    try:
        return (store / "source").read_text()
    except OSError:
        return ""


def recover(owner: Path, end: float) -> None:
    """Recycle every root of a dead owner, until ``end`` on the monotonic clock, without opening a store."""
    for roots in owner.glob(f"{_PREFIX}*"):
        store = owner.parent.parent / "chroot" / roots.name.removeprefix(_PREFIX)
        for root in roots.iterdir():
            try:
                _recycle(store, root, end - time.monotonic())
            except OSError:
                pass  # a process still writes there; the caller removes the rest


def _recycle(store: Path, root: Path, seconds: float = 60.0) -> None:
    try:
        os.rename(root / "usr", store / "idle" / secrets.token_hex(8))
    except OSError:
        pass  # it does not exist yet, or the store is gone: removed with the rest
    remove_tree(root, seconds)


def _open_lock(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _remove_unused(store: Path) -> None:
    """Remove a store with a stale source, unless another process uses it."""
    name = store.name.removesuffix(_OLD)
    fd = _open_lock(store.with_name(f"{name}.lock"))
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if store.name == name:
            store = store.rename(store.with_name(name + _OLD))
        shutil.rmtree(store, ignore_errors=True)
        store.with_name(f"{name}.lock").unlink(missing_ok=True)  # a process that waits for it sees st_nlink 0
    except OSError:
        pass
    finally:
        os.close(fd)


# -- making copies


def _copy(source: str, target: Path, left_out: frozenset[str], aim_of: Callable[[str], str | None]) -> None:
    """A copy of ``source`` that is safe to share: owned by root, without set-uid bits.

    It has folders, files, and links to the targets that ``aim_of`` returns (None: no link).
    """
    os.mkdir(target)
    stack = [(source, "")]
    while stack:
        folder, below = stack.pop()
        into = f"{target}/{below}"
        with os.scandir(folder) as entries:
            for entry in entries:
                name = below + entry.name
                if entry.is_symlink():
                    aim = aim_of(entry.path)
                    if aim is not None:
                        os.symlink(aim, into + entry.name)
                elif entry.is_dir():
                    if name not in left_out:
                        os.mkdir(into + entry.name)
                        os.chmod(into + entry.name, 0o755)  # whatever the umask
                        stack.append((entry.path, name + "/"))
                elif entry.is_file():
                    _take(entry, into + entry.name)


def _aim(link: str) -> str | None:
    """The target of a link in the copy of ``/usr``; None if it points out of ``/usr``, to files of the sandbox."""
    aim = os.readlink(link)
    if aim.startswith("/etc/alternatives/"):
        aim = os.path.realpath(link)
    full = os.path.normpath(os.path.join(os.path.dirname(link), aim))
    inside = full.startswith(("/usr/", "/bin/", "/sbin/", "/lib"))
    return aim if inside else None


def _take(entry: os.DirEntry[str], target: str) -> None:
    """Hard-link a file that only root can change; copy all others, and those on another file system."""
    info = entry.stat(follow_symlinks=False)
    if info.st_uid == 0 and not info.st_mode & (stat.S_ISUID | stat.S_ISGID | 0o022):
        try:
            os.link(entry.path, target, follow_symlinks=False)
            return
        except OSError:
            pass
    try:
        shutil.copyfile(entry.path, target)
    except OSError:
        return  # unreadable even for root
    os.chmod(target, info.st_mode & 0o755)


def _cache_libraries(target: Path) -> None:
    """Make the loader's cache with ldconfig, if there is one: some distributions use ``/usr/local/lib``."""
    (target / "etc").mkdir()
    (target / "etc/ld.so.conf").write_text("/usr/local/lib\n")
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        if Path("/", name).is_symlink():
            (target / name).symlink_to(os.readlink(f"/{name}"))
    program = shutil.which("ldconfig", path="/usr/sbin:/usr/bin")
    if program is not None:
        # -X: links are left as they are.
        subprocess.run([program, "-X", "-r", str(target)], capture_output=True, check=False, timeout=120)
    (target / "etc/ld.so.cache").touch()


def _clone(template: Path, target: Path) -> None:
    os.mkdir(target)
    stack = [(str(template), str(target))]
    while stack:
        source, into = stack.pop()
        here = os.open(source, os.O_RDONLY | os.O_DIRECTORY)
        there = os.open(into, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fchmod(there, 0o755)  # whatever the umask
            with os.scandir(here) as entries:
                for entry in entries:
                    name = entry.name
                    if entry.is_symlink():
                        os.symlink(os.readlink(name, dir_fd=here), name, dir_fd=there)
                    elif entry.is_dir(follow_symlinks=False):
                        os.mkdir(name, dir_fd=there)
                        stack.append((f"{source}/{name}", f"{into}/{name}"))
                    else:
                        os.link(name, name, src_dir_fd=here, dst_dir_fd=there, follow_symlinks=False)
        finally:
            os.close(here)
            os.close(there)
