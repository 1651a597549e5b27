"""Fetch pinned files from the user's package index.

The index is ``PIP_INDEX_URL``, ``UV_DEFAULT_INDEX``, pip's configuration, or the default of the library
``pypi-simple``. Invariant: a file is returned only if it has the pinned SHA-256. No code of a package is run.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from clawgym.cache import Progress, cache_folder, only_one
from clawgym.errors import DownloadError, MissingDependency
from clawgym.records import check_relative_path

__all__ = ["LARGEST_FILE", "fetch", "index_of", "is_sha256"]

LARGEST_FILE = 64 * 2**20
"""Most bytes of a download, unless more are asked for."""
_RETRY_HINT = "go online, or set PIP_INDEX_URL to a package index that can be reached, and run the same command again"


def is_sha256(text: str) -> bool:
    """Whether ``text`` is a SHA-256 in hexadecimal digits."""
    return re.fullmatch(r"[0-9a-f]{64}", text) is not None


def fetch(
    project: str, filename: str, sha256: str, *, progress: Progress | None = None, most: int = LARGEST_FILE
) -> Path:
    """A file of the package index, pinned by digest, from the cache or downloaded now. ``most``: bytes.

    Raises :class:`DownloadError` if it cannot be downloaded, is larger or has another digest, and
    :class:`MissingDependency` without the extra ``packages``.
    """
    if not is_sha256(sha256):
        raise ValueError(f"{filename}: sha256 {sha256!r} is not 64 hexadecimal digits: correct it")
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
                raise DownloadError(f"{project}: the package index ({index.address}) has no {filename}: {_RETRY_HINT}")
            path = Path(scratch, "file")
            index.download(found, path, tell, most)
            with path.open("rb") as file:
                got = hashlib.file_digest(file, "sha256").hexdigest()
            if got != sha256:
                raise DownloadError(
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

    def download(self, package: Any, path: Path, tell: Progress, most: int = LARGEST_FILE) -> None:
        with _explained(self._project, self.address):
            meter = _Meter(package.filename, tell, most)
            self._client.download_package(package, path, verify=False, progress=meter, timeout=60)


class _Meter:
    """Reports the progress of a download, and aborts one that is too large."""

    def __init__(self, filename: str, tell: Progress, most: int) -> None:
        self._filename, self._tell, self._most, self._done, self._total = filename, tell, most, 0, 0

    def __call__(self, size: int | None) -> _Meter:
        self._total = size or 0
        return self

    def __enter__(self) -> _Meter:
        return self

    def __exit__(self, *_: object) -> None: ...

    def update(self, increment: int) -> None:
        self._done += increment
        if self._done > self._most:
            raise DownloadError(f"{self._filename}: is larger than {self._most >> 20} MiB: leave that package out")
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
        raise DownloadError(f"{project}: the package index {address} is not an http(s) address: set PIP_INDEX_URL")
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
        raise DownloadError(
            f"{project}: the package index ({shown}) has no such package: check its name, or set PIP_INDEX_URL"
        ) from error
    except (requests.RequestException, pypi_simple.UnsupportedContentTypeError, ValueError, OSError) as error:
        raise DownloadError(
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
