"""Packed files from elsewhere: container images and wheels. Nothing is written outside of their folder."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import platform
import shutil
import stat
import tarfile
import zipfile
from pathlib import Path

from clawgym.errors import SandboxError, TaskError
from clawgym.sandbox.images import ImageStore
from clawgym.sandbox.images.layers import read_file
from clawgym.tasks.layers import Wheel, _unpack

from ..source import Source, scratch_folder

READS = ("tasks.layers", "sandbox.images.oci", "sandbox.images.layers")

_WHEEL = Wheel("p", "1", "p-1-py3-none-any.whl", "0" * 64)
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
_PLATFORM = {"os": "linux", "architecture": _MACHINES.get(platform.machine(), platform.machine())}


def fuzz(data: bytes) -> None:
    source = Source(data)
    folder = scratch_folder() / "root"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    outside = sorted(os.listdir(folder.parent))
    if source.byte() & 1:
        _image(source, folder)
    else:
        _wheel(source, folder)
    assert sorted(os.listdir(folder.parent)) in (outside, sorted({*outside, "image.tar", "p.whl"}), _with(outside))
    for root, _, names in os.walk(folder):
        assert not any(os.lstat(os.path.join(root, name)).st_mode & (stat.S_ISUID | stat.S_ISGID) for name in names)


def _with(outside: list[str]) -> list[str]:
    return sorted({*outside, "image.tar"}) if "p.whl" in outside else sorted({*outside, "p.whl"})


def _image(source: Source, folder: Path) -> None:
    path = folder.parent / "image.tar"
    layers = [source.tar() for _ in range(1 + source.number(0, 1))]
    about = {"rootfs": {"diff_ids": [_sha256(layer) for layer in layers]}, "config": {"User": "", "Env": ["A=b"]}}
    config = source.json(about)
    if source.byte() > 200:
        layers[0] = gzip.compress(layers[0], 1)[: -source.byte() or None]
    blobs = {f"blobs/sha256/{_sha256(blob)[7:]}": blob for blob in (*layers, config)}
    if source.byte() & 1:
        *names, last = blobs
        blobs["manifest.json"] = source.json([{"Config": last, "Layers": names}])
    else:
        *digests, last = ({"digest": _sha256(blob)} for blob in (*layers, config))
        manifest = source.json({"config": last, "layers": digests})
        blobs[f"blobs/sha256/{_sha256(manifest)[7:]}"] = manifest
        blobs["index.json"] = source.json({"manifests": [{"digest": _sha256(manifest), "platform": _PLATFORM}]})
    with tarfile.open(path, "w") as tar:
        for name, content in blobs.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    try:
        image = ImageStore(folder).unpack(str(path))
        held = read_file(image.layers, source.path(), 100)
        assert held is None or len(held) <= 100
    except SandboxError as error:
        assert str(error)


def _sha256(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _wheel(source: Source, folder: Path) -> None:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for _ in range(source.number(0, 6)):
            entry = zipfile.ZipInfo(source.path().encode("utf-8", "replace").decode())
            entry.external_attr = source.pick((0, 0o100644, 0o120777, 0o040755)) << 16
            entry.compress_type = source.pick((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
            archive.writestr(entry, source.bytes(30))
    packed = bytearray(made.getvalue())
    for _ in range(source.number(0, 3)):
        packed[source.number(0, len(packed) - 1)] = source.byte()
    path = folder.parent / "p.whl"
    path.write_bytes(source.rest() if source.byte() == 255 else packed)
    try:
        _unpack(_WHEEL, path, folder, {})
    except (TaskError, OSError) as error:
        assert str(error)
