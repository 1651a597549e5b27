"""Copies of this machine's folders for chroot boxes, made of hard links, and the end of what a box wrote.

No box can change such a copy: its folders and files belong to root, and nobody else may write them. So a copy is
used again as it is, and nothing else of a box is: the rest of its root is removed, and made anew for the next.

A *store* (``<state>/chroot/<fingerprint>`` for ``/usr``, ``<state>/mounts/<fingerprint>`` for what boxes mount; both
for root only) holds the ``template`` and the ``idle`` copies. A box's root is a folder of its owner's
``chroot-<fingerprint>``; copies get there and back by rename, so that each has one user at every moment, whoever is
killed. Standard library only.
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

__all__ = ["LEFT_OUT", "Store", "recover", "store_of", "store_of_usr"]

LEFT_OUT = frozenset(
    f"share/{name}" for name in ("doc", "gtk-doc", "help", "icons", "info", "locale", "man", "sounds")
) | {"games", "lib/debug", "src"}
"""Folders of ``/usr`` that boxes do without: every box needs a folder for each folder."""

_PREFIX = "chroot-"
_OLD = ".old"
_NEW = "new-"
"""Half of something: never taken for the whole, and removed by the next who finds the store unused."""


class Store:
    """The template of a folder and its copies, used by this process until :meth:`close`."""

    def __init__(
        self, folder: Path, source: str, made_from: object, make: Callable[[Path], None], stale: Callable[[str], bool]
    ) -> None:
        """Have ``make`` make the template in ``folder`` if none of ``source`` and ``made_from`` is there.

        Other stores whose source is ``stale`` go, if nobody uses them. Raises OSError; takes seconds the first time.
        """
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        self.fingerprint = hashlib.sha256(json.dumps([source, made_from]).encode()).hexdigest()[:16]
        self.path = folder / self.fingerprint
        self._lock = self._hold(folder / f"{self.fingerprint}.lock")  # the kernel gives it back for the dead
        try:
            for other in folder.iterdir():
                if other.is_dir() and other != self.path and stale(_source(other)):
                    _remove_unused(other)
            self.path.mkdir(exist_ok=True)
            making = _open_lock(self.path / "making")
            try:
                fcntl.flock(making, fcntl.LOCK_EX)  # one makes it, the others wait for it
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
                pass  # somebody uses it
            fcntl.flock(lock, fcntl.LOCK_SH)
            if os.fstat(lock).st_nlink:
                return lock
            os.close(lock)  # the store was just removed, and the lock with it

    def roots(self, owner: Path) -> Path:
        """The folder of an owner's roots."""
        return owner / f"{_PREFIX}{self.fingerprint}"

    def claim(self, target: Path) -> None:
        """Put a copy at ``target``: an idle one, else a new one (a second or two). Raises OSError."""
        for name in os.listdir(self.path / "idle"):
            try:
                os.rename(self.path / "idle" / name, target)
                return
            except FileNotFoundError:
                continue  # somebody else was faster
        scratch = self.path / f"{_NEW}{secrets.token_hex(8)}"
        _clone(self.path / "template" / _TREE, scratch)
        scratch.rename(target)

    def give_back(self, copy: Path) -> None:
        """Keep a copy for the next. Raises OSError."""
        os.rename(copy, self.path / "idle" / secrets.token_hex(8))

    def recycle(self, root: Path) -> None:
        """Keep the copy of ``/usr`` in ``root``, and remove all else. No process of the box may be left."""
        _recycle(self.path, root)

    def close(self) -> None:
        os.close(self._lock)


_TREE = "usr"
"""The folder of a template that is copied."""


def store_of_usr(state: Path, root: Root) -> Store:
    """The store of this host's ``/usr`` as ``root`` shows it."""
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

    return Store(state / "chroot", source, made_from, make, lambda other: other != source)


def store_of(state: Path, source: str) -> Store:
    """The store of the folder ``source``, as it is now. Every file is looked at: 60,000 take half a second."""
    return Store(
        state / "mounts",
        source,
        _contents(source),
        lambda target: _copy(source, target / _TREE, frozenset(), os.readlink),
        lambda other: other == source or not os.path.isdir(other),
    )


def _contents(source: str) -> str:
    """A digest of what lies below ``source``: names, kinds, sizes, times; not of what is in the files."""
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
    """Of which folder a store is; '' if it does not say."""
    try:
        return (store / "source").read_text()
    except OSError:
        return ""


def recover(owner: Path, end: float) -> None:
    """Recycle every root of an owner that is gone, until ``end`` on the monotonic clock: what :meth:`Store.recycle`
    does, without a store."""
    for roots in owner.glob(f"{_PREFIX}*"):
        store = owner.parent.parent / "chroot" / roots.name.removeprefix(_PREFIX)
        for root in roots.iterdir():
            try:
                _recycle(store, root, end - time.monotonic())
            except OSError:
                pass  # what still runs in there writes on; the caller removes the rest


def _recycle(store: Path, root: Path, seconds: float = 60.0) -> None:
    try:
        os.rename(root / "usr", store / "idle" / secrets.token_hex(8))
    except OSError:
        pass  # there is none yet, or the store has gone: it is removed with the rest
    remove_tree(root, seconds)


def _open_lock(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _remove_unused(store: Path) -> None:
    """Remove a store that was made from what is no more, unless somebody uses it."""
    name = store.name.removesuffix(_OLD)
    fd = _open_lock(store.with_name(f"{name}.lock"))
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if store.name == name:
            store = store.rename(store.with_name(name + _OLD))
        shutil.rmtree(store, ignore_errors=True)
        store.with_name(f"{name}.lock").unlink(missing_ok=True)  # whoever waits for it sees that it has gone
    except OSError:
        pass
    finally:
        os.close(fd)


# -- making copies


def _copy(source: str, target: Path, left_out: frozenset[str], aim_of: Callable[[str], str | None]) -> None:
    """A copy of ``source`` that is safe to share: root's, without setuid, of folders, files, and links that aim at what
    ``aim_of`` says."""
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
    """Where a link of the copy of ``/usr`` points; None for one that leads out (the box's own files lie there)."""
    aim = os.readlink(link)
    if aim.startswith("/etc/alternatives/"):
        aim = os.path.realpath(link)
    full = os.path.normpath(os.path.join(os.path.dirname(link), aim))
    inside = full.startswith(("/usr/", "/bin/", "/sbin/", "/lib"))
    return aim if inside else None


def _take(entry: os.DirEntry[str], target: str) -> None:
    """Link a file that only root can change; copy any other, and one that another file system holds."""
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
        return  # not even root may read it
    os.chmod(target, info.st_mode & 0o755)


def _cache_libraries(target: Path) -> None:
    """The loader's cache, where there is an ldconfig: some distributions keep libraries in ``/usr/local/lib``."""
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
