"""A default container with ClawGym in it: the engine's own seccomp profile and capabilities.

The image is made of this host's packages, as a small image of the same distribution would be: no registry is asked.
The interpreter, its packages and this checkout are bound into it, read-only, where they are here.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
_PACKAGES = ("python3", "procps", "libstdc++6")
_LEFT_OUT = ("/usr/share/doc", "/usr/share/man", "/usr/share/locale")
_FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/bash\nsomebody:x:1000:1000::/home/somebody:/bin/bash\n",
    "etc/group": "root:x:0:\nsomebody:x:1000:\n",
    "etc/hosts": "127.0.0.1 localhost\n",
}


def _closure(names: tuple[str, ...]) -> list[str]:
    """The installed packages that ``names`` and every essential package need."""
    fields = "${Package}\t${Essential}\t${Pre-Depends}, ${Depends}\t${Provides}\n"
    text = subprocess.run(["dpkg-query", "-W", "-f", fields], capture_output=True, text=True, check=True).stdout
    needs: dict[str, list[str]] = {}
    providers: dict[str, list[str]] = {}
    todo = list(names)
    for line in text.splitlines():
        name, essential, depends, provides = line.split("\t")
        needs[name] = re.findall(r"(?:^|[,|])\s*([a-z0-9][a-z0-9.+-]*)", depends)
        for other in re.findall(r"(?:^|,)\s*([a-z0-9][a-z0-9.+-]*)", provides):
            providers.setdefault(other, []).append(name)
        if essential == "yes":
            todo.append(name)
    found: set[str] = set()
    while todo:
        name = todo.pop()
        for package in [name] if name in needs else providers.get(name, []):
            if package not in found:
                found.add(package)
                todo += needs[package]
    return sorted(found)


def _files() -> list[str]:
    """The files of those packages below ``/usr``, and the links by which programs are called."""
    listed = subprocess.run(["dpkg-query", "-L", *_closure(_PACKAGES)], capture_output=True, text=True, check=True)
    found: set[str] = set()
    for path in listed.stdout.splitlines():
        if path.startswith("/"):  # some packages say /bin for /usr/bin
            path = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
            if path.startswith("/usr/") and not path.startswith(_LEFT_OUT) and os.path.lexists(path):
                found.add(path)
    for path in Path("/usr/bin").iterdir():
        if path.is_symlink() and os.readlink(path).startswith("/etc/alternatives/") and os.path.realpath(path) in found:
            found.add(str(path))
    return sorted(found)


def _write_root(out: io.BufferedIOBase) -> None:
    """A root file system as a tar."""
    with tarfile.open(fileobj=out, mode="w", dereference=False) as tar:

        def add(name: str, kind: bytes, link: str = "", mode: int = 0o755, data: bytes = b"") -> None:
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname, entry.mode, entry.size = kind, link, mode, len(data)
            tar.addfile(entry, io.BytesIO(data))

        for name in ("etc", "etc/alternatives", "home", "opt", "proc", "root", "run", "sys", "usr", "var"):
            add(name, tarfile.DIRTYPE)
        for name in ("home/somebody", "tmp", "var/tmp"):
            add(name, tarfile.DIRTYPE, mode=0o1777)
        for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
            if Path("/", name).is_symlink():
                add(name, tarfile.SYMTYPE, os.readlink(f"/{name}"))
        for name, text in _FILES.items():
            add(name, tarfile.REGTYPE, mode=0o644, data=text.encode())
        tar.add("/etc/ld.so.cache", "etc/ld.so.cache")
        for path in _files():
            aim = os.readlink(path) if os.path.islink(path) else ""
            if aim.startswith("/etc/alternatives/"):
                add(aim[1:], tarfile.SYMTYPE, os.path.realpath(path))
            tar.add(path, path[1:], recursive=False)


def _binds() -> dict[str, dict[str, str]]:
    """What the container sees of this host: the interpreter, its packages, this checkout."""
    folders = {Path(sys.base_prefix), Path(sys.prefix), REPOSITORY}
    return {str(f): {"bind": str(f), "mode": "ro"} for f in folders if not f.is_relative_to("/usr")}


class Container:
    """A running container with the engine's defaults; :meth:`run` runs a command in it."""

    def __init__(self, running: Any) -> None:
        self._running = running

    def run(self, *argv: str, user: str = "root", **env: str) -> tuple[int, str]:
        """The exit code and the output of a command, which is shown as it comes."""
        home = "/root" if user == "root" else "/home/somebody"
        clean = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": home, "PYTHONDONTWRITEBYTECODE": "1", **env}
        api = self._running.client.api
        made = api.exec_create(self._running.id, argv, user=user, workdir=home, environment=clean)
        text = ""
        for part in api.exec_start(made["Id"], stream=True):
            text += part.decode(errors="replace")
            print(part.decode(errors="replace"), end="", flush=True)
        return api.exec_inspect(made["Id"])["ExitCode"], text

    def python(self, *words: str, user: str = "root", **env: str) -> tuple[int, str]:
        """Our interpreter, with our packages."""
        return self.run(sys.executable, *words, user=user, **env)

    def argv(self, *words: str) -> list[str]:
        """The command line program, as it is called in there."""
        return [sys.executable, "-c", "from clawgym.cli import main; main()", *words]

    def clawgym(self, *words: str, user: str = "root") -> tuple[int, str]:
        """Run the command line program."""
        return self.run(*self.argv(*words), user=user)

    def conformance(self, choice: str) -> tuple[int, str]:
        """The conformance tests that match ``choice``, as pytest's ``-k``; its exit code and report."""
        argv = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-k", choice]
        argv += ["--rootdir", str(REPOSITORY), "-c", str(REPOSITORY / "pyproject.toml")]
        return self.python(*argv, *map(str, sorted((REPOSITORY / "tests/sandbox").glob("test_conformance_*.py"))))


@contextmanager
def container(engine: str) -> Iterator[Container]:
    """A container of the engine at the address ``engine``, with its defaults for everything but the network."""
    docker = pytest.importorskip("docker")
    if shutil.which("dpkg-query") is None:
        pytest.skip("the image is made of Debian packages, and dpkg-query is not here")
    client = docker.DockerClient(base_url=engine, timeout=120)
    name = f"clawgym-test-{os.getpid()}"
    if {"name=rootless", "name=userns"} & set(client.info().get("SecurityOptions") or ()):
        client.close()
        pytest.skip("root of this engine's containers is not root: the chroot backend refuses it, and says so")
    try:
        with tempfile.TemporaryFile() as file:
            _write_root(file)
            file.seek(0)
            client.api.import_image_from_data(file, repository=name)
        # It ends by itself should nobody take it away. No network: a private engine has none to give.
        made = client.containers.run(
            name, ["sleep", "1800"], detach=True, init=True, remove=True, network_mode="none", volumes=_binds()
        )
        try:
            yield Container(made)
        finally:
            made.kill()
            made.wait(condition="removed")
    finally:
        client.images.remove(name, force=True)
        client.close()
