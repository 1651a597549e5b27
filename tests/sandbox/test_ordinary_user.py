"""The same conformance tests as an ordinary user: no capability, another home, nothing prepared by root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_REPOSITORY = Path(__file__).resolve().parents[2]
_UID = 54321


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """The user's home. Not below pytest's own folder, which other users cannot enter."""
    memory = Path("/dev/shm")  # the default root of an ordinary user has many thousand folders: slow on a disk
    fit = memory.is_dir() and not os.statvfs(memory).f_flag & os.ST_NOEXEC
    folder = Path(tempfile.mkdtemp(prefix="clawgym-home-", dir=memory if fit else None))
    os.chown(folder, _UID, _UID)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def as_user(
    argv: list[str],
    home: Path,
    timeout: float,
    *,
    stderr: int = subprocess.STDOUT,
    first: Path = _REPOSITORY,
    **env: str,
) -> subprocess.CompletedProcess[str]:
    """What ``argv`` says as a user who owns ``home`` and nothing else; modules are looked for in ``first`` first."""
    packages = [p for p in sys.path if p.endswith("-packages")]
    clean = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(home), "TMPDIR": str(home)}
    clean |= {"PYTHONPATH": os.pathsep.join([str(first), *packages]), "PYTHONDONTWRITEBYTECODE": "1", **env}
    return subprocess.run(
        argv,
        env=clean,
        user=_UID,
        group=_UID,
        extra_groups=[],
        cwd=home,
        timeout=timeout,
        text=True,
        stdout=subprocess.PIPE,
        stderr=stderr,
    )


def python_of(home: Path) -> str:
    """An interpreter of this version that the user can start, with the packages we have."""
    for candidate in (sys.executable, f"/usr/bin/python3.{sys.version_info[1]}"):
        try:
            if as_user([candidate, "-c", "import pytest, clawgym.sandbox"], home, 60).returncode == 0:
                return candidate
        except OSError:
            continue
    pytest.skip("no interpreter of this version that another user may run")


def _conformance(home: Path, backend: str, *files: str, **env: str) -> None:
    argv = [python_of(home), "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    argv += ["--rootdir", str(_REPOSITORY), "-c", str(_REPOSITORY / "pyproject.toml"), "-k", backend]
    argv += [str(_REPOSITORY / "tests" / "sandbox" / f"test_conformance_{file}.py") for file in files]
    done = as_user(argv, home, 170, **env)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout.replace("1 skipped", ""), done.stdout[-2000:]  # joining a network needs root


pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="already an ordinary user: the other tests show it")


def test_namespace_backend(home: Path) -> None:
    _conformance(home, "namespace", "shell", "files", "limits", "listen", "mounts", "connect")
    assert list((home / ".cache" / "clawgym" / "owners").iterdir()) == []


def test_chroot_backend_refuses_and_says_what_to_do(home: Path) -> None:
    script = "import asyncio; from clawgym.sandbox import backend; asyncio.run(backend('chroot').probe())"
    done = as_user([python_of(home), "-c", script], home, 60)
    assert done.returncode == 1
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("clawgym.errors.SandboxUnavailable: the chroot backend needs root"), done.stdout[-2000:]
    assert "docker run --user 0" in last
    assert "namespace backend" in last


@pytest.mark.docker
def test_docker_backend(home: Path, docker_engine: str) -> None:
    """Files are copied as a tar made inside the container: this user cannot read them from outside."""
    path = Path(docker_engine.removeprefix("unix://"))
    if path.parent.name.startswith("clawgym-docker-"):
        path.parent.chmod(0o711)
        path.chmod(0o666)
    if as_user(["/usr/bin/test", "-w", str(path)], home, 10).returncode:
        pytest.skip("only members of its group may use this engine")
    _conformance(home, "docker", "files", DOCKER_HOST=docker_engine)
