"""Install one read-only copy of a program and what runs it, shared by all sandboxes on this machine.

Invariant: a folder with a manifest is complete. It is filled under another name, checked, made read-only, and only then
renamed. After an interruption, run the same command again: it starts over, with the packages in npm's or pip's cache.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clawgym.agents.programs import _tree
from clawgym.agents.programs._npm import npm, registry_address
from clawgym.agents.programs._python import copy_python, find_python, pip_install
from clawgym.agents.programs.releases import Release
from clawgym.cache import Progress, cache_folder, only_one
from clawgym.errors import AgentError

__all__ = ["Installation", "Progress", "install", "installed", "verify"]

_log = logging.getLogger("clawgym.agents")
_MACHINES = {"x86_64": "x64", "aarch64": "arm64"}
_MANIFEST = "manifest.json"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Installation:
    """A complete copy. Sandboxes see :attr:`folder` at ``/opt/PROGRAM``; any uid can read it."""

    folder: Path
    release: Release
    runtime: str
    """Version of the Node or Python in it; empty for a program that needs neither."""
    digest: str
    """SHA-256 over the path, mode, size and content of every file."""
    size: int = 0
    """Bytes of all files."""

    @property
    def version(self) -> str:
        return self.release.version

    @property
    def mount(self) -> str:
        """Where sandboxes see it."""
        return f"/opt/{self.release.program}"

    @property
    def node(self) -> Path:
        return self.folder / "node/bin/node"

    @property
    def entry(self) -> Path:
        """The file that is started."""
        return self.folder / entry_of(self.release)

    def identity(self) -> dict[str, Any]:
        """Return what identifies it in a run manifest."""
        release = self.release
        runtime = {release.runtime: self.runtime} if release.runtime else {}
        return {release.program: release.version, **runtime, "installation_sha256": self.digest}


def entry_of(release: Release) -> str:
    """Return the path of the file in the installation that is started on this machine."""
    return release.entry.format(machine=_MACHINES.get(platform.machine(), ""), cpu=platform.machine())


def _folder_of(release: Release) -> Path:
    return cache_folder(release.program) / release.version


def _command(release: Release) -> str:
    return f"clawgym agents install {release.program}" + ("" if release.default else f" --version {release.version}")


def installed(release: Release) -> Installation:
    """Return the installation of this release. Only its manifest is read; :func:`verify` checks the files.

    Raises :class:`~clawgym.errors.AgentError` if it is not installed.
    """
    folder = _folder_of(release)
    try:
        manifest = json.loads((folder / _MANIFEST).read_bytes())
        if manifest["format"] == _FORMAT and manifest["machine"] == platform.machine():
            runtime = manifest[release.runtime] if release.runtime else ""
            if manifest[release.program] == release.version:
                return Installation(folder, release, str(runtime), manifest["digest"], manifest["bytes"])
        why = "was installed for another architecture or by another version of ClawGym"
    except FileNotFoundError:
        why = "is not installed"
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"has a manifest that cannot be read ({error})"
    raise AgentError(f"{release.title} {release.version} {why} ({folder}): {_command(release)}")


def verify(installation: Installation, *, progress: Progress | None = None) -> None:
    """Compare path, mode, size and content of every file with what was installed.

    Raises :class:`~clawgym.errors.AgentError`, which names the differences.
    """
    report = progress or (lambda what, done, total: None)
    release = installation.release
    try:
        total = json.loads((installation.folder / _MANIFEST).read_bytes())["entries"]
        differs = _tree.compare(installation.folder, installation.digest, lambda n: report("comparing files", n, total))
    except (OSError, ValueError, KeyError, TypeError) as error:
        differs = [str(error)]
    if differs:
        raise AgentError(
            f"{release.title} {release.version} in {installation.folder} was changed after its installation "
            f"({'; '.join(differs)}): {_command(release)}"
        )


def install(release: Release, *, progress: Progress | None = None) -> Installation:
    """Install this release. An existing installation is verified, and replaced if a file differs.

    The packages of a release with a lock are the same on every machine, byte for byte. One without a lock gets the
    newest dependencies that npm finds. Concurrent installations wait for each other.

    Raises :class:`~clawgym.errors.AgentError` if the installation fails.
    """
    folder = _folder_of(release)
    report = progress or (lambda what, done, total: None)
    if sys.platform != "linux" or platform.machine() not in _MACHINES:
        raise AgentError(
            f"{release.title} can be installed on Linux on x86_64 or aarch64, and this is {sys.platform} on "
            f"{platform.machine()}: run it on such a machine, or use an image that has it (`clawgym openclaw image`)"
        )
    try:
        with only_one(folder, report):
            try:
                existing = installed(release)
                verify(existing, progress=report)
                return existing
            except AgentError as error:
                if folder.exists():
                    _log.warning("%s", error)
            return _install(release, folder, report)
    except OSError as error:
        raise AgentError(
            f"{release.title} could not be installed in {folder} ({error}): free or repair this disk, or set "
            "XDG_CACHE_HOME to a folder on another one, then run the same command again"
        ) from error


def _install(release: Release, folder: Path, report: Progress) -> Installation:
    scratch, old = folder.with_name(f".{folder.name}.new"), folder.with_name(f".{folder.name}.old")
    try:
        for path in (scratch, old):  # of an installation that was killed
            _tree.remove(path)
        scratch.mkdir()
        scratch.chmod(0o755)
        if release.python:
            runtime = _fetch_python(release, scratch, report)
        else:
            runtime = release.node or ""
            _fetch_npm(release, scratch, report)
        report("checking", 0, 0)
        _check_programs(Installation(scratch, release, runtime, ""))
        digest, entries, files, size = _tree.freeze(scratch, lambda n: report("hashing files", n, 0))
        manifest = {
            "format": _FORMAT,
            release.program: release.version,
            **({release.runtime: runtime} if release.runtime else {}),
            "machine": platform.machine(),
            "tested": release.lock is not None,
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
    return installed(release)


# -- from a Python package index


def _fetch_python(release: Release, folder: Path, report: Progress) -> str:
    """Install the packages of the lock, and a copy of the Python that runs them. Returns its version."""
    assert release.python is not None
    assert release.lock is not None
    python = find_python(release.python, release.title)
    report("packages", 0, 0)
    pip_install(python, gzip.decompress(release.lock.read_bytes()), folder / "packages")
    report("copying Python", 0, 0)
    copy_python(python, folder / "python", folder / "packages")
    return python.version


# -- from npm


def _fetch_npm(release: Release, folder: Path, report: Progress) -> None:
    machine = _MACHINES[platform.machine()]
    if release.lock:
        _fetch_locked(release, release.lock, machine, folder, report)
    else:
        _log.warning("%s %s was not tested with ClawGym", release.title, release.version)
        _fetch_newest(release, machine, folder, report)
    _arrange(release, folder, machine)


def _fetch_locked(release: Release, file: Path, machine: str, folder: Path, report: Progress) -> None:
    """Download every package of the lock for this machine; npm checks the SHA-512 of each. Raises AgentError."""
    lock: dict[str, Any] = json.loads(gzip.decompress(file.read_bytes()))
    packages: dict[str, dict[str, Any]] = lock["packages"]
    wanted = [name for name, package in packages.items() if name and _is_for(package, machine)]
    (folder / "package.json").write_text(json.dumps({**packages[""], "overrides": dict(release.overrides)}))

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


def _fetch_newest(release: Release, machine: str, folder: Path, report: Progress) -> None:
    """Download the program and the newest dependencies that npm finds. Raises AgentError."""
    wanted = {**release.dependencies, **({f"node-linux-{machine}": release.node} if release.node else {})}
    about = {"private": True, "dependencies": wanted, "overrides": dict(release.overrides)}
    (folder / "package.json").write_text(json.dumps(about))

    def poll() -> None:
        with contextlib.suppress(OSError):
            report("packages", len(os.listdir(folder / "node_modules")), 0)

    npm(["install", "--no-package-lock"], folder, poll)


def _arrange(release: Release, folder: Path, machine: str) -> None:
    """Move Node to ``node/``, and remove the files that depend on the registry or the date."""
    if release.node:
        source = folder / "node_modules" / f"node-linux-{machine}"
        (folder / "node/bin").mkdir(parents=True)
        (source / "bin/node").rename(folder / "node/bin/node")
        with contextlib.suppress(FileNotFoundError):
            (source / "LICENSE").rename(folder / "node/LICENSE")
        shutil.rmtree(source)
        (folder / "node_modules/.bin/node").unlink(missing_ok=True)
    for name in ("package.json", "package-lock.json", "node_modules/.package-lock.json"):
        (folder / name).unlink(missing_ok=True)


# -- checks


def _check_programs(copy: Installation) -> None:
    """Check that the program and what runs it start and have the right version. Raises AgentError."""
    release = copy.release
    checks = [(release.program, start_command(copy, str(copy.folder)), release.version)]
    if release.node:
        checks.insert(0, ("node", [str(copy.node)], release.node))
    for what, command, wanted in checks:
        with tempfile.TemporaryDirectory() as home:
            env = {"HOME": home, "TMPDIR": home, "PATH": f"{copy.node.parent}:/usr/bin:/bin"}
            try:
                done = subprocess.run(
                    [*command, *(release.check if what == release.program else ("--version",))],
                    capture_output=True, text=True, env=env, cwd=home, timeout=120, stdin=subprocess.DEVNULL,
                )  # fmt: skip
            except (OSError, subprocess.TimeoutExpired) as error:
                raise AgentError(f"the installed {what} does not start ({error}): report it") from error
        if done.returncode != 0 or wanted not in done.stdout:
            output = (done.stdout + done.stderr).strip()[-500:]
            raise AgentError(f"the installed {what} should print version {wanted} but prints: {output}: report it")


def start_command(copy: Installation, folder: str | None = None) -> list[str]:
    """Return the command that starts the program, without arguments, where ``folder`` is the installation: by default
    as sandboxes see it."""
    folder = folder or copy.mount
    entry = f"{folder}/{entry_of(copy.release)}"
    if copy.release.node:
        return [f"{folder}/node/bin/node", entry]
    if copy.release.python:
        return [f"{folder}/python/start", copy.release.entry]
    return [entry]
