"""Source packages as trees of files; an instance's repository is made from one.

Invariants: a source archive is only unpacked; no build backend and no ``setup.py`` is run. Only plain files are
unpacked. The files of the repository depend only on the archive.
"""

from __future__ import annotations

import os
import re
import tarfile
from dataclasses import dataclass, replace
from email import message_from_bytes
from functools import cached_property
from pathlib import Path

from clawgym.cache import Progress, cache_folder, filled
from clawgym.errors import TaskError
from clawgym.package_index import fetch
from clawgym.records import TaskFile, check_relative_path
from clawgym.tasks.layers import DISK, check_digest

__all__ = ["Sdist", "Source", "read_source"]

_LARGEST_TREE = 64 * 2**20
_MOST_FILES = 10_000
_LARGEST_REPOSITORY = 8 * 2**20
_FOLDERS = """
.git .github .circleci .gitlab asv_bench benchmark benchmarks bench changelog changes demo demos doc docs example
examples images img news perf screenshots site
"""
_APART = frozenset(_FOLDERS.split())
"""Top-level folders that are not part of the repository: package and tests should not need them."""
_NOT_LIBRARY = re.compile(
    r"(^|/)(tests?|testing|_vendor|vendored|docs?|examples?|benchmarks?|scripts?|tools|bin)/"
    r"|(^|/)(test_[^/]*|[^/]*_test|tests?|conftest|setup|noxfile|fabfile|tasks|versioneer|dodo|_?version|__main__|conf)"
    r"\.py$"
)


@dataclass(frozen=True, slots=True)
class Sdist:
    """A pinned source archive."""

    project: str
    version: str
    filename: str
    sha256: str

    def __post_init__(self) -> None:
        if not self.filename.endswith(".tar.gz"):
            raise TaskError(f"{self.project}: {self.filename} is not a .tar.gz: choose another version of it")
        check_digest(self.sha256, self.filename)


@dataclass(frozen=True)
class Source:
    """An unpacked source package."""

    sdist: Sdist
    folder: Path
    files: tuple[TaskFile, ...]
    """The files of the repository, sorted by path."""
    root: str
    """The folder from which the package is imported: ``src``, or empty for the top folder."""

    @cached_property
    def by_path(self) -> dict[str, TaskFile]:
        return {file.path: file for file in self.files}

    @cached_property
    def library(self) -> tuple[str, ...]:
        """The paths of the package's Python files, without tests."""
        below = f"{self.root}/" if self.root else ""
        tops = {path.split("/")[0] for path in self.by_path if path.count("/") == 1 and path.endswith("/__init__.py")}
        found = []
        for path in self.by_path:
            if not path.startswith(below) or not path.endswith(".py") or _NOT_LIBRARY.search(path):
                continue
            if below or "/" not in path or path.split("/")[0] in tops:
                found.append(path)
        return tuple(found)

    @cached_property
    def metadata(self) -> bytes:
        """The content of ``PKG-INFO``, or empty."""
        path = self.folder / "PKG-INFO"
        return path.read_bytes() if path.is_file() else b""

    @property
    def licence(self) -> str:
        """The licence in the package's metadata."""
        fields = message_from_bytes(self.metadata)
        named = [c.rpartition(" :: ")[2] for c in fields.get_all("Classifier", []) if c.startswith("License :: ")]
        short = str(fields.get("License-Expression") or fields.get("License") or "").strip()
        return short if short and len(short) <= 60 and "\n" not in short else ", ".join(named) or "not said"

    @property
    def requirements(self) -> tuple[str, ...]:
        """The ``Requires-Dist`` lines of the metadata."""
        return tuple(message_from_bytes(self.metadata).get_all("Requires-Dist", []))


def read_source(sdist: Sdist, *, progress: Progress | None = None) -> Source:
    """Download and unpack ``sdist`` (once on each machine), and read it.

    Raises :class:`DownloadError` if it cannot be downloaded, :class:`TaskError` if it is damaged or too large, and
    :class:`MissingDependency` without the extra ``packages``.
    """
    tell = progress or (lambda what, done, total: None)
    place = cache_folder("sources") / sdist.sha256[:32]
    if not place.is_dir():
        archive = fetch(sdist.project, sdist.filename, sdist.sha256, progress=progress)
        try:
            filled(place, lambda folder: _unpack(archive, folder, sdist.filename), tell)
        except OSError as error:
            raise TaskError(f"{sdist.filename}: cannot be kept in {place.parent} ({error}): {DISK}") from error
    files = tuple(_files(place))
    if sum(file.source.stat().st_size for file in files if isinstance(file.source, Path)) > _LARGEST_REPOSITORY:
        raise TaskError(
            f"{sdist.project}: its repository is over {_LARGEST_REPOSITORY >> 20} MiB: choose a smaller package"
        )
    root = "src" if any(file.path.startswith("src/") and file.path.endswith(".py") for file in files) else ""
    source = Source(sdist, place, files, root)
    return replace(source, files=tuple(sorted((*files, *_described(source)), key=lambda file: file.path)))


def _unpack(archive: Path, folder: Path, where: str) -> None:
    """Unpack the plain files of the archive, without its top folder, links and special files."""
    total = count = 0
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                if not member.isreg():
                    continue
                path = member.name.removeprefix("./").partition("/")[2]
                check_relative_path(path, where)
                total, count = total + member.size, count + 1
                if total > _LARGEST_TREE or count > _MOST_FILES:
                    raise TaskError(f"{where}: is too large for a task when unpacked: choose a smaller package")
                content = tar.extractfile(member)
                assert content is not None
                target = folder / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content.read())
                target.chmod(0o755 if member.mode & 0o100 else 0o644)
    except (tarfile.TarError, EOFError, ValueError) as error:
        if isinstance(error, TaskError):
            raise
        raise TaskError(f"{where}: is damaged ({error}): choose another version of it") from error


def _files(folder: Path) -> list[TaskFile]:
    found = []
    for root, folders, names in os.walk(folder):
        at = Path(root).relative_to(folder)
        if at == Path("."):
            folders[:] = [name for name in folders if name.lower() not in _APART]
        for name in names:
            path = Path(root, name)
            found.append(TaskFile((at / name).as_posix(), path, bool(path.stat().st_mode & 0o100)))
    return sorted(found, key=lambda file: file.path)


def _described(source: Source) -> list[TaskFile]:
    """A ``METADATA`` file for ``importlib.metadata``, if the archive has none, so that the package counts as
    installed."""
    if not source.metadata or any(".egg-info/" in path and path.endswith("PKG-INFO") for path in source.by_path):
        return []
    name = re.sub(r"[-_.]+", "_", source.sdist.project)
    below = f"{source.root}/" if source.root else ""
    return [TaskFile(f"{below}{name}-{source.sdist.version}.dist-info/METADATA", source.metadata)]
