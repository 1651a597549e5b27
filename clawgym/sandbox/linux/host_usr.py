"""What sandboxes do not see of the host's ``/usr``, and the packages that they see in these places all the same.

``/usr`` is the distribution's, but for a few folders that whoever runs the machine fills: ``/usr/local``, ``/usr/src``,
the folders that pip and npm install to, and what no distribution has at the top. Any of it may be private, ClawGym with
its generators and checkers among it, and all of it changes what a checker can import. So these folders are empty in
sandboxes, but for the files of Debian packages that were asked for by name and of those that they depend on.
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
"""Shown in every sandbox: what installs packages from files, and npm."""
PACKAGES = ("dist-packages", "site-packages")
"""Folders of Python packages: hidden wherever they lie."""

_USR = "/usr"
_TOP = frozenset(("bin", "games", "include", "lib", "lib32", "lib64", "libexec", "libx32", "sbin", "share"))
_LOCAL = ("bin", "etc", "games", "include", "lib", "sbin", "share", "src")
_NODE = f"{_USR}/lib/node_modules/"
_NAME = r"\s*([a-z0-9][a-z0-9.+-]*)"


def hidden() -> list[str]:
    """The folders, relative to ``/usr``, that sandboxes do not see as they are on the host. Some may not be there.

    Those that take no walk through all of ``/usr`` to find: what changes here makes another root.
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
    """Make the tree that lies over the hidden ``folders``: with the files of ``packages``, and empty folders where
    programs expect one.

    No ``.pth`` file is taken: Python runs them at every start. Raises OSError.
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
            if path.count("/") == _NODE.count("/"):  # npm replaces itself in place: the whole module, as it is now
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
    """What Python has compiled of a module: no package lists it, and it is good while the source keeps its time."""
    if path.endswith(".py"):
        yield from map(str, Path(path).parent.glob(f"__pycache__/{Path(path).stem}.*.pyc"))


def _show_local_python(target: Path) -> None:
    """The Python of ``/usr/local``, where ``/usr`` has none, as in the images ``python:3.*``: without its packages."""
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
    """What the installed ones of ``packages`` and of those they need put into ``/usr``; nothing without dpkg."""
    if not shutil.which("dpkg-query") or not (found := _closure(packages)):
        return []
    listed = subprocess.run(["dpkg-query", "-L", *found], capture_output=True, text=True, check=False).stdout
    # Packages from before the merge of / and /usr say /lib for /usr/lib.
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
