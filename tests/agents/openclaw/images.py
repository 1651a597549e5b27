"""Small images in the layout of the official one: programs of this machine, and a shell script as node."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import platform
import re
import subprocess
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
PROGRAMS = ("bash", "cat", "id", "ls", "python3", "sh", "tar", "tr")
SAYS = '#!/bin/sh\necho "started $@"\n'

Entry = tuple[tarfile.TarInfo, bytes]


def entry(name: str, content: bytes | str = b"", *, mode: int = 0o644, link: str = "", kind: bytes = b"") -> Entry:
    """An entry of a tar: a file, with ``link`` a symbolic link, with ``kind`` another type."""
    info = tarfile.TarInfo(name)
    data = content.encode() if isinstance(content, str) else content
    info.type = kind or (tarfile.SYMTYPE if link else tarfile.REGTYPE)
    info.size, info.mode, info.linkname, info.mtime = (
        len(data) if not link and not kind else 0,
        mode,
        link,
        1_600_000_000,
    )
    return info, data


def layer(entries: Iterable[Entry]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for info, data in entries:
            tar.addfile(info, io.BytesIO(data) if info.size else None)
    return buffer.getvalue()


def oci_layout(folder: Path, layers: Sequence[bytes], *, nested: bool = False) -> Path:
    """Write an OCI layout; ``nested``: with an index for several platforms, as registries have it."""
    blobs = folder / "blobs/sha256"
    blobs.mkdir(parents=True)

    def put(data: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"digest": f"sha256:{digest}", "size": len(data)}

    def put_json(value: object) -> dict[str, Any]:
        return put(json.dumps(value).encode())

    manifest = put_json({"config": put_json({}), "layers": [put(gzip.compress(data)) for data in layers]})
    if nested:
        other = put_json({"config": put_json({}), "layers": [put(gzip.compress(b"of another machine"))]})
        platforms = [("linux", "s390x", other), ("unknown", "unknown", other), ("linux", ARCHITECTURE, manifest)]
        listed = [{**m, "platform": {"os": name, "architecture": arch}} for name, arch, m in platforms]
        manifest = put_json({"manifests": listed})
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    (folder / "index.json").write_text(json.dumps({"manifests": [manifest]}))
    return folder


def docker_archive(path: Path, layers: Sequence[bytes]) -> Path:
    """Write an archive in the format of older Docker engines."""
    names = [f"{index}/layer.tar" for index in range(len(layers))]
    manifest = json.dumps([{"Config": "config.json", "RepoTags": ["t:1"], "Layers": names}]).encode()
    files = [entry("config.json", b"{}"), *(entry(n, data) for n, data in zip(names, layers, strict=True))]
    path.write_bytes(layer([*files, entry("manifest.json", manifest)]))
    return path


def small_system(lacks: Sequence[str] = ()) -> list[Entry]:
    """Programs of this machine, with the libraries that they load."""
    chosen = [os.path.realpath(f"/usr/bin/{name}") for name in PROGRAMS if name not in lacks]
    text = subprocess.run(["ldd", *chosen], capture_output=True, text=True, check=True).stdout
    libraries = sorted(set(re.findall(r"(/\S+\.so\S*) \(", text)))
    made = [
        entry(name, kind=tarfile.DIRTYPE, mode=0o755) for name in ("usr/bin", "etc", "tmp", "root", "usr/lib", "dev")
    ]
    made += [entry(name, link=f"usr/{name}") for name in ("bin", "lib", "lib64")]
    for path in chosen:
        made.append(entry(f"usr/bin/{os.path.basename(path)}", Path(path).read_bytes(), mode=0o4755))
    for name in PROGRAMS:
        target = os.path.basename(os.path.realpath(f"/usr/bin/{name}"))
        if name not in lacks and target != name:
            made.append(entry(f"usr/bin/{name}", link=target))
    for library in libraries:
        made.append(entry(f"usr/{library.removeprefix('/usr').lstrip('/')}", Path(library).read_bytes(), mode=0o755))
    made += _python()
    return [*made, entry("etc/passwd", "root:x:0:0:root:/root:/bin/bash\n"), entry("etc/group", "root:x:0:\n")]


def _python() -> list[Entry]:
    """The standard library of /usr/bin/python3, without its large modules."""
    ask = "import os; print(os.path.dirname(os.__file__))"
    done = subprocess.run(["/usr/bin/python3", "-I", "-S", "-c", ask], capture_output=True, text=True, check=True)
    top = Path(done.stdout.strip())
    skipped = {"test", "__pycache__", "idlelib", "ensurepip", "lib2to3", "dist-packages", "site-packages", "pydoc_data"}
    made: list[Entry] = []
    for folder, folders, files in os.walk(top):
        folders[:] = [name for name in folders if name not in skipped]
        for name in files:
            path = Path(folder, name)
            if path.is_file() and not name.endswith(".a"):
                made.append(entry(str(path).lstrip("/"), path.read_bytes()))
    return made


def openclaw_layer(version: str = "1.2.3", *, changes: Mapping[str, str] = {}) -> list[Entry]:
    """OpenClaw as in the official image: ``/app``, and node from its base."""
    files = {
        "app/package.json": json.dumps({"name": "openclaw", "version": version}),
        "app/openclaw.mjs": "",
        "app/dist/index.js": "",
        "usr/local/bin/node": SAYS,
        **changes,
    }
    return [entry(name, text, mode=0o755) for name, text in files.items() if text != "-"]
