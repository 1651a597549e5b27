"""Install one read-only copy of OpenClaw and its Node, shared by all sandboxes on this machine.

Invariant: a folder with a manifest is complete. It is filled under another name, checked, made read-only, and only then
renamed. After an interruption, run the same command again: it starts over, with the packages in npm's cache.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clawgym.agents.openclaw import _tree
from clawgym.agents.openclaw._npm import npm, registry_address
from clawgym.cache import Progress, cache_folder, only_one
from clawgym.errors import AgentError

__all__ = [
    "DEFAULT_VERSION",
    "TESTED",
    "Installation",
    "Progress",
    "Release",
    "install",
    "installed",
    "verify",
]

_log = logging.getLogger("clawgym.agents")


@dataclass(frozen=True, slots=True)
class Release:
    """A tested version of OpenClaw and its dependencies."""

    node: str
    """Version of Node."""
    lock: Path
    """A gzipped package-lock of OpenClaw and Node: the SHA-512 of every package, without registry URLs."""


def _release(version: str, node: str) -> Release:
    return Release(node, Path(__file__).parent / f"{version}.lock.json.gz")


TESTED: dict[str, Release] = {
    "2026.4.1": _release("2026.4.1", "22.23.3"),
    "2026.9.6": _release("2026.9.6", "24.21.0"),
}
DEFAULT_VERSION = "2026.4.1"

_NODE_OF_UNTESTED = "24.21.0"  # in the range of every release so far
_OVERRIDES = {"linkedom": "0.18.12"}  # later versions need a package that the registry does not have
_MACHINES = {"x86_64": "x64", "aarch64": "arm64"}
_MANIFEST = "manifest.json"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Installation:
    """A complete copy. Sandboxes see :attr:`folder` at ``/opt/openclaw``; any uid can read it."""

    folder: Path
    version: str
    node_version: str
    digest: str
    """SHA-256 over the path, mode, size and content of every file."""

    @property
    def node(self) -> Path:
        return self.folder / "node/bin/node"

    @property
    def entry(self) -> Path:
        return self.folder / "node_modules/openclaw/openclaw.mjs"


def _folder_of(version: str) -> Path:
    if not re.fullmatch(r"\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?", version):
        raise AgentError(f"OpenClaw version {version!r}: give an exact one, such as {DEFAULT_VERSION}")
    return cache_folder("openclaw") / version


def _install_command(version: str) -> str:
    return "clawgym openclaw install" + ("" if version == DEFAULT_VERSION else f" --version {version}")


def installed(version: str = DEFAULT_VERSION) -> Installation:
    """Return the installation of this version. Only its manifest is read; :func:`verify` checks the files.

    Raises :class:`~clawgym.errors.AgentError` if this version is not installed.
    """
    folder = _folder_of(version)
    try:
        manifest = json.loads((folder / _MANIFEST).read_bytes())
        if manifest["format"] == _FORMAT and manifest["machine"] == platform.machine():
            return Installation(folder, manifest["openclaw"], manifest["node"], manifest["digest"])
        why = "was installed for another architecture or by another version of ClawGym"
    except FileNotFoundError:
        why = "is not installed"
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"has a manifest that cannot be read ({error})"
    raise AgentError(f"OpenClaw {version} {why} ({folder}): {_install_command(version)}")


def verify(installation: Installation, *, progress: Progress | None = None) -> None:
    """Compare path, mode, size and content of every file with what was installed.

    Raises :class:`~clawgym.errors.AgentError`, which names the differences.
    """
    report = progress or (lambda what, done, total: None)
    try:
        total = json.loads((installation.folder / _MANIFEST).read_bytes())["entries"]
        differs = _tree.compare(installation.folder, installation.digest, lambda n: report("comparing files", n, total))
    except (OSError, ValueError, KeyError, TypeError) as error:
        differs = [str(error)]
    if differs:
        raise AgentError(
            f"OpenClaw {installation.version} in {installation.folder} was changed after its installation "
            f"({'; '.join(differs)}): {_install_command(installation.version)}"
        )


def install(version: str = DEFAULT_VERSION, *, progress: Progress | None = None) -> Installation:
    """Install this version. An existing installation is verified, and replaced if a file differs.

    The files of a version in :data:`TESTED` are the same on every machine, byte for byte. Any other version gets the
    newest dependencies that npm finds, and a warning is logged. Concurrent installations wait for each other.

    Raises :class:`~clawgym.errors.AgentError` if the installation fails.
    """
    folder = _folder_of(version)
    report = progress or (lambda what, done, total: None)
    machine = _MACHINES.get(platform.machine())
    if sys.platform != "linux" or machine is None:
        raise AgentError(
            f"OpenClaw can be installed on Linux on x86_64 or aarch64, and this is {sys.platform} on "
            f"{platform.machine()}: use an image that has it, see `clawgym openclaw image --help`"
        )
    try:
        with only_one(folder, report):
            try:
                existing = installed(version)
                verify(existing, progress=report)
                return existing
            except AgentError as error:
                if folder.exists():
                    _log.warning("%s", error)
            return _install(version, machine, folder, report)
    except OSError as error:
        raise AgentError(
            f"OpenClaw could not be installed in {folder} ({error}): free or repair this disk, or set XDG_CACHE_HOME "
            "to a folder on another one, then run the same command again"
        ) from error


def _install(version: str, machine: str, folder: Path, report: Progress) -> Installation:
    release = TESTED.get(version)
    node = release.node if release else _NODE_OF_UNTESTED
    scratch, old = folder.with_name(f".{version}.new"), folder.with_name(f".{version}.old")
    try:
        for path in (scratch, old):  # of an installation that was killed
            _tree.remove(path)
        scratch.mkdir()
        scratch.chmod(0o755)
        if release:
            _fetch_tested(release, machine, scratch, report)
        else:
            _log.warning("OpenClaw %s was not tested with ClawGym; tested are %s", version, ", ".join(TESTED))
            _fetch_untested(version, node, machine, scratch, report)
        _arrange(scratch, machine)
        copy = Installation(scratch, version, node, "")
        report("checking", 0, 0)
        _check_programs(copy)
        digest, entries, files, size = _tree.freeze(scratch, lambda n: report("hashing files", n, 0))
        manifest = {
            "format": _FORMAT,
            "openclaw": version,
            "node": node,
            "machine": platform.machine(),
            "tested": release is not None,
            "entries": entries,
            "files": files,
            "bytes": size,
            "digest": digest,
        }
        (scratch / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        (scratch / _MANIFEST).chmod(0o444)
        scratch.chmod(0o555)
        if folder.exists():
            folder.rename(old)
        scratch.rename(folder)
        _tree.remove(old)
    finally:
        _tree.remove(scratch)
    return installed(version)


def _fetch_tested(release: Release, machine: str, folder: Path, report: Progress) -> None:
    """Download every package of the lock for this machine; npm checks the SHA-512 of each. Raises AgentError."""
    lock: dict[str, Any] = json.loads(gzip.decompress(release.lock.read_bytes()))
    packages: dict[str, dict[str, Any]] = lock["packages"]
    wanted = [name for name, package in packages.items() if name and _is_for(package, machine)]
    (folder / "package.json").write_text(json.dumps({**packages[""], "overrides": _OVERRIDES}))

    def missing() -> list[str]:
        return [name for name in wanted if not (folder / name / "package.json").exists()]

    def fetch(lock: dict[str, Any]) -> None:
        (folder / "package-lock.json").write_text(json.dumps(lock))
        npm(["ci"], folder, lambda: report("packages", len(wanted) - len(missing()), len(wanted)))

    try:
        fetch(_with_urls(lock, registry_address()))
    except AgentError as error:
        if "E404" not in str(error):
            raise
        fetch(lock)  # the registry has other URLs: npm asks for the URL of each package
    if absent := missing():  # npm silently skips an optional package that it cannot download
        raise AgentError(
            f"npm left out {', '.join(absent[:5])}: check that the registry answers (npm ping) and try again"
        )


def _with_urls(lock: dict[str, Any], registry: str) -> dict[str, Any]:
    """Return the lock with the usual URL of each package, which saves npm one request per package."""
    packages = dict(lock["packages"])
    for path, package in packages.items():
        name = package.get("name", path.rpartition("node_modules/")[2])
        if path and "integrity" in package and "resolved" not in package:
            file = f"{name.rpartition('/')[2]}-{package['version']}.tgz"
            packages[path] = {**package, "resolved": f"{registry}/{name}/-/{file}"}
    return {**lock, "packages": packages}


def _is_for(package: dict[str, Any], machine: str) -> bool:
    """Whether the package is needed on a machine of this architecture."""
    if not package.get("optional"):
        return True
    return (
        "linux" in package.get("os", ()) and machine in package.get("cpu", ()) and "musl" not in package.get("libc", ())
    )


def _fetch_untested(version: str, node: str, machine: str, folder: Path, report: Progress) -> None:
    """Download this version and the newest dependencies that npm finds. Raises AgentError."""
    wanted = {"openclaw": version, f"node-linux-{machine}": node}
    (folder / "package.json").write_text(json.dumps({"private": True, "dependencies": wanted, "overrides": _OVERRIDES}))

    def poll() -> None:
        with contextlib.suppress(OSError):
            report("packages", len(os.listdir(folder / "node_modules")), 0)

    npm(["install", "--no-package-lock"], folder, poll)


def _arrange(folder: Path, machine: str) -> None:
    """Move the files to ``node/`` and ``node_modules/``, and remove those that depend on the registry or the date."""
    source = folder / "node_modules" / f"node-linux-{machine}"
    (folder / "node/bin").mkdir(parents=True)
    (source / "bin/node").rename(folder / "node/bin/node")
    with contextlib.suppress(FileNotFoundError):
        (source / "LICENSE").rename(folder / "node/LICENSE")
    shutil.rmtree(source)
    (folder / "node_modules/.bin/node").unlink(missing_ok=True)
    for name in ("package.json", "package-lock.json", "node_modules/.package-lock.json"):
        (folder / name).unlink(missing_ok=True)


def _check_programs(copy: Installation) -> None:
    """Check that Node and OpenClaw start and have the right version. Raises AgentError."""
    for what, command, wanted in (
        ("node", [str(copy.node), "--version"], copy.node_version),
        ("openclaw", [str(copy.node), str(copy.entry), "--version"], copy.version),
    ):
        with tempfile.TemporaryDirectory() as home:
            env = {"HOME": home, "TMPDIR": home, "PATH": f"{copy.node.parent}:/usr/bin:/bin"}
            try:
                done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=home, timeout=120)
            except (OSError, subprocess.TimeoutExpired) as error:
                raise AgentError(f"the installed {what} does not start ({error}): report it") from error
        if done.returncode != 0 or wanted not in done.stdout:
            output = (done.stdout + done.stderr).strip()[-500:]
            raise AgentError(f"the installed {what} should print version {wanted} but prints: {output}: report it")
