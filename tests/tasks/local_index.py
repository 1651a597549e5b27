"""A package index on loopback, with packages made on the fly: real ones repacked from this environment, and our own."""

from __future__ import annotations

import base64
import contextlib
import functools
import gzip
import hashlib
import http.server
import io
import tarfile
import threading
import zipfile
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path


class Index:
    """Files by project, served as a simple index (PEP 503). ``asked`` counts the requests."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.address, self.asked = folder, "", []
        self.files: dict[str, dict[str, bytes]] = {}

    def add(self, project: str, filename: str, data: bytes) -> str:
        """Offer a file; returns its hex SHA-256."""
        self.files.setdefault(project, {})[filename] = data
        return hashlib.sha256(data).hexdigest()

    def page(self, project: str) -> bytes:
        links = "".join(
            f'<a href="/files/{project}/{name}#sha256={hashlib.sha256(data).hexdigest()}">{name}</a><br>'
            for name, data in self.files[project].items()
        )
        return f"<!DOCTYPE html><html><body>{links}</body></html>".encode()


class _Handler(http.server.BaseHTTPRequestHandler):
    def __init__(self, index: Index, *rest) -> None:
        self.index = index
        super().__init__(*rest)

    def do_GET(self) -> None:
        self.index.asked.append(self.path)
        parts = self.path.strip("/").split("/")
        try:
            if parts[0] == "simple":
                body, kind = self.index.page(parts[1]), "text/html"
            else:
                body, kind = self.index.files[parts[1]][parts[2]], "application/octet-stream"
        except (KeyError, IndexError):
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_) -> None: ...


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Index]:
    """An index that answers until the block ends."""
    index = Index(folder)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Handler, index))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    index.address = f"http://127.0.0.1:{server.server_address[1]}/simple/"
    try:
        yield index
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def wheel(name: str, version: str, files: Mapping[str, str | bytes]) -> tuple[str, bytes]:
    """A pure-Python wheel: its file name and bytes."""
    about = f"{name}-{version}.dist-info"
    whole = {
        **files,
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    return f"{name}-{version}-py3-none-any.whl", zipped(whole)


def zipped(files: Mapping[str, str | bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        rows = []
        for path, text in files.items():
            data = text.encode() if isinstance(text, str) else text
            archive.writestr(zipfile.ZipInfo(path), data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows.append(f"{path},sha256={digest},{len(data)}")
            if path.endswith(".dist-info/WHEEL"):
                archive.writestr(zipfile.ZipInfo(path.replace("WHEEL", "RECORD")), "\n".join(rows) + "\n")
    return out.getvalue()


@functools.cache
def installed(name: str) -> tuple[str, str, bytes]:
    """A pure-Python package of this environment as a wheel: version, file name, bytes."""
    package = metadata.distribution(name)
    files = {}
    for path in package.files or ():
        text = path.as_posix()
        if text.startswith("..") or text.endswith((".pyc", "RECORD", "INSTALLER", "REQUESTED", "direct_url.json")):
            continue
        files[text] = Path(str(package.locate_file(path))).read_bytes()
    files = dict(sorted(files.items(), key=lambda item: item[0].endswith(".dist-info/WHEEL")))
    return package.version, f"{name}-{package.version}-py3-none-any.whl", zipped(files)


PYTEST = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")


def add_pytest(index: Index) -> None:
    """Offer the pytest that runs this."""
    for name in PYTEST:
        _, filename, data = installed(name)
        index.add(name, filename, data)


def sdist(name: str, version: str, files: Mapping[str, str]) -> tuple[str, bytes]:
    """A source archive: its file name and bytes."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for path, text in {**files, "PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"}.items():
            entry = tarfile.TarInfo(f"{name}-{version}/{path}")
            entry.size, entry.mode = len(text.encode()), 0o644
            tar.addfile(entry, io.BytesIO(text.encode()))
    return f"{name}-{version}.tar.gz", gzip.compress(out.getvalue(), mtime=0)


SHOP = {
    "src/shop/__init__.py": '''\
"""Prices of a small shop."""


def total(prices, discount=0):
    """The sum, less a discount in percent."""
    whole = 0
    for price in prices:
        if price < 0:
            raise ValueError("a price is negative")
        whole += price
    return whole - whole * discount // 100


def cheapest(prices, count=1):
    """The lowest prices."""
    if count < 1 or not prices:
        return []
    return sorted(prices)[:count]


def label(name, price):
    """A label for a shelf."""
    if len(name) > 12:
        name = name[:11] + "…"
    return f"{name:<12}{price:>6}"


def split(amount, parts):
    """Equal whole parts; the first ones take the rest."""
    each, rest = divmod(amount, parts)
    found = []
    for number in range(parts):
        if number < rest:
            found.append(each + 1)
            continue
        found.append(each)
    return found
''',
    "tests/test_shop.py": """\
import pytest

from shop import cheapest, label, split, total


@pytest.mark.parametrize(("prices", "whole"), [([], 0), ([1], 1), ([1, 2], 3), ([5, 5, 5], 15)])
def test_total(prices, whole):
    assert total(prices) == whole


def test_discount():
    assert total([100, 100], 25) == 150


def test_negative():
    with pytest.raises(ValueError):
        total([-1])


@pytest.mark.parametrize(("count", "found"), [(0, []), (1, [1]), (2, [1, 2]), (9, [1, 2, 3])])
def test_cheapest(count, found):
    assert cheapest([3, 1, 2], count) == found


def test_cheapest_of_nothing():
    assert cheapest([]) == []


@pytest.mark.parametrize("name", ["tea", "exactly12ch.", "a very long name of a thing"])
def test_label(name):
    assert len(label(name, 5)) == 18


@pytest.mark.parametrize(("amount", "parts"), [(10, 3), (9, 3), (1, 2), (0, 1), (7, 7)])
def test_split(amount, parts):
    found = split(amount, parts)
    assert sum(found) == amount
    assert max(found) - min(found) <= 1
    assert found == sorted(found, reverse=True)
""",
    "docs/index.md": "# Shop\n",
    "pyproject.toml": '[project]\nname = "shop"\nversion = "1.0"\n\n[tool.pytest.ini_options]\naddopts = "--cov"\n',
}
"""A package with a suite."""
