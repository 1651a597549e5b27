"""Read container images: OCI layouts, as folder or archive; ``docker save``; and a tar of a root file system.

Invariant: every blob of an OCI layout is checked against its digest before it is used, and every layer against that in
the image's configuration.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import itertools
import json
import lzma
import os
import platform
import stat
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from clawgym.errors import SandboxError
from clawgym.tars import BoundedTarInfo

__all__ = ["SourceImage", "SourceLayer", "opened"]

_MOST_JSON = 4 << 20
_MOST_BLOBS = 10_000
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True)
class SourceLayer:
    """One layer of an image."""

    digest: str | None
    """``sha256:`` and hex of the uncompressed tar; None if the source does not say."""
    open: Callable[[], IO[bytes]]
    """Opens the uncompressed tar."""


@dataclass(frozen=True)
class SourceImage:
    """An image in a source; layers bottom first."""

    layers: tuple[SourceLayer, ...]
    config: dict[str, Any]
    """``config`` of the image configuration: ``Env``, ``WorkingDir``, ``User``, ``Entrypoint``, ``Cmd``."""


@contextmanager
def opened(source: Path) -> Iterator[SourceImage]:
    """The image in a folder or archive.

    Raises:
        SandboxError: there is no image, there are several, or one for another architecture.
    """
    try:
        if source.is_dir():
            yield _described(_Folder(source), str(source))
        elif source.is_file():
            with source.open("rb") as file:
                if _decompressor(file.read(6)) is not None:
                    yield _plain(source)
                    return
                file.seek(0)
                with tarfile.open(fileobj=file, mode="r:", tarinfo=BoundedTarInfo) as tar:
                    held = _Archive(tar)
                    inside = held.names() & {"index.json", "manifest.json"}
                    yield _described(held, str(source)) if inside else _plain(source)
        else:
            raise SandboxError(f"{source}: no such file or folder: name an image archive or an OCI layout")
    except (
        tarfile.TarError,
        EOFError,
        LookupError,
        TypeError,
        AttributeError,  # a list or a text where an object should be
        ValueError,
        RecursionError,
        lzma.LZMAError,
    ) as error:
        raise SandboxError(f"{source}: is no image that can be read ({error}): make the archive again") from error
    except OSError as error:
        raise SandboxError(
            f"{source}: cannot be read ({error}): make it readable, or make the archive again"
        ) from error


class _Folder:
    def __init__(self, top: Path) -> None:
        self._top = top

    def names(self) -> set[str]:
        return {entry.name for entry in self._top.iterdir()}

    def open(self, name: str) -> IO[bytes]:
        fd = os.open(self._top / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise ValueError(f"{name} is no file")
        return open(fd, "rb")


class _Archive:
    def __init__(self, tar: tarfile.TarFile) -> None:
        self._tar = tar
        few = itertools.islice(tar, _MOST_BLOBS)  # an archive with more is that of a root file system
        self._members = {member.name.removeprefix("./"): member for member in few if member.isfile()}

    def names(self) -> set[str]:
        return set(self._members)

    def open(self, name: str) -> IO[bytes]:
        held = self._tar.extractfile(self._members[name])
        assert held is not None
        return held


def _plain(source: Path) -> SourceImage:
    """A tar of a root file system."""
    return SourceImage((SourceLayer(None, lambda: _uncompressed(source.open("rb"))),), {})


def _described(source: _Folder | _Archive, where: str) -> SourceImage:
    if "index.json" in source.names():
        manifest = _manifest(source, _json(source, "index.json"), where)
        blobs = [_blob(layer["digest"]) for layer in manifest["layers"]]
        config = _checked_json(source, manifest["config"]["digest"])
        for layer, name in zip(manifest["layers"], blobs, strict=True):
            _verify(source, name, layer["digest"])
    elif "manifest.json" in source.names():
        entries = _json(source, "manifest.json")
        if len(entries) != 1:
            raise SandboxError(f"{where}: holds {len(entries)} images: save one of them into a file of its own")
        blobs, config = entries[0]["Layers"], _json(source, entries[0]["Config"])
    else:
        raise SandboxError(f"{where}: has neither index.json nor manifest.json: name an OCI layout or an archive")
    wanted, found = _ARCHITECTURES.get(platform.machine(), platform.machine()), config.get("architecture")
    if (config.get("os", "linux"), found or wanted) != ("linux", wanted):
        raise SandboxError(f"{where}: is for {config.get('os')}/{found}: fetch the image for linux/{wanted}")
    digests = config["rootfs"]["diff_ids"]
    if len(digests) != len(blobs):
        raise SandboxError(f"{where}: has {len(blobs)} layers and digests of {len(digests)}: make the archive again")
    layers = tuple(
        SourceLayer(str(d), lambda b=b: _uncompressed(source.open(b))) for d, b in zip(digests, blobs, strict=True)
    )
    return SourceImage(layers, config.get("config") or {})


def _manifest(source: _Folder | _Archive, index: Any, where: str) -> Any:
    """The manifest of the one image for this machine."""
    wanted = _ARCHITECTURES.get(platform.machine(), platform.machine())
    for _ in range(4):  # an index may name other indexes
        fitting = [
            entry
            for entry in index["manifests"]
            if (entry.get("platform") or {}).get("architecture", wanted) in (wanted, "unknown")
            and (entry.get("annotations") or {}).get("vnd.docker.reference.type") != "attestation-manifest"
        ]
        if len(fitting) != 1:
            raise SandboxError(
                f"{where}: holds {len(fitting)} images for linux/{wanted}: copy one of them out "
                "(skopeo copy oci:FOLDER:TAG oci-archive:FILE)"
            )
        found = _checked_json(source, fitting[0]["digest"])
        if "manifests" not in found:
            return found
        index = found
    raise SandboxError(f"{where}: an index in an index in an index: make the archive again")


def _blob(digest: str) -> str:
    kind, _, value = digest.partition(":")
    if kind not in ("sha256", "sha512") or not value or set(value) - set("0123456789abcdef"):
        raise ValueError(f"the digest {digest[:100]!r}")
    return f"blobs/{kind}/{value}"


def _json(source: _Folder | _Archive, name: str) -> Any:
    with source.open(name) as file:
        data = file.read(_MOST_JSON + 1)
    if len(data) > _MOST_JSON:
        raise ValueError(f"{name} has more than {_MOST_JSON} bytes")
    return json.loads(data)


def _checked_json(source: _Folder | _Archive, digest: str) -> Any:
    _verify(source, _blob(digest), digest)
    return _json(source, _blob(digest))


def _verify(source: _Folder | _Archive, name: str, digest: str) -> None:
    kind, _, value = digest.partition(":")
    with source.open(name) as file:
        if hashlib.file_digest(file, kind).hexdigest() != value:  # type: ignore[arg-type]
            raise SandboxError(f"{name}: its content has another digest: fetch the image again")


def _decompressor(start: bytes) -> Callable[[IO[bytes]], IO[bytes]] | None:
    for magic, function in ((b"\x1f\x8b", gzip.open), (b"BZh", bz2.open), (b"\xfd7zXZ\x00", lzma.open)):
        if start.startswith(magic):
            return lambda file: function(file, "rb")  # type: ignore[return-value]
    if start.startswith(b"\x28\xb5\x2f\xfd"):
        raise SandboxError("a layer is compressed by zstd: make it with gzip (skopeo copy --dest-compress-format gzip)")
    return None


def _uncompressed(file: IO[bytes]) -> IO[bytes]:
    start = file.read(6)
    file.seek(0)
    function = _decompressor(start)
    return file if function is None else function(file)
