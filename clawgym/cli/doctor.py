"""``clawgym doctor``: what works here and, for each thing that does not, the command that mends it."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import typer

from clawgym.cli._options import JsonFlag
from clawgym.console import Console
from clawgym.errors import ClawGymError

__all__ = ["Diagnosis", "doctor", "examine"]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One line of the report."""

    what: str
    ok: bool
    detail: str
    mend: str = ""
    """The command that mends it; empty where nothing is wrong."""
    needed: bool = False
    """Whether ClawGym is of no use without it."""
    notes: tuple[str, ...] = ()
    """What a sandbox does not isolate here, or does otherwise than the others."""


def _python() -> Diagnosis:
    version = platform.python_version()
    ok = sys.version_info >= (3, 11)
    return Diagnosis("Python", ok, version, "" if ok else "install Python 3.11 or newer", needed=True)


def _package(module: str, extra: str, purpose: str) -> Diagnosis:
    found = importlib.util.find_spec(module) is not None
    return Diagnosis(purpose, found, f"package {module}", "" if found else f"pip install 'clawgym[{extra}]'")


def _backend(name: str) -> list[Diagnosis]:
    """A real box is started, and asked."""
    from clawgym.sandbox import backend

    what = f"sandbox: {name}"
    try:

        async def probe() -> Diagnosis:
            made = backend(name)
            try:
                isolation = await made.probe()
            finally:
                await made.aclose()
            missing = [feature for feature, holds in isolation.features.items() if not holds]
            detail = f"tier {isolation.tier}; " + (
                "everything isolated" if not missing else "not: " + ", ".join(missing)
            )
            return Diagnosis(what, True, detail, notes=isolation.notes)

        return [asyncio.run(probe())]
    except ClawGymError as error:
        text, _, mend = str(error).rpartition(": ")
        return [Diagnosis(what, False, text or str(error), mend or str(error))]


def _cluster() -> list[Diagnosis]:
    """Looked at only where the user has named one: no cluster is started or sought."""
    if not os.environ.get("RAY_ADDRESS"):
        return [Diagnosis("sandbox: ray", True, "not asked for (RAY_ADDRESS is not set)")]
    return _backend("ray")


_NEW_NAMESPACE = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print("made" if libc.unshare(0x10000000) == 0 else os.strerror(ctypes.get_errno()))
"""


def _namespaces() -> list[Diagnosis]:
    what = "user namespaces"
    if sys.platform != "linux":
        return [Diagnosis(what, False, f"{sys.platform} has none", "use the Docker backend: --sandbox docker")]
    argv = [sys.executable, "-I", "-S", "-c", _NEW_NAMESPACE]
    said = subprocess.run(argv, capture_output=True, text=True).stdout.strip()
    found: list[Diagnosis] = []
    for path, wanted, mend in (
        ("/proc/sys/kernel/unprivileged_userns_clone", "1", "sysctl -w kernel.unprivileged_userns_clone=1"),
        ("/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "0",
         "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"),
    ):  # fmt: skip
        try:
            with open(path) as file:
                value = file.read().strip()
        except OSError:
            continue
        if value != wanted and os.geteuid() != 0:
            found.append(Diagnosis(what, False, f"{path} is {value}", mend))
    if not found and said != "made":
        mend = (
            "in a container: run as root and use --sandbox chroot (docker run --user 0); "
            "elsewhere: sysctl -w user.max_user_namespaces=15000"
        )
        found.append(Diagnosis(what, False, f"refused to this process ({said or 'no answer'})", mend))
    return found or [Diagnosis(what, True, "allowed")]


def _checker_libraries() -> Diagnosis:
    """A few public checkers use these if they can be imported, and score differently if not.

    Sandboxes show them as packages of the distribution: what pip has put into this machine's Python they do not see.
    """
    if shutil.which("python3", path="/usr/bin") is None:
        return Diagnosis("python3 in boxes", False, "no /usr/bin/python3", "apt-get install python3", needed=True)
    names = ("python3-yaml", "python3-cryptography")
    asked = ["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n", *names]
    try:
        said = subprocess.run(asked, capture_output=True, text=True).stdout.splitlines()
    except FileNotFoundError:
        said = []
    missing = [name for name in names if f"{name} installed" not in said]
    mend = f"apt-get install {' '.join(missing)}" if missing else ""
    detail = (
        f"missing in boxes: {', '.join(missing)} (22 of the 2,200 public checkers try them)" if missing else "present"
    )
    return Diagnosis("libraries of checkers", not missing, detail, mend)


def _task_sets() -> Diagnosis:
    root = os.environ.get("CLAWGYM_DATA")
    if root and os.path.isdir(root):
        return Diagnosis("public task sets", True, f"CLAWGYM_DATA={root}")
    return Diagnosis(
        "public task sets",
        False,
        "CLAWGYM_DATA is not set (the Hub is asked instead)" if not root else f"CLAWGYM_DATA={root} is not a folder",
        "git clone https://github.com/ClawGym/ClawGym-Agents && export CLAWGYM_DATA=$PWD/ClawGym-Agents/RL/data",
    )


def _openclaw() -> Diagnosis:
    from clawgym.agents.openclaw.install import installed

    try:
        copy = installed()
    except ClawGymError as error:
        text, _, mend = str(error).rpartition(": ")
        return Diagnosis("OpenClaw", False, text, mend)
    compare = "`clawgym openclaw install --check` compares every file"
    return Diagnosis("OpenClaw", True, f"{copy.version} on Node {copy.node_version}; {compare}")


def _desktops() -> Diagnosis:
    """Boxes of the sandboxes show what this machine's ``/usr`` has."""
    from clawgym.desktop import PROGRAMS

    missing = [package for program, package in PROGRAMS.items() if not shutil.which(program, path="/usr/bin:/bin")]
    if missing:
        mend = f"apt-get install {' '.join(missing)}"
        return Diagnosis("desktops", False, f"missing: {', '.join(missing)}", mend)
    return _package("PIL", "gui", "desktops")


def examine() -> list[Diagnosis]:
    """Everything the doctor looks at, in order."""
    from clawgym.sandbox import local_names

    linux = sys.platform == "linux"
    checks: list[Callable[[], list[Diagnosis]]] = [
        lambda: [_python()],
        _namespaces,
        *(partial(_backend, name) for name in local_names()),
        _cluster,
        lambda: [_checker_libraries()] if linux else [],
        lambda: [_package("aiohttp", "openai", "model endpoints")],
        lambda: [_package("huggingface_hub", "hub", "Hugging Face Hub")],
        lambda: [_desktops()] if linux else [],
        lambda: [_openclaw()],
        lambda: [_task_sets()],
    ]
    findings = [finding for check in checks for finding in check()]
    boxes = [f for f in findings if f.what.startswith("sandbox:") and not f.detail.startswith("not asked for")]
    if not any(f.ok for f in boxes):
        mend = "mend one of the sandboxes above"
        findings.append(Diagnosis("somewhere to run tasks", False, "no sandbox backend works", mend, needed=True))
    return findings


def _verl() -> list[Diagnosis]:
    from clawgym.trainers.verl.installed import examine as parts

    return [Diagnosis(f"verl: {part.what}", part.ok, part.detail, part.mend, needed=True) for part in parts()]


def doctor(
    as_json: JsonFlag = False,
    verl: Annotated[bool, typer.Option("--verl", help="Check what `clawgym train --set trainer=verl` needs.")] = False,
) -> None:
    """Report what works here, and how to repair what does not. Exit status 1 if nothing can run."""
    logging.getLogger("clawgym.sandbox").setLevel(logging.ERROR)  # what a backend warns of, the report says
    findings = _verl() if verl else examine()
    out = Console()
    if as_json:
        rows = [{k: getattr(f, k) for k in Diagnosis.__slots__} for f in findings]
        out.json(rows)
    else:
        width = max(len(f.what) for f in findings)
        for f in findings:
            out.say(f"{'ok ' if f.ok else 'NO '} {f.what:<{width}}  {f.detail}")
            for note in f.notes:
                out.say(f"    {'':<{width}}  - {note}")
            if f.mend:
                out.say(f"    {'':<{width}}  mend: {f.mend}")
    raise typer.Exit(1 if any(f.needed and not f.ok for f in findings) else 0)
