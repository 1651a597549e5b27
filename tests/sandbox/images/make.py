"""Images, made here: layers of tar entries, and a root with bash and a few programs of this machine."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import subprocess
import tarfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

PROGRAMS = ("bash", "cat", "ls", "stat", "id", "env", "touch", "rm", "readlink", "sleep", "mkdir", "python3")
Entry = tuple[str, Any]
"""A path, and bytes for a file, ``None`` for a folder, ``->target`` for a link, ``=>target`` for a hard link."""


def layer(*entries: Entry, mode: int = 0o755) -> bytes:
    """An uncompressed tar."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path, what in entries:
            info = tarfile.TarInfo(path)
            info.mode = mode
            if what is None:
                info.type = tarfile.DIRTYPE
            elif isinstance(what, tarfile.TarInfo):
                info = what
            elif isinstance(what, str):
                info.type = tarfile.SYMTYPE if what.startswith("->") else tarfile.LNKTYPE
                info.linkname = what[2:]
            data = what if isinstance(what, bytes) else b""
            info.size = info.size or len(data)
            tar.addfile(info, io.BytesIO(data) if data else None)
    return out.getvalue()


@cache
def root() -> bytes:
    """A layer with a root file system: bash and some programs, with their libraries."""
    entries: dict[str, Entry] = {name: (name, None) for name in ("usr", "usr/bin", "etc", "tmp", "root")}
    for name in ("bin", "lib", "lib64"):
        entries[name] = (name, f"->usr/{name}")
    for program in PROGRAMS:
        path = Path("/usr/bin", program).resolve()
        entries[f"usr/bin/{program}"] = (f"usr/bin/{program}", path.read_bytes())
        needs = subprocess.run(["ldd", str(path)], capture_output=True, text=True, check=True).stdout
        for found in re.findall(r"(/\S+) \(0x", needs):
            place = found.lstrip("/") if found.startswith("/usr/") else f"usr{found}"
            entries[place] = (place, Path(found).read_bytes())
    locale = Path("/usr/lib/locale/C.utf8")
    entries |= {str(f): (str(f)[1:], f.read_bytes()) for f in sorted(locale.rglob("*")) if f.is_file()}
    return layer(*entries.values())


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def oci_files(layers: Sequence[bytes], config: dict[str, Any] | None = None, **changed: Any) -> dict[str, bytes]:
    """The files of an OCI layout; layers bottom first, uncompressed. ``changed`` replaces fields of the image's
    configuration."""
    blobs = [gzip.compress(data, 1) for data in layers]
    about = {
        "architecture": "amd64",
        "os": "linux",
        "config": config or {},
        "rootfs": {"type": "layers", "diff_ids": [digest(data) for data in layers]},
        **changed,
    }
    settings = json.dumps(about).encode()
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "config": {"digest": digest(settings), "size": len(settings)},
            "layers": [{"digest": digest(blob), "size": len(blob)} for blob in blobs],
        }
    ).encode()
    index = {"schemaVersion": 2, "manifests": [{"digest": digest(manifest), "size": len(manifest)}]}
    named = {f"blobs/{digest(data).replace(':', '/')}": data for data in (*blobs, settings, manifest)}
    return {"oci-layout": b'{"imageLayoutVersion": "1.0.0"}', "index.json": json.dumps(index).encode(), **named}


def oci_folder(folder: Path, layers: Sequence[bytes], config: dict[str, Any] | None = None, **changed: Any) -> Path:
    for name, data in oci_files(layers, config, **changed).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def oci_archive(file: Path, layers: Sequence[bytes], config: dict[str, Any] | None = None) -> Path:
    file.write_bytes(layer(*oci_files(layers, config).items()))
    return file


def docker_archive(file: Path, layers: Sequence[bytes], config: dict[str, Any] | None = None) -> Path:
    """As ``docker save`` writes it."""
    about = {
        "architecture": "amd64",
        "os": "linux",
        "config": config or {},
        "rootfs": {"type": "layers", "diff_ids": [digest(data) for data in layers]},
    }
    manifest = [{"Config": "c.json", "RepoTags": ["x:1"], "Layers": [f"{n}/layer.tar" for n in range(len(layers))]}]
    files = {"manifest.json": json.dumps(manifest).encode(), "c.json": json.dumps(about).encode()}
    file.write_bytes(layer(*files.items(), *((f"{n}/layer.tar", data) for n, data in enumerate(layers))))
    return file
