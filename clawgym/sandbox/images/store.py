"""Images on this machine: names, and layers that are unpacked once.

Layers are folders that overlays read. They are found by the digest of their content and of all layers below, so that
images share them. ``images/HEX.json`` describes an image, and ``names/NAME`` holds its digest.

Invariants: a layer's folder is complete. A name always leads to a complete image.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import tempfile
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from clawgym.cache import Progress, cache_folder, only_one
from clawgym.errors import SandboxError
from clawgym.sandbox.images import oci
from clawgym.sandbox.images.layers import Bounds, read_file, unpack
from clawgym.sandbox.inside.trees import remove_tree

__all__ = ["StoredImage", "ImageStore"]

_SHELLS = ("bin/bash", "usr/bin/bash")


@dataclass(frozen=True)
class StoredImage:
    """An image in the store."""

    digest: str
    """Hex SHA-256 of its layers and settings."""
    layers: tuple[Path, ...]
    """Unpacked, bottom first."""
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str = "/"
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()

    def settings(self) -> dict[str, Any]:
        """All but the digest and the layers, for :meth:`ImageStore.save`."""
        return {name: value for name, value in asdict(self).items() if name not in ("digest", "layers")}


class ImageStore:
    """The images below ``folder``; by default those of this user's cache."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or cache_folder("images")

    def add(self, source: str, name: str | None = None, *, progress: Progress | None = None) -> StoredImage:
        """Unpack an image, as ``name`` (by default the name of the file or reference).

        ``source`` is an OCI layout, an archive of one, an archive by ``docker save``, a tar of a root file system, or
        what skopeo can copy (``docker://debian:12``, ``docker-daemon:NAME``), if skopeo is installed.

        Raises :class:`~clawgym.errors.SandboxError` if it is refused.
        """
        image = self.unpack(source, progress=progress)
        if name is None and _is_reference(source):
            name = source.partition(":")[2].lstrip("/")
        name = name or Path(source).expanduser().name.removesuffix(".gz").removesuffix(".tar")
        return self.save(name, image.layers, image.settings())

    def unpack(self, source: str, *, as_root: bool = False, progress: Progress | None = None) -> StoredImage:
        """As :meth:`add`, but without a name; with ``as_root`` also an image whose programs run as another user."""
        tell = progress or (lambda what, done, total: None)
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(source).expanduser()
            if _is_reference(source):
                tell(f"fetching {source}", 0, 0)
                path = Path(scratch) / "image.tar"
                _skopeo(source, path)
            bounds = Bounds()
            layers: list[Path] = []
            with oci.opened(path) as described:
                settings = _settings(described.config, as_root, source)
                chain = ""
                for number, layer in enumerate(described.layers):
                    tell(f"unpacking {source}", number, len(described.layers))
                    digest = layer.digest or f"sha256:{_digest(layer.open)}"
                    chain = f"{chain} {digest}".strip()
                    layers.append(
                        self.layer(chain, lambda at, one=layer, d=digest: _fill(at, one, d, layers, bounds), tell)
                    )
        return self.describe(tuple(layers), settings)

    def find(self, name: str) -> StoredImage | None:
        """The image with a name, or with the digest ``sha256:HEX``; None if there is none."""
        digest = name.removeprefix("sha256:")
        if digest == name:
            try:
                digest = (self._folder / "names" / _quoted(name)).read_text("ascii").strip()
            except (OSError, ValueError, SandboxError):
                return None
        if not digest or set(digest) - set("0123456789abcdef"):
            return None
        try:
            found = json.loads((self._folder / "images" / f"{digest}.json").read_text("utf-8"))
        except (OSError, ValueError):
            return None
        return StoredImage(**{**found, "layers": tuple(self._folder / "layers" / layer for layer in found["layers"])})

    def names(self) -> dict[str, StoredImage]:
        """All images by name."""
        with suppress(FileNotFoundError):
            named = sorted(urllib.parse.unquote(entry.name) for entry in (self._folder / "names").iterdir())
            return {name: image for name in named if (image := self.find(name))}
        return {}

    def describe(self, layers: tuple[Path, ...], settings: Mapping[str, Any]) -> StoredImage:
        """An image without a name: layers of this store, and settings (the fields of :class:`StoredImage`)."""
        about = {"layers": [layer.name for layer in layers], **settings}
        digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
        image = StoredImage(digest, layers, **settings)
        self._write("images", f"{digest}.json", json.dumps({**asdict(image), "layers": about["layers"]}))
        return image

    def save(self, name: str, layers: tuple[Path, ...], settings: Mapping[str, Any]) -> StoredImage:
        """Give an image a name. Raises :class:`~clawgym.errors.SandboxError` if it cannot run."""
        _check_shell(layers, name)
        image = self.describe(layers, settings)
        self._write("names", _quoted(name), image.digest)
        return image

    def remove(self, name: str) -> None:
        """Remove a name, and the layers that no other image has. Sandboxes that run it must have ended.

        Raises :class:`~clawgym.errors.SandboxError` if there is no such image.
        """
        if self.find(name) is None or name.startswith("sha256:"):
            raise SandboxError(f"no image {name!r} here: see `clawgym images list`")
        (self._folder / "names" / _quoted(name)).unlink()
        left = self.names().values()
        digests, layers = {image.digest for image in left}, {layer.name for image in left for layer in image.layers}
        for file in (self._folder / "images").glob("*.json"):
            if file.stem not in digests:
                file.unlink()
        for layer in (self._folder / "layers").iterdir():
            if layer.name not in layers and not layer.name.startswith("."):
                remove_tree(layer)

    def known(self, key: str) -> Path | None:
        """The layer ``key``; None if it is missing."""
        place = self._folder / "layers" / hashlib.sha256(key.encode()).hexdigest()
        return place if place.is_dir() else None

    def layer(self, key: str, fill: Callable[[Path], None], tell: Progress) -> Path:
        """The layer ``key``; ``fill`` is called with an empty folder if it is missing."""
        place = self._folder / "layers" / hashlib.sha256(key.encode()).hexdigest()
        if place.is_dir():
            return place
        with only_one(place, tell):
            if not place.is_dir():
                scratch = place.with_name(f".{place.name}.new")
                if scratch.exists():  # left by a killed process
                    remove_tree(scratch)
                scratch.mkdir(mode=0o755)
                try:
                    fill(scratch)
                    scratch.rename(place)
                except BaseException:
                    remove_tree(scratch)
                    raise
        return place

    def tar_layer(self, key: str, tar: bytes, below: Sequence[Path], tell: Progress) -> Path:
        """The layer ``key``, of an uncompressed tar over the layers ``below`` (bottom first)."""
        return self.layer(key, lambda at: unpack(io.BytesIO(tar), at, below, Bounds()), tell)

    def _write(self, kind: str, name: str, text: str) -> None:
        (self._folder / kind).mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=self._folder, delete=False) as file:
            file.write(text)
        os.replace(file.name, self._folder / kind / name)


def _is_reference(source: str) -> bool:
    return ":" in source and not Path(source).expanduser().exists()


def _fill(folder: Path, layer: oci.SourceLayer, digest: str, below: list[Path], bounds: Bounds) -> None:
    with layer.open() as file:
        stream = _Hashed(file)
        unpack(stream, folder, below, bounds)  # type: ignore[arg-type]
        while stream.read(1 << 20):
            pass
    if f"sha256:{stream.digest.hexdigest()}" != digest:
        raise SandboxError(f"a layer has another digest than {digest}: fetch the image again")


def _digest(open_layer: Callable[[], IO[bytes]]) -> str:
    with open_layer() as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


class _Hashed:
    """A stream whose bytes are hashed as they are read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.digest = file, hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.digest.update(data)
        return data


def _settings(config: Mapping[str, Any], as_root: bool, where: str) -> dict[str, Any]:
    """The fields of :class:`StoredImage` from an image configuration. Raises for what sandboxes cannot do."""
    user = str(config.get("User") or "0").partition(":")[0]
    if user not in ("", "0", "root") and not as_root:
        raise SandboxError(f"{where}: runs as user {user!r}, and sandboxes have one user, root: use backend='docker'")
    pairs = [str(pair).partition("=") for pair in config.get("Env") or ()]
    return {
        "env": {name: value for name, _, value in pairs if name},
        "workdir": str(config.get("WorkingDir") or "/"),
        "entrypoint": tuple(str(word) for word in config.get("Entrypoint") or ()),
        "command": tuple(str(word) for word in config.get("Cmd") or ()),
    }


def _check_shell(layers: Sequence[Path], where: str) -> None:
    if all(read_file(layers, path, 0) is None for path in _SHELLS):
        raise SandboxError(f"{where}: has no bash, which sandboxes run commands in: install it in the image")


def _skopeo(source: str, archive: Path) -> None:
    program = shutil.which("skopeo")
    if program is None:
        raise SandboxError(
            f"{source}: no such file, and skopeo, which fetches images, is not installed: install skopeo"
        )
    done = subprocess.run(
        [program, "copy", "--quiet", "--", source, f"oci-archive:{archive}"], capture_output=True, text=True
    )
    if done.returncode:
        raise SandboxError(f"skopeo could not copy {source} ({done.stderr.strip()[-400:]}): correct the reference")


def _quoted(name: str) -> str:
    quoted = urllib.parse.quote(name, safe="")
    if not name or len(quoted) > 200 or quoted.startswith("."):
        raise SandboxError(f"{name[:200]!r}: no name for an image: use letters, digits and /:.-")
    return quoted
