"""Unpack one layer of an image as a lower folder of an overlay. The layer is hostile.

Invariants: nothing outside the folder is written or linked. The kernel follows no link: where a path leads through one,
it is resolved here, within the image. Files get no set-uid bits, attributes or owners, and devices are left out.
Whiteouts (OCI image specification, layer.md) become those of overlayfs.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import stat
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from clawgym.errors import SandboxError
from clawgym.sandbox.inside.trees import DEPTH, FOLDER, PATH, open_file, remove
from clawgym.sandbox.linux import syscalls
from clawgym.tars import BoundedTarInfo

__all__ = ["Bounds", "kind_of", "read_file", "resolved", "unpack"]

_HIDES = ".wh."
_OPAQUE = ".wh..wh..opq"
_MOST_LINKS = 40
"""As in the kernel."""
_LATEST = 1 << 33
"""Seconds since 1970. Not every file system can store a later time."""


class Bounds:
    """How much an image may still hold. Raises :class:`~clawgym.errors.SandboxError` when that is exceeded."""

    def __init__(self, entries: int = 2_000_000, size: int = 64 * 2**30) -> None:
        self._entries, self._size = entries, size

    def entry(self) -> None:
        """Count a file, folder or link."""
        self._entries -= 1
        if self._entries < 0:
            raise SandboxError("the image has too many files: leave files out of it")

    def data(self, size: int) -> None:
        """Count ``size`` bytes of content."""
        self._size -= size
        if self._size < 0:
            raise SandboxError("the image is too large: leave files out of it")


def unpack(stream: IO[bytes], folder: Path, below: Sequence[Path], bounds: Bounds) -> None:
    """Unpack the uncompressed tar ``stream`` into the empty ``folder``, over the layers ``below`` (bottom first).

    Raises:
        SandboxError: the layer is damaged, or exceeds ``bounds``.
        OSError: this machine could not write it.
    """
    top = os.open(folder, FOLDER)
    try:
        with contextlib.closing(_Unpacking(top, below, bounds)) as unpacking:
            try:
                with tarfile.open(fileobj=stream, mode="r|", tarinfo=BoundedTarInfo) as tar:
                    while (member := tar.next()) is not None:
                        unpacking.add(tar, member)
                        vars(tar)["members"].clear()  # it keeps all of them
            except (tarfile.TarError, EOFError, ValueError, OverflowError, KeyError) as error:
                raise SandboxError(f"a layer is damaged ({error}): fetch the image again") from error
            unpacking.finish()
    finally:
        os.close(top)


def parts_of(name: str) -> list[str]:
    """The names of a path in an archive. Raises :class:`~clawgym.errors.SandboxError` for one that is none."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in name or len(parts) > DEPTH or len(os.fsencode(name)) > PATH:
        raise SandboxError(f"a layer has the path {name[:200]!r}: make the image again without it")
    return parts


def read_file(layers: Sequence[Path], path: str, most: int) -> bytes | None:
    """The first ``most`` bytes of a file in ``layers`` (bottom first), which may be hostile; None if it is no file.

    Links are followed as in a sandbox, within the layers. Raises OSError if a layer cannot be read.
    """
    opened = [os.open(layer, FOLDER) for layer in reversed(layers)]
    try:
        real = posixpath.dirname(resolved(opened, f"{path}/x"))
        found = kind_of(opened, real)
        if found is None or not stat.S_ISREG(found[0]):
            return None
        with open(syscalls.open_beneath(found[1], real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            return file.read(most)
    except SandboxError:  # it leads in a circle
        return None
    finally:
        for layer in opened:
            os.close(layer)


def kind_of(layers: Sequence[int], path: str) -> tuple[int, int] | None:
    """(mode, descriptor of the layer) of ``path`` in layers (descriptors, top first); None if it is not there.

    The path must lead through no link.
    """
    for layer in layers:
        try:
            fd = syscalls.open_beneath(layer, path or ".", os.O_PATH | os.O_NOFOLLOW)
        except OSError:
            if _hidden(layer, path):
                return None
            continue
        mode, device = os.fstat(fd).st_mode, os.fstat(fd).st_rdev
        os.close(fd)
        return None if stat.S_ISCHR(mode) and device == 0 else (mode, layer)
    return None


def _hidden(layer: int, path: str) -> bool:
    """Whether a folder above ``path`` is a whiteout, opaque or no folder in this layer."""
    above = posixpath.dirname(path)
    while above:
        with contextlib.suppress(OSError):
            fd = syscalls.open_beneath(layer, above, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                return os.getxattr(fd, "user.overlay.opaque") == b"y"
            except OSError:
                return False
            finally:
                os.close(fd)
        with contextlib.suppress(OSError):
            os.close(syscalls.open_beneath(layer, above, os.O_PATH | os.O_NOFOLLOW))
            return True
        above = posixpath.dirname(above)
    return False


def resolved(layers: Sequence[int], path: str) -> str:
    """``path`` without links in its folders; the last name is left as it is. Descriptors are top first.

    Raises :class:`~clawgym.errors.SandboxError` for a circle of links.
    """
    left, done, links = parts_of(path), list[str](), 0
    while len(left) > 1:
        name = left.pop(0)
        if name == "..":
            done = done[:-1]
            continue
        here = "/".join([*done, name])
        found = kind_of(layers, here)
        if found is None or not stat.S_ISLNK(found[0]):
            done.append(name)
            continue
        links += 1
        if links > _MOST_LINKS:
            raise SandboxError(f"a layer has the path {path[:200]!r}, which leads in a circle: make the image again")
        target = _read_link(found[1], here)
        if target.startswith("/"):
            done = []
        left = [part for part in target.split("/") if part not in ("", ".")] + left
    return "/".join([*done, *left])


def _read_link(layer: int, path: str) -> str:
    fd = syscalls.open_beneath(layer, posixpath.dirname(path) or ".", os.O_PATH | os.O_DIRECTORY)
    try:
        return os.readlink(posixpath.basename(path), dir_fd=fd)
    finally:
        os.close(fd)


class _Unpacking:
    def __init__(self, top: int, below: Sequence[Path], bounds: Bounds) -> None:
        self._top, self._bounds = top, bounds
        self._layers = [top, *(os.open(layer, FOLDER) for layer in reversed(below))]
        self._forget()
        self._modes: dict[str, tuple[int, int]] = {}
        """Folder -> (mode, time), set at the end: they may forbid to write into it."""

    def _forget(self) -> None:
        self._known: dict[str, str] = {"": ""}
        """Folder as an archive names it -> where it is in this layer."""
        self._led: set[str] = set()
        """The paths that led there."""

    def close(self) -> None:
        for layer in self._layers[1:]:
            os.close(layer)

    def add(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        self._bounds.entry()
        parts = parts_of(member.name)
        if not parts:
            self._modes[""] = (member.mode & 0o1777, _time(member))
            return
        name, folder = parts[-1], self._folder("/".join(parts[:-1]))
        into = syscalls.open_beneath(self._top, folder or ".", FOLDER)
        try:
            if name == _OPAQUE:
                _make_opaque(into)
            elif name.startswith(_HIDES):
                hidden = name.removeprefix(_HIDES)
                if hidden in ("", ".", ".."):
                    raise SandboxError(f"a layer has the whiteout {name!r}: make the image again without it")
                self._hide(into, hidden)
            else:
                self._entry(tar, member, into, name, f"{folder}/{name}".lstrip("/"))
        finally:
            os.close(into)

    def finish(self) -> None:
        """Set the modes of folders, the deepest first."""
        for path in sorted(self._modes, key=lambda path: path.count("/"), reverse=True):
            mode, at = self._modes[path]
            with contextlib.suppress(OSError):  # removed since
                fd = syscalls.open_beneath(self._top, path or ".", FOLDER)
                try:
                    os.utime(fd, (at, at))
                    os.fchmod(fd, mode | 0o500)
                finally:
                    os.close(fd)

    def _entry(self, tar: tarfile.TarFile, member: tarfile.TarInfo, into: int, name: str, path: str) -> None:
        if member.isdir():
            mode = _mode(into, name)
            if mode is not None and not stat.S_ISDIR(mode):
                self._clear(into, name, path)
            if mode is None or not stat.S_ISDIR(mode):
                _make_folder(into, name, opaque=mode is not None)
            self._modes[path] = (member.mode & 0o1777, _time(member))
            return
        if not (member.isreg() or member.issym() or member.islnk() or member.isfifo()):
            return  # a device
        self._clear(into, name, path)
        if member.issym():
            if not member.linkname or "\0" in member.linkname or len(os.fsencode(member.linkname)) > PATH:
                raise SandboxError(f"a layer has the link {path[:200]!r} to nothing: make the image again without it")
            os.symlink(member.linkname, name, dir_fd=into)
        elif member.islnk():
            self._hard_link(member.linkname, into, name)
        elif member.isfifo():
            os.mkfifo(name, member.mode & 0o777, dir_fd=into)
        else:
            held = tar.extractfile(member)
            assert held is not None
            self._write(held, into, name, member.mode & 0o1777, _time(member))

    def _hard_link(self, target: str, into: int, name: str) -> None:
        real = resolved(self._layers, target)
        found = kind_of(self._layers, real) if real else None
        if found is None or stat.S_ISDIR(found[0]):
            raise SandboxError(f"a layer links to {target[:200]!r}, which it does not have: make the image again")
        above = syscalls.open_beneath(found[1], posixpath.dirname(real) or ".", os.O_RDONLY | os.O_DIRECTORY)
        try:
            base = posixpath.basename(real)
            if found[1] == self._top:
                os.link(base, name, src_dir_fd=above, dst_dir_fd=into, follow_symlinks=False)
            elif stat.S_ISREG(found[0]):
                self._copy(above, base, into, name)
            else:
                raise SandboxError(f"a layer links to {target[:200]!r} of another layer: make the image again")
        finally:
            os.close(above)

    def _copy(self, above: int, base: str, into: int, name: str) -> None:
        with open(open_file(above, base), "rb") as source:
            info = os.fstat(source.fileno())
            self._write(source, into, name, stat.S_IMODE(info.st_mode), int(info.st_mtime))

    def _write(self, source: IO[bytes], into: int, name: str, mode: int, at: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(name, flags, 0o600, dir_fd=into), "wb") as target:
            while data := source.read(1 << 20):
                self._bounds.data(len(data))
                target.write(data)
            target.flush()
            os.fchmod(target.fileno(), mode)
            os.utime(target.fileno(), (at, at))

    def _hide(self, into: int, name: str) -> None:
        """Hide what lower layers have at ``name``; what this layer has there stays."""
        if len(self._layers) == 1:
            return
        mode = _mode(into, name)
        if mode is None:
            os.mknod(name, stat.S_IFCHR | 0o600, 0, dir_fd=into)
        elif stat.S_ISDIR(mode):
            inner = os.open(name, FOLDER, dir_fd=into)
            try:
                _make_opaque(inner)
            finally:
                os.close(inner)

    def _clear(self, into: int, name: str, path: str) -> None:
        """Remove an earlier entry of this layer."""
        mode = _mode(into, name)
        if mode is not None:
            remove(into, name)
            if stat.S_ISDIR(mode):
                self._modes = {p: m for p, m in self._modes.items() if p != path and not p.startswith(f"{path}/")}
        if path in self._led or (mode is not None and not stat.S_ISREG(mode)):
            self._forget()

    def _folder(self, named: str) -> str:
        """Where the folder that an archive names is in this layer; it is made there, with the mode of lower layers."""
        if named in self._known:
            return self._known[named]
        real = posixpath.dirname(resolved(self._layers, f"{named}/x"))
        parts = real.split("/") if real else []
        for depth in range(1, len(parts) + 1):
            path = "/".join(parts[:depth])
            own = kind_of([self._top], path)
            if own is not None and stat.S_ISDIR(own[0]):
                continue
            above = syscalls.open_beneath(self._top, posixpath.dirname(path) or ".", FOLDER)
            try:
                if own is not None:
                    raise SandboxError(f"a layer has files below {path[:200]!r}, a file: make the image again")
                lower = kind_of(self._layers[1:], path)
                hidden = _mode(above, parts[depth - 1]) is not None  # by a whiteout of this layer
                remove(above, parts[depth - 1])
                _make_folder(above, parts[depth - 1], opaque=hidden)
                mode = stat.S_IMODE(lower[0]) if lower is not None and stat.S_ISDIR(lower[0]) else 0o755
                self._modes.setdefault(path, (mode & 0o1777, 0))
            finally:
                os.close(above)
        self._known[named] = real
        for path in (named, real):
            while path and path not in self._led:
                self._led.add(path)
                path = posixpath.dirname(path)
        return real


def _mode(folder: int, name: str) -> int | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return None


def _make_folder(into: int, name: str, *, opaque: bool) -> None:
    os.mkdir(name, 0o700, dir_fd=into)
    if opaque:
        inner = os.open(name, FOLDER, dir_fd=into)
        try:
            _make_opaque(inner)
        finally:
            os.close(inner)


def _make_opaque(folder: int) -> None:
    """Hide what lower layers have in the folder."""
    os.setxattr(folder, "user.overlay.opaque", b"y")


def _time(member: tarfile.TarInfo) -> int:
    return min(_LATEST, max(0, int(member.mtime)))
