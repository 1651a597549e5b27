"""The folders of the host's ``/usr`` that sandboxes do not see, and the packages shown in their place.

``/usr`` belongs to the distribution, except for folders that users of the machine fill: ``/usr/local``, ``/usr/src``,
the targets of pip and npm, and other top-level folders. Their contents may be private (ClawGym with its generators and
checkers among them) and change what a checker can import. So these folders are empty in sandboxes, except for files of
Debian packages that are requested by name, and of their dependencies.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = ["ALWAYS", "PACKAGES", "build", "hidden"]

ALWAYS = ("nodejs", "python3-pip", "python3-setuptools", "python3-wheel")
"""Packages shown in every sandbox: those that install packages from files, and npm."""
PACKAGES = ("dist-packages", "site-packages")
"""Names of folders with Python packages, which are hidden everywhere."""

_USR = "/usr"
_TOP = frozenset(("bin", "games", "include", "lib", "lib32", "lib64", "libexec", "libx32", "sbin", "share"))
_LOCAL = ("bin", "etc", "games", "include", "lib", "sbin", "share", "src")
_NODE = f"{_USR}/lib/node_modules/"
_NAME = r"\s*([a-z0-9][a-z0-9.+-]*)"


def hidden() -> list[str]:
    """The folders, relative to ``/usr``, that are hidden from sandboxes. Some may not exist.

    Only those that can be found without walking through all of ``/usr``. A change here makes a new root.
    """
    found = {"lib/node_modules", "lib/python3/dist-packages", "local", "src"}
    with os.scandir(_USR) as entries:
        found |= {e.name for e in entries if e.is_dir(follow_symlinks=False) and e.name not in _TOP}
    for kind in PACKAGES:
        found |= {str(path.relative_to(_USR)) for path in Path(_USR).glob(f"lib*/py*/{kind}") if not path.is_symlink()}
    package = Path(__file__).resolve().parents[2]
    own = package.parent if (package.parent / "pyproject.toml").is_file() else package
    if own.is_relative_to(_USR):
        found.add(str(own.relative_to(_USR)))
    return sorted(path for path in found if not any(str(parent) in found for parent in Path(path).parents))


def build(target: Path, folders: Iterable[str], packages: Iterable[str]) -> None:
    """Make the tree that replaces the hidden ``folders``: the files of ``packages``, and empty folders that programs
    expect.

    Without ``.pth`` files, which Python runs at every start. Raises OSError.
    """
    for folder in folders:
        if Path(folder).name in ("local", "node_modules", "src", *PACKAGES):
            (target / folder).mkdir(parents=True, exist_ok=True)
    for name in _LOCAL:
        (target / "local" / name).mkdir()
    (target / "local/man").symlink_to("share/man")
    inside = tuple(f"{_USR}/{folder}/" for folder in folders)
    for path in _files(packages):
        if path.startswith(_NODE):
            if path.count("/") == _NODE.count("/"):  # npm updates itself in place: copy the whole module
                shutil.copytree(path, target / Path(path).relative_to(_USR), symlinks=True)
        elif path.startswith(inside) and not path.endswith(".pth"):
            for source in (path, *_compiled(path)):
                _copy(source, target / Path(source).relative_to(_USR))
    if not os.path.exists(f"{_USR}/bin/python3"):
        _show_local_python(target)
    for folder, _, _ in os.walk(target):
        os.chmod(folder, 0o755)  # whatever the umask


def _copy(source: str, target: Path) -> None:
    if os.path.isdir(source) and not os.path.islink(source):
        target.mkdir(parents=True, exist_ok=True)
    elif os.path.lexists(source):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target, follow_symlinks=False)


def _compiled(path: str) -> Iterator[str]:
    """The compiled files of a module: packages do not list them; they are valid as the source keeps its time."""
    if path.endswith(".py"):
        yield from map(str, Path(path).parent.glob(f"__pycache__/{Path(path).stem}.*.pyc"))


def _show_local_python(target: Path) -> None:
    """Copy the Python of ``/usr/local`` without its packages, if ``/usr`` has none, as in the images ``python:3.*``."""
    left_out = shutil.ignore_patterns("dist-packages", "site-packages", "test", "*.pth")
    for pattern in ("bin/python3", "bin/python3.[0-9]*", "lib/libpython3*", "lib/python3.*"):
        for path in Path(_USR, "local").glob(pattern):
            into = target / path.relative_to(_USR)
            if path.is_dir():
                shutil.copytree(path, into, symlinks=True, ignore=left_out)
            else:
                shutil.copy2(path, into, follow_symlinks=False)


# -- Debian's packages


def _files(packages: Iterable[str]) -> list[str]:
    """The files in ``/usr`` of the installed ``packages`` and their dependencies; empty without dpkg."""
    if not shutil.which("dpkg-query") or not (found := _closure(packages)):
        return []
    listed = subprocess.run(["dpkg-query", "-L", *found], capture_output=True, text=True, check=False).stdout
    # Packages from before the merge of / and /usr list /lib for /usr/lib.
    paths = {line if line.startswith(f"{_USR}/") else _USR + line for line in listed.splitlines() if line[:1] == "/"}
    return sorted(paths)


def _closure(names: Iterable[str]) -> list[str]:
    fields = "${db:Status-Abbrev}\t${Package}\t${Pre-Depends}, ${Depends}\t${Provides}\n"
    text = subprocess.run(["dpkg-query", "-W", "-f", fields], capture_output=True, text=True, check=False).stdout
    needs: dict[str, list[str]] = {}
    providers: dict[str, list[str]] = {}
    for line in text.splitlines():
        state, name, depends, provides = line.split("\t")
        if state.startswith("ii"):
            needs[name] = re.findall(rf"(?:^|[,|]){_NAME}", depends)
            for other in re.findall(rf"(?:^|,){_NAME}", provides):
                providers.setdefault(other, []).append(name)
    found: set[str] = set()
    todo = list(names)
    while todo:
        name = todo.pop()
        for package in [name] if name in needs else providers.get(name, []):
            if package not in found:
                found.add(package)
                todo += needs[package]
    return sorted(found)
