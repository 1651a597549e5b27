"""One read-only copy of OpenClaw and its Node, which every box on this machine shares.

Invariant: a folder with a manifest is complete. It is filled beside its place, tried, sealed, and only then renamed
there, so an interrupted installation is no installation and the same command begins again (from npm's cache).
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
    """A version of OpenClaw that was tried, and what to install for it."""

    node: str
    lock: Path
    """A gzipped package-lock of OpenClaw and Node: the SHA-512 of every package, and no registry's address."""


def _release(version: str, node: str) -> Release:
    return Release(node, Path(__file__).parent / f"{version}.lock.json.gz")


TESTED: dict[str, Release] = {
    "2026.4.1": _release("2026.4.1", "22.23.3"),
    "2026.9.6": _release("2026.9.6", "24.21.0"),
}
DEFAULT_VERSION = "2026.4.1"

_NODE_OF_OTHERS = "24.21.0"  # in the range of every release seen so far
_OVERRIDES = {"linkedom": "0.18.12"}  # later ones want a package that the registry does not have
_MACHINES = {"x86_64": "x64", "aarch64": "arm64"}
_MANIFEST = "manifest.json"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Installation:
    """A complete copy. Boxes see :attr:`folder` at ``/opt/openclaw``; all of it is readable to any uid."""

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


def _place(version: str) -> Path:
    if not re.fullmatch(r"\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?", version):
        raise AgentError(f"OpenClaw version {version!r}: give an exact one, such as {DEFAULT_VERSION}")
    return cache_folder("openclaw") / version


def _mend(version: str) -> str:
    return "clawgym openclaw install" + ("" if version == DEFAULT_VERSION else f" --version {version}")


def installed(version: str = DEFAULT_VERSION) -> Installation:
    """The installation of this version; only its manifest is read (see :func:`verify`).

    Raises :class:`~clawgym.errors.AgentError` if there is none.
    """
    folder = _place(version)
    try:
        manifest = json.loads((folder / _MANIFEST).read_bytes())
        if manifest["format"] == _FORMAT and manifest["machine"] == platform.machine():
            return Installation(folder, manifest["openclaw"], manifest["node"], manifest["digest"])
        why = "is another machine's, or of another ClawGym"
    except FileNotFoundError:
        why = "is not installed"
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"has a manifest that cannot be read ({error})"
    raise AgentError(f"OpenClaw {version} {why} ({folder}): {_mend(version)}")


def verify(installation: Installation, *, progress: Progress | None = None) -> None:
    """Compare every file with what was installed: path, mode, size and content.

    Raises :class:`~clawgym.errors.AgentError` that names what differs.
    """
    tell = progress or (lambda what, done, total: None)
    try:
        total = json.loads((installation.folder / _MANIFEST).read_bytes())["entries"]
        differs = _tree.compare(installation.folder, installation.digest, lambda n: tell("comparing files", n, total))
    except (OSError, ValueError, KeyError, TypeError) as error:
        differs = [str(error)]
    if differs:
        raise AgentError(
            f"OpenClaw {installation.version} in {installation.folder} is not as it was installed "
            f"({'; '.join(differs)}): {_mend(installation.version)}"
        )


def install(version: str = DEFAULT_VERSION, *, progress: Progress | None = None) -> Installation:
    """Install this version, or verify the one that is there and replace it if a file of it differs.

    A version of :data:`TESTED` comes out as it was tried, to the bit; any other gets the dependencies of the day, and
    a warning. Two at once wait for each other. Raises :class:`~clawgym.errors.AgentError` if it cannot be done.
    """
    place = _place(version)
    tell = progress or (lambda what, done, total: None)
    machine = _MACHINES.get(platform.machine())
    if sys.platform != "linux" or machine is None:
        raise AgentError(
            f"OpenClaw is installed for Linux boxes on x86_64 or aarch64, and this is {sys.platform} on "
            f"{platform.machine()}: use an image that has it, see `clawgym openclaw image --help`"
        )
    try:
        with only_one(place, tell):
            try:
                there = installed(version)
                verify(there, progress=tell)
                return there
            except AgentError as error:
                if place.exists():
                    _log.warning("%s", error)
            return _install(version, machine, place, tell)
    except OSError as error:
        raise AgentError(
            f"OpenClaw could not be installed in {place} ({error}): free or mend that disk, or set XDG_CACHE_HOME "
            "to another, then run the same command again"
        ) from error


def _install(version: str, machine: str, place: Path, tell: Progress) -> Installation:
    release = TESTED.get(version)
    node = release.node if release else _NODE_OF_OTHERS
    scratch, old = place.with_name(f".{version}.new"), place.with_name(f".{version}.old")
    try:
        for left in (scratch, old):  # by somebody who was killed
            _tree.remove(left)
        scratch.mkdir()
        scratch.chmod(0o755)
        if release:
            _fetch_tested(release, machine, scratch, tell)
        else:
            _log.warning("OpenClaw %s was not tried with ClawGym: tried are %s", version, ", ".join(TESTED))
            _fetch_other(version, node, machine, scratch, tell)
        _arrange(scratch, machine)
        copy = Installation(scratch, version, node, "")
        tell("trying it", 0, 0)
        _try(copy)
        digest, entries, files, size = _tree.seal(scratch, lambda n: tell("sealing", n, 0))
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
        if place.exists():
            place.rename(old)
        scratch.rename(place)
        _tree.remove(old)
    finally:
        _tree.remove(scratch)
    return installed(version)


def _fetch_tested(release: Release, machine: str, folder: Path, tell: Progress) -> None:
    """Every package of the lock, each with the content that it names. Raises AgentError."""
    lock: dict[str, Any] = json.loads(gzip.decompress(release.lock.read_bytes()))
    packages: dict[str, dict[str, Any]] = lock["packages"]
    wanted = [name for name, package in packages.items() if name and _is_for(package, machine)]
    (folder / "package.json").write_text(json.dumps({**packages[""], "overrides": _OVERRIDES}))

    def missing() -> list[str]:
        return [name for name in wanted if not (folder / name / "package.json").exists()]

    def fetch(lock: dict[str, Any]) -> None:
        (folder / "package-lock.json").write_text(json.dumps(lock))
        npm(["ci"], folder, lambda: tell("packages", len(wanted) - len(missing()), len(wanted)))

    try:
        fetch(_addressed(lock, registry_address()))
    except AgentError as error:
        if "E404" not in str(error):
            raise
        fetch(lock)  # a registry that keeps its files elsewhere is asked for each package
    if lost := missing():  # npm goes on without an optional package that it cannot have, and says nothing
        raise AgentError(f"npm left out {', '.join(lost[:5])}: see that the registry answers (npm ping) and try again")


def _addressed(lock: dict[str, Any], registry: str) -> dict[str, Any]:
    """The lock with the addresses that registries give to packages: npm need not ask, which saves much work."""
    packages = dict(lock["packages"])
    for place, package in packages.items():
        name = package.get("name", place.rpartition("node_modules/")[2])
        if place and "integrity" in package and "resolved" not in package:
            file = f"{name.rpartition('/')[2]}-{package['version']}.tgz"
            packages[place] = {**package, "resolved": f"{registry}/{name}/-/{file}"}
    return {**lock, "packages": packages}


def _is_for(package: dict[str, Any], machine: str) -> bool:
    """Whether a machine like this one has to have the package."""
    if not package.get("optional"):
        return True
    return (
        "linux" in package.get("os", ()) and machine in package.get("cpu", ()) and "musl" not in package.get("libc", ())
    )


def _fetch_other(version: str, node: str, machine: str, folder: Path, tell: Progress) -> None:
    """What npm finds today. Raises AgentError."""
    wanted = {"openclaw": version, f"node-linux-{machine}": node}
    (folder / "package.json").write_text(json.dumps({"private": True, "dependencies": wanted, "overrides": _OVERRIDES}))

    def look() -> None:
        with contextlib.suppress(OSError):
            tell("packages", len(os.listdir(folder / "node_modules")), 0)

    npm(["install", "--no-package-lock"], folder, look)


def _arrange(folder: Path, machine: str) -> None:
    """``node/`` and ``node_modules/``, and nothing that differs from one registry or day to the next."""
    source = folder / "node_modules" / f"node-linux-{machine}"
    (folder / "node/bin").mkdir(parents=True)
    (source / "bin/node").rename(folder / "node/bin/node")
    with contextlib.suppress(FileNotFoundError):
        (source / "LICENSE").rename(folder / "node/LICENSE")
    shutil.rmtree(source)
    (folder / "node_modules/.bin/node").unlink(missing_ok=True)
    for name in ("package.json", "package-lock.json", "node_modules/.package-lock.json"):
        (folder / name).unlink(missing_ok=True)


def _try(copy: Installation) -> None:
    """Both programs start and are what they should be. Raises AgentError."""
    for what, command, wanted in (
        ("node", [str(copy.node), "--version"], copy.node_version),
        ("openclaw", [str(copy.node), str(copy.entry), "--version"], copy.version),
    ):
        with tempfile.TemporaryDirectory() as home:
            env = {"HOME": home, "TMPDIR": home, "PATH": f"{copy.node.parent}:/usr/bin:/bin"}
            try:
                done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=home, timeout=120)
            except (OSError, subprocess.TimeoutExpired) as error:
                raise AgentError(f"the {what} that was installed does not start ({error}): report it") from error
        if done.returncode != 0 or wanted not in done.stdout:
            said = (done.stdout + done.stderr).strip()[-500:]
            raise AgentError(f"the {what} that was installed does not say that it is {wanted} but: {said}: report it")
