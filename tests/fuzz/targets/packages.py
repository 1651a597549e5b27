"""Packed files from elsewhere: container images and wheels. Nothing is written outside of their folder."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import stat
import tarfile
import zipfile
from pathlib import Path

from clawgym.agents.openclaw._unpack import unpack
from clawgym.errors import AgentError, TaskError
from clawgym.tasks.layers import Wheel, _unpack

from ..source import Source, scratch_folder

READS = ("tasks.layers", "agents.openclaw._unpack")

_WHEEL = Wheel("p", "1", "p-1-py3-none-any.whl", "0" * 64)
_INDEX = {"manifests": [{"digest": "sha256:" + "0" * 64, "platform": {"os": "linux", "architecture": "amd64"}}]}


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
    if source.byte() > 200:
        layers[0] = gzip.compress(layers[0], 1)[: -source.byte() or None]
    names = [f"blobs/sha256/{hashlib.sha256(layer).hexdigest()}" for layer in layers]
    files = dict(zip(names, layers, strict=True))
    if source.byte() & 1:
        files["manifest.json"] = source.json([{"Layers": names}])
    else:
        manifest = source.json({"layers": [{"digest": f"sha256:{name[-64:]}"} for name in names]})
        digest = hashlib.sha256(manifest).hexdigest()
        files[f"blobs/sha256/{digest}"] = manifest
        index = json.loads(json.dumps(_INDEX).replace("0" * 64, digest))
        files["index.json"] = source.json(index)
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    try:
        unpack(path, folder, lambda *_: None)
    except AgentError as error:
        assert str(error)


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
