"""Find a Python on this machine, copy it into an installation, and let pip install pinned packages for it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from clawgym.agents.programs._npm import dying_with_parent
from clawgym.errors import AgentError

__all__ = ["FoundPython", "copy_python", "find_python", "pip_install"]

_ABOUT = """
import json, os, platform, sys, sysconfig
exe = getattr(sys, "_base_executable", None) or sys.executable
print(json.dumps([platform.python_version(), os.path.realpath(exe), os.path.realpath(os.path.dirname(os.__file__)),
                  sysconfig.get_config_var("LIBDIR") or "", sysconfig.get_config_var("INSTSONAME") or ""]))
"""
_LEFT_OUT = ("site-packages", "dist-packages", "test", "idlelib", "tkinter", "turtledemo", "ensurepip", "__pycache__")
"""Folders of the standard library that no program needs."""
_START = """#!/bin/sh
here=${0%/*}
LD_LIBRARY_PATH="$here/lib" exec "$here/bin/python3" -I -B "$here/start.py" "$@"
"""
_START_PY = '''"""Start a module of the folder `packages`, or a file that uses it: start.py MODULE|FILE ARGUMENT ...

Commands that the program runs see nothing of this Python: neither its libraries nor its packages are in the
environment.
"""

import os
import runpy
import site
import sys

os.environ.pop("LD_LIBRARY_PATH", None)
site.addsitedir(os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "packages"))
module = sys.argv[1]
sys.argv[:] = [module, *sys.argv[2:]]
if module.endswith(".py"):
    runpy.run_path(module, run_name="__main__")
else:
    runpy.run_module(module, run_name="__main__", alter_sys=True)
'''
_LINES = 12  # of pip's output that an error message shows


@dataclass(frozen=True, slots=True)
class FoundPython:
    """A Python of this machine."""

    version: str
    program: Path
    library: Path
    """Folder of the standard library."""
    shared: Path | None
    """Its shared library, if it has one."""


def find_python(version: str, title: str) -> FoundPython:
    """Return a Python ``version`` (such as ``3.12``) of this machine: this one, from PATH, from pyenv or from uv.

    Raises :class:`~clawgym.errors.AgentError` if there is none.
    """
    for program in _candidates(version):
        command = [program, "-I", "-c", _ABOUT]
        try:
            done = subprocess.run(command, capture_output=True, timeout=30, stdin=subprocess.DEVNULL)
            found, real, library, folder, name = json.loads(done.stdout)
        except (OSError, ValueError, subprocess.TimeoutExpired):
            continue
        if found.startswith(f"{version}."):
            shared = Path(folder, name)
            return FoundPython(found, Path(real), Path(library), shared if ".so" in name and shared.exists() else None)
    raise AgentError(
        f"{title} needs Python {version}, which was not found on PATH, in ~/.pyenv and ~/.local/share/uv: install it "
        f"(uv python install {version}, or apt-get install python{version}) and run the same command again"
    )


def _candidates(version: str) -> Iterator[str]:
    if f"{sys.version_info[0]}.{sys.version_info[1]}" == version:
        yield sys.executable
    if found := shutil.which(f"python{version}"):
        yield found
    for folder in ("~/.pyenv/versions", "~/.local/share/uv/python"):
        for path in sorted(Path(folder).expanduser().glob(f"*{version}*/bin/python{version}"), reverse=True):
            yield str(path)


def pip_install(python: FoundPython, lock: bytes, folder: Path) -> None:
    """Install the packages of ``lock``, requirements with hashes, into ``folder``. No code of a package is run.

    Raises :class:`~clawgym.errors.AgentError` with pip's output if that fails.
    """
    with tempfile.TemporaryDirectory() as scratch:
        requirements = Path(scratch, "lock.txt")
        requirements.write_bytes(lock)
        command = [sys.executable, "-m", "pip", "--python", str(python.program), "install", "--target", str(folder)]
        command += ["--require-hashes", "--no-deps", "--only-binary", ":all:", "--no-compile", "--quiet"]
        command += ["--disable-pip-version-check", "--no-input", "--root-user-action=ignore", "-r", str(requirements)]
        done = subprocess.run(
            command, capture_output=True, text=True, stdin=subprocess.DEVNULL, umask=0o022,
            preexec_fn=dying_with_parent(),
        )  # fmt: skip
    if done.returncode != 0:
        lines = [line for line in done.stderr.strip().splitlines() if not line.startswith("WARNING")]
        raise AgentError(
            f"pip failed with status {done.returncode}; output: {' | '.join(lines[-_LINES:]) or 'none'}: check that "
            "the package index answers and that the disk is not full, then run the same command again"
        )
    shutil.rmtree(folder / "bin", ignore_errors=True)  # they name this machine's Python


def copy_python(python: FoundPython, folder: Path, packages: Path) -> None:
    """Copy a Python into ``folder``, with a program ``start``, and compile all modules. Raises OSError, AgentError."""
    for name in ("bin", "lib"):
        (folder / name).mkdir(parents=True)
    shutil.copyfile(python.program, folder / "bin/python3")
    (folder / "bin/python3").chmod(0o755)
    if python.shared:
        shutil.copyfile(python.shared, folder / "lib" / python.shared.name)
    library = folder / "lib" / f"python{'.'.join(python.version.split('.')[:2])}"
    shutil.copytree(
        python.library, library, ignore=lambda _, names: [n for n in names if n in _LEFT_OUT or n.startswith("config-")]
    )
    (library / "site-packages").mkdir()
    (folder / "start.py").write_text(_START_PY)
    (folder / "start").write_text(_START)
    (folder / "start").chmod(0o755)
    for top, seen in ((library, python.library), (packages, "packages")):
        # Their content does not depend on when and where they were compiled.
        compile_all = ["-m", "compileall", "-q", "-s", str(top), "-p", str(seen), "--invalidation-mode=unchecked-hash"]
        env = {**os.environ, "LD_LIBRARY_PATH": str(folder / "lib")}
        subprocess.run([folder / "bin/python3", "-I", *compile_all, top], capture_output=True, env=env, umask=0o022)
