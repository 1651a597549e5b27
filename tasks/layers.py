"""Layers: read-only folders of pure-Python packages that are mounted into sandboxes.

A layer is made from a lock, a list of pinned wheels, once on each machine. Wheels come from the user's package index:
``PIP_INDEX_URL``, ``UV_DEFAULT_INDEX``, pip's configuration, or the default of the library ``pypi-simple``.

Invariants: a layer's digest depends only on its lock. A file is used only if it has the pinned SHA-256. No code of a
package is run or built on the host. A layer in the cache is complete.
"""

from __future__ import annotations

import compileall
import contextlib
import hashlib
import json
import os
import py_compile
import re
import stat
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from clawgym.cache import Progress, cache_folder, filled, only_one
from clawgym.errors import MissingDependency, TaskError, TaskSetNotFound
from clawgym.records import Layer, check_relative_path

__all__ = [
    "Lock",
    "Progress",
    "Wheel",
    "cached",
    "fetch",
    "index_of",
    "lock_of_layer",
    "layer_folder",
    "prepare",
    "read_lock",
]

LARGEST_FILE = 64 * 2**20
"""Bytes of one download."""
_LARGEST_TREE = 256 * 2**20
_MOST_FILES = 50_000
_PURE = re.compile(r"[^-/]+-[^-/]+-(?:[0-9][^-/]*-)?(?:py2\.)?py3-none-any\.whl")
_RETRY_HINT = "go online, or set PIP_INDEX_URL to a package index that can be reached, and run the same command again"


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
    if not re.fullmatch(r"[0-9a-f]{64}", sha256):
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
        TaskSetNotFound: if a wheel cannot be downloaded or does not have the pinned digest.
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


# -- the index


def fetch(project: str, filename: str, sha256: str, *, progress: Progress | None = None) -> Path:
    """A file of the package index, pinned by digest, from the cache or downloaded now.

    Raises :class:`TaskSetNotFound` if it cannot be downloaded or has another digest, and :class:`MissingDependency`
    without the extra ``packages``.
    """
    check_digest(sha256, filename)
    check_relative_path(filename, project)
    place = cache_folder("packages") / f"{sha256[:16]}-{filename}"
    if place.is_file():
        return place
    tell = progress or (lambda what, done, total: None)
    with only_one(place, tell):
        if place.is_file():
            return place
        with tempfile.TemporaryDirectory(prefix=".", dir=place.parent) as scratch, index_of(project) as index:
            found = next((package for package in index.packages if package.filename == filename), None)
            if found is None:
                raise TaskSetNotFound(
                    f"{project}: the package index ({index.address}) has no {filename}: {_RETRY_HINT}"
                )
            path = Path(scratch, "file")
            index.download(found, path, tell)
            with path.open("rb") as file:
                got = hashlib.file_digest(file, "sha256").hexdigest()
            if got != sha256:
                raise TaskSetNotFound(
                    f"{project}: {filename} of the package index ({index.address}) has the SHA-256 {got[:16]}..., not "
                    f"{sha256[:16]}...: it is not the pinned file; set PIP_INDEX_URL to an index that has that one"
                )
            path.chmod(0o444)
            os.replace(path, place)
    return place


class _Index:
    """One project's page of the package index."""

    def __init__(self, client: Any, page: Any, project: str, address: str) -> None:
        self._client, self._project = client, project
        self.packages: list[Any] = page.packages
        self.address = address

    def download(self, package: Any, path: Path, tell: Progress) -> None:
        with _explained(self._project, self.address):
            meter = _Meter(package.filename, tell)
            self._client.download_package(package, path, verify=False, progress=meter, timeout=60)


class _Meter:
    """Reports the progress of a download, and aborts one that is too large."""

    def __init__(self, filename: str, tell: Progress) -> None:
        self._filename, self._tell, self._done, self._total = filename, tell, 0, 0

    def __call__(self, size: int | None) -> _Meter:
        self._total = size or 0
        return self

    def __enter__(self) -> _Meter:
        return self

    def __exit__(self, *_: object) -> None: ...

    def update(self, increment: int) -> None:
        self._done += increment
        if self._done > LARGEST_FILE:
            raise TaskSetNotFound(f"{self._filename}: is larger than {LARGEST_FILE >> 20} MiB: leave that package out")
        self._tell(f"fetching {self._filename}", self._done, self._total)


@contextlib.contextmanager
def index_of(project: str) -> Iterator[_Index]:
    """The project's page of the user's package index. Raises as :func:`fetch` does."""
    try:
        import pypi_simple
    except ImportError as error:
        raise MissingDependency(
            f"{project} comes from a package index, which needs pypi-simple: pip install 'clawgym[packages]'"
        ) from error
    address = _address() or pypi_simple.PYPI_SIMPLE_ENDPOINT
    if not address.startswith(("http://", "https://")):
        raise TaskSetNotFound(f"{project}: the package index {address} is not an http(s) address: set PIP_INDEX_URL")
    shown = _without_secrets(address)
    with pypi_simple.PyPISimple(address if address.endswith("/") else address + "/", session=_session()) as client:
        with _explained(project, shown):
            page = client.get_project_page(project, timeout=60)
        yield _Index(client, page, project, shown)


def _session() -> Any:
    """A session that retries, like pip, if a connection fails or the server is busy."""
    import requests
    from requests.adapters import HTTPAdapter
    from urllib3 import Retry

    session = requests.Session()
    retry = Retry(total=3, backoff_factor=0.3, status_forcelist=(429, 500, 502, 503, 504), raise_on_status=False)
    for scheme in ("http://", "https://"):
        session.mount(scheme, HTTPAdapter(max_retries=retry))
    return session


@contextlib.contextmanager
def _explained(project: str, shown: str) -> Iterator[None]:
    import pypi_simple
    import requests

    try:
        yield
    except pypi_simple.NoSuchProjectError as error:
        raise TaskSetNotFound(
            f"{project}: the package index ({shown}) has no such package: check its name, or set PIP_INDEX_URL"
        ) from error
    except (requests.RequestException, pypi_simple.UnsupportedContentTypeError, ValueError, OSError) as error:
        raise TaskSetNotFound(
            f"{project}: cannot be downloaded from the package index {shown} ({type(error).__name__}): {_RETRY_HINT}"
        ) from error


def _address() -> str | None:
    """The package index that the user has configured, or None."""
    for variable in ("PIP_INDEX_URL", "UV_DEFAULT_INDEX"):
        if address := os.environ.get(variable, "").strip():
            return address
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "get", "global.index-url"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
        if done.returncode == 0:
            return done.stdout.strip() or None
    return None


def _without_secrets(address: str) -> str:
    """The address without user name and password."""
    parts = urlsplit(address)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
