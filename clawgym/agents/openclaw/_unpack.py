"""Unpack a container image (an OCI layout, or an archive of ``docker save``) into a root file system.

Invariant: nothing is written outside the target folder, whatever the image contains. Links are resolved inside the
folder, as in a sandbox. All files belong to the current user and have no set-uid bits. Devices are left out.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import stat
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from clawgym.errors import AgentError

__all__ = ["copy_rootfs", "is_image", "resolve", "unpack"]

_LINKS = 40  # most links followed in one path, as in Linux
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"
_ZSTD = b"\x28\xb5\x2f\xfd"

Report = Callable[[str, int, int], None]


# -- paths in a sandbox


def resolve(root: Path, path: str, *, make: bool = False) -> Path | None:
    """Resolve ``path`` as a program with the root folder ``root`` would, or return None if it does not exist.

    ``make`` creates missing folders. Nothing else may change the tree meanwhile.

    Raises OSError for too many links, and with ``make`` if a file is in the place of a folder.
    """
    found: list[str] = []
    todo, links = _parts(path), 0
    while todo:
        part = todo.pop(0)
        if part == "..":
            del found[-1:]
            continue
        here = root.joinpath(*found, part)
        try:
            info = os.lstat(here)
        except (FileNotFoundError, NotADirectoryError):
            if not make:
                return None
            here.mkdir(mode=0o755)
        else:
            if stat.S_ISLNK(info.st_mode):
                links += 1
                if links > _LINKS:
                    raise OSError(f"{path}: too many links")
                target = os.readlink(here)
                todo = _parts(target) + todo
                if target.startswith("/"):
                    found = []
                continue
        found.append(part)
    return root.joinpath(*found)


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


# -- layers


class _Layer:
    """Applies one layer, a tar, to the files of the layers below."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._written: set[Path] = set()

    def add(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        parts = _parts(member.name)
        if ".." in parts:
            raise OSError(f"{member.name}: the name leads out of the image")
        if not parts:
            return
        parent = resolve(self._root, "/".join(parts[:-1]), make=True)
        assert parent is not None
        name, path = parts[-1], parent / parts[-1]
        if name == _OPAQUE:
            for child in list(parent.iterdir()):
                self._hide(child)
        elif name.startswith(_WHITEOUT):
            self._hide(parent / _parts(name.removeprefix(_WHITEOUT) or ".")[-1])
        elif member.isdir():
            if not path.is_dir() or path.is_symlink():
                _unlink(path)
                path.mkdir()
            path.chmod(member.mode & 0o1777 | 0o700)
            self._written.add(path)
        elif member.isreg() or member.issym() or member.islnk():
            self._replace(tar, member, path)
            self._written.add(path)

    def _replace(self, tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
        if member.islnk():
            names = _parts(member.linkname)
            parent = resolve(self._root, "/".join(names[:-1])) if names and ".." not in names else None
            if parent is None or not os.path.lexists(parent / names[-1]):
                raise OSError(f"{member.name}: hard link to {member.linkname!r}, which is not in the image")
            if parent / names[-1] != path:
                _unlink(path)
                os.link(parent / names[-1], path, follow_symlinks=False)
            return
        _unlink(path)
        if member.issym():
            path.symlink_to(member.linkname)
            return
        source = tar.extractfile(member)
        assert source is not None
        with path.open("xb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
            os.fchmod(out.fileno(), member.mode & 0o777 | 0o400)
        os.utime(path, (member.mtime, member.mtime))

    def _hide(self, path: Path) -> None:
        """Remove the files of lower layers at ``path``."""
        if path.is_dir() and not path.is_symlink():
            for child in list(path.iterdir()):
                self._hide(child)
            if path not in self._written and not any(path.iterdir()):
                path.rmdir()
        elif path not in self._written:
            path.unlink(missing_ok=True)


def _unlink(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# -- images


class _Files:
    """The files of an image, in a folder or in a tar."""

    def __init__(self, source: Path) -> None:
        self._folder = source if source.is_dir() else None
        self._tar = None if source.is_dir() else tarfile.open(source, "r:*")  # noqa: SIM115
        self._names = {m.name.removeprefix("./"): m for m in self._tar.getmembers()} if self._tar else {}

    def close(self) -> None:
        if self._tar:
            self._tar.close()

    def __contains__(self, name: str) -> bool:
        return (self._folder / name).is_file() if self._folder else name in self._names

    def open(self, name: str) -> IO[bytes]:
        """Raises OSError if there is no such file."""
        if ".." in name.split("/") or name.startswith("/"):
            raise OSError(f"{name!r}: the name leads out of the image")
        if self._folder:
            return (self._folder / name).open("rb")
        assert self._tar is not None
        found = self._tar.extractfile(self._names[name]) if name in self._names else None
        if found is None:
            raise OSError(f"{name}: no such file in the image")
        return found

    def json(self, name: str) -> Any:
        with self.open(name) as file:
            return json.loads(file.read(1 << 24))


def is_image(source: Path) -> bool:
    """Whether ``source`` is an OCI layout, or a file that could be the archive of an image."""
    return source.is_file() or (source / "index.json").is_file()


def _layers(files: _Files) -> list[str]:
    """Return the names of the layer files, lowest first. Raises OSError, ValueError, LookupError, TypeError."""
    if "index.json" not in files:
        images = files.json("manifest.json")
        if len(images) != 1:
            raise ValueError(f"contains {len(images)} images: save one")
        return list(images[0]["Layers"])
    index = files.json("index.json")
    while "manifests" in index:
        index = files.json(_blob(_matching_manifest(index["manifests"])["digest"]))
    return [_blob(layer["digest"]) for layer in index["layers"]]


def _matching_manifest(manifests: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the manifest for this machine's platform, else the one that names no platform."""
    wanted = ("linux", _ARCHITECTURES.get(platform.machine(), platform.machine()))
    platforms = [m.get("platform") or {} for m in manifests]
    found = [m for m, p in zip(manifests, platforms, strict=True) if (p.get("os"), p.get("architecture")) == wanted]
    found = found or [m for m, p in zip(manifests, platforms, strict=True) if not p]
    if len({m["digest"] for m in found}) != 1:
        raise ValueError(f"contains {len(found)} images for {'/'.join(wanted)}: give a layout or an archive of one")
    return found[0]


def _blob(digest: str) -> str:
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
        raise ValueError(f"digest {digest!r}: not a SHA-256")
    return digest.replace("sha256:", "blobs/sha256/")


class _Hashed:
    """A file that computes the SHA-256 of what is read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._hash = file, hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._hash.update(data)
        return data

    def digest(self) -> str:
        """Read the rest and return the SHA-256 of the whole file."""
        while self.read(1 << 20):
            pass
        return self._hash.hexdigest()


def unpack(source: Path, folder: Path, report: Report) -> None:
    """Unpack the image in ``source`` (an OCI layout, or the tar of an image) into the empty ``folder``.

    Raises :class:`~clawgym.errors.AgentError` if ``source`` is not an image or is damaged.
    """
    try:
        with contextlib.closing(_Files(source)) as files:
            layers = _layers(files)
            for index, name in enumerate(layers):
                report("layers", index, len(layers))
                with files.open(name) as file:
                    if file.read(4) == _ZSTD:
                        raise ValueError("layers are compressed with zstd: skopeo copy --dest-compress-format gzip ...")
                    file.seek(0)
                    hashed, layer = _Hashed(file), _Layer(folder)
                    with tarfile.open(fileobj=hashed, mode="r|*") as tar:  # type: ignore[reportArgumentType]
                        for member in tar:
                            layer.add(tar, member)
                    if (name.startswith("blobs/sha256/")) and hashed.digest() != name.rpartition("/")[2]:
                        raise ValueError(f"{name} is damaged: its SHA-256 does not match its name")
            report("layers", len(layers), len(layers))
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        tarfile.TarError,
        EOFError,
        RecursionError,
    ) as error:
        raise AgentError(
            f"{source}: cannot be unpacked ({error}): give an OCI layout (skopeo copy docker://IMAGE oci:FOLDER:latest)"
            " or an archive of one image (docker save IMAGE -o FILE)"
        ) from error


def copy_rootfs(source: Path, folder: Path) -> None:
    """Copy a root file system into the empty ``folder``, with the same rules as :func:`unpack`. Raises OSError."""

    def special(parent: str, names: list[str]) -> Iterator[str]:
        for name in names:
            mode = os.lstat(os.path.join(parent, name)).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
                yield name

    def copy(one: str, other: str) -> None:
        shutil.copyfile(one, other, follow_symlinks=False)
        info = os.lstat(one)
        os.chmod(other, info.st_mode & 0o777 | 0o400)
        os.utime(other, ns=(info.st_atime_ns, info.st_mtime_ns))

    shutil.copytree(source, folder, symlinks=True, ignore=special, copy_function=copy, dirs_exist_ok=True)
