"""Layers: read-only folders of pure-Python packages that are mounted into sandboxes.

A layer is made from a lock, a list of pinned wheels, once on each machine. Wheels come from the user's package index:
``PIP_INDEX_URL``, ``UV_DEFAULT_INDEX``, pip's configuration, or the default of the library ``pypi-simple``.

Invariants: a layer's digest depends only on its lock. A file is used only if it has the pinned SHA-256. No code of a
package is run or built on the host. A layer in the cache is complete.
"""

from __future__ import annotations

import compileall
import hashlib
import json
import os
import py_compile
import re
import stat
import zipfile
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from clawgym.cache import Progress, cache_folder, filled
from clawgym.errors import TaskError
from clawgym.package_index import fetch, is_sha256
from clawgym.records import Layer, check_relative_path

__all__ = [
    "Lock",
    "Progress",
    "Wheel",
    "cached",
    "lock_of_layer",
    "layer_folder",
    "prepare",
    "read_lock",
]

_LARGEST_TREE = 256 * 2**20
_MOST_FILES = 50_000
_PURE = re.compile(r"[^-/]+-[^-/]+-(?:[0-9][^-/]*-)?(?:py2\.)?py3-none-any\.whl")


@dataclass(frozen=True, slots=True)
class Wheel:
    """One pinned pure-Python wheel. Raises :class:`TaskError` for any other file name."""

    project: str
    version: str
    filename: str
    sha256: str

    def __post_init__(self) -> None:
        if not _PURE.fullmatch(self.filename):
            raise TaskError(f"{self.project}: {self.filename} is not a pure-Python wheel: leave that package out")
        check_digest(self.sha256, self.filename)


@dataclass(frozen=True)
class Lock:
    """The pinned wheels that a layer is made from."""

    name: str
    """For messages only. Locks with the same wheels have the same digest and share one folder."""
    wheels: tuple[Wheel, ...]

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 over the file names and digests."""
        rows = sorted((wheel.filename, wheel.sha256) for wheel in self.wheels)
        return hashlib.sha256(json.dumps(["layer", 1, rows]).encode()).hexdigest()

    def as_dict(self) -> dict[str, Any]:
        """The lock as JSON values, for :func:`lock_of`."""
        rows = sorted(self.wheels, key=lambda wheel: wheel.filename)
        return {
            "name": self.name,
            "wheels": [
                {"project": w.project, "version": w.version, "filename": w.filename, "sha256": w.sha256} for w in rows
            ],
        }


def check_digest(sha256: str, where: str) -> None:
    """Raise :class:`TaskError` if ``sha256`` is not a hex SHA-256."""
    if not is_sha256(sha256):
        raise TaskError(f"{where}: sha256 {sha256!r} is not 64 hexadecimal digits: correct it")


def read_lock(text: str) -> Lock:
    """The lock in the JSON ``text``: ``{"name", "wheels": [{"project", "version", "filename", "sha256"}]}``.

    Raises :class:`TaskError` naming the field.
    """
    try:
        body = json.loads(text)
    except ValueError as error:
        raise TaskError(f"lock: not JSON ({error}): restore it") from error
    return lock_of(body, "lock")


def lock_of(body: Any, where: str) -> Lock:
    """A lock from its :meth:`Lock.as_dict`. Raises :class:`TaskError` naming ``where`` and the field."""
    if not isinstance(body, dict) or not isinstance(body.get("name"), str) or not isinstance(body.get("wheels"), list):
        raise TaskError(f"{where}: needs a text 'name' and a list 'wheels': restore it")
    wheels = []
    for index, row in enumerate(body["wheels"]):
        fields = [row.get(key) if isinstance(row, dict) else None for key in Wheel.__slots__]
        if not all(isinstance(field, str) for field in fields):
            raise TaskError(f"{where}: wheels[{index}] needs the texts {', '.join(Wheel.__slots__)}: restore it")
        wheels.append(Wheel(*fields))  # type: ignore[reportArgumentType]
    if not wheels:
        raise TaskError(f"{where}: has no wheels: restore it")
    return Lock(body["name"], tuple(wheels))


def layer_folder(lock: Lock) -> Path:
    """The folder of the layer of ``lock`` on this machine, prepared or not."""
    return cache_folder("layers") / lock.digest[:32]


def cached(lock: Lock) -> Layer | None:
    """The layer of ``lock`` if it is prepared on this machine, or None."""
    place = layer_folder(lock)
    return Layer(lock.name, lock.digest, place) if place.is_dir() else None


def prepare(lock: Lock, *, progress: Progress | None = None) -> Layer:
    """The layer of ``lock``, from the cache or made now.

    Raises:
        DownloadError: if a wheel cannot be downloaded or does not have the pinned digest.
        TaskError: if a wheel cannot be unpacked, or the cache cannot be written.
        MissingDependency: without the extra ``packages``.
    """
    tell = progress or (lambda what, done, total: None)
    if (there := cached(lock)) is not None and _note(there.folder).is_file():
        return there
    files = []
    for done, wheel in enumerate(lock.wheels):
        tell(f"fetching {lock.name}", done, len(lock.wheels))
        files.append(fetch(wheel.project, wheel.filename, wheel.sha256))

    def fill(folder: Path) -> None:
        taken: dict[str, str] = {}
        for done, (wheel, path) in enumerate(zip(lock.wheels, files, strict=True)):
            tell(f"unpacking {lock.name}", done, len(lock.wheels))
            _unpack(wheel, path, folder, taken)
        _compile(folder)

    try:
        place = filled(layer_folder(lock), fill, tell)
        note = _note(place).with_suffix(f".{os.getpid()}")
        note.write_text(json.dumps(lock.as_dict(), indent=1) + "\n", encoding="utf-8")
        os.replace(note, _note(place))
    except OSError as error:
        raise TaskError(
            f"layer {lock.name}: cannot be kept in {layer_folder(lock).parent} ({error}): {DISK}"
        ) from error
    return Layer(lock.name, lock.digest, layer_folder(lock))


DISK = "free or repair that disk, or set XDG_CACHE_HOME to another"


def _note(place: Path) -> Path:
    return place.with_name(f"{place.name}.json")


def lock_of_layer(layer: Layer) -> Lock:
    """The lock that a layer on this machine was made from. Task folders store it.

    Raises :class:`TaskError` for a folder that :func:`prepare` did not make.
    """
    try:
        lock = read_lock(_note(layer.folder).read_text(encoding="utf-8"))
    except OSError as error:
        raise TaskError(f"layer {layer.name}: {layer.folder} was not made from a lock: use layers.prepare") from error
    if lock.digest != layer.digest:
        raise TaskError(f"layer {layer.name}: {_note(layer.folder)} is another lock: remove that folder and file")
    return lock


def _unpack(wheel: Wheel, path: Path, folder: Path, taken: dict[str, str]) -> None:
    """Unpack the importable files of a wheel, without scripts and data."""
    where = wheel.filename
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            if len(entries) + len(taken) > _MOST_FILES or sum(e.file_size for e in entries) > _LARGEST_TREE:
                raise TaskError(f"{where}: is too large for a layer when unpacked: leave that package out")
            for entry in entries:
                if (name := _importable(entry, where)) is None:
                    continue
                if name in taken:
                    raise TaskError(f"{where}: {name} is in {taken[name]} too: leave one of the packages out")
                taken[name] = where
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(entry))
    except TaskError:
        raise
    except (zipfile.BadZipFile, zlib.error, LookupError, ValueError, RuntimeError, EOFError) as error:
        raise TaskError(f"{where}: is damaged ({error}): leave that package out") from error


def _importable(entry: zipfile.ZipInfo, where: str) -> str | None:
    """The path of an archive member in the layer, or None if it is not importable. Raises :class:`TaskError` for an
    unsafe path or a special file."""
    if entry.is_dir():
        return None
    name, kind = entry.filename, entry.external_attr >> 16
    check_relative_path(name, where)
    if stat.S_IFMT(kind) not in (0, stat.S_IFREG) or "\\" in name:
        raise TaskError(f"{where}: {name} is not a plain file: leave that package out")
    top, _, rest = name.partition("/")
    if not top.endswith(".data"):
        return name
    part, _, below = rest.partition("/")
    return below if part == "purelib" and below else None


def _compile(folder: Path) -> None:
    """Compile to byte code of this Python version. Sandboxes with the same version start faster."""
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH  # the folder never changes
    compileall.compile_dir(folder, quiet=2, ddir="", invalidation_mode=mode)
