"""``clawgym doctor``: report what works on this machine, and for each failed check the command that fixes it."""

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
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clawgym.cli._options import JsonFlag, Settings
from clawgym.console import Console
from clawgym.errors import ClawGymError

if TYPE_CHECKING:
    from clawgym.online.config import ServiceConfig

__all__ = ["Diagnosis", "check_model", "doctor", "examine"]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result of one check."""

    what: str
    """What was checked."""
    ok: bool
    detail: str
    mend: str = ""
    """The command that fixes it; empty if ``ok``."""
    needed: bool = False
    """Whether ClawGym cannot run anything without it."""
    notes: tuple[str, ...] = ()
    """Limits of a sandbox's isolation on this machine."""


def _python() -> Diagnosis:
    version = platform.python_version()
    ok = sys.version_info >= (3, 11)
    return Diagnosis("Python", ok, version, "" if ok else "install Python 3.11 or newer", needed=True)


def _package(module: str, extra: str, purpose: str) -> Diagnosis:
    found = importlib.util.find_spec(module) is not None
    return Diagnosis(purpose, found, f"package {module}", "" if found else f"pip install 'clawgym[{extra}]'")


def _backend(name: str) -> list[Diagnosis]:
    """Start a real sandbox and probe its isolation."""
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
                "everything isolated" if not missing else "not isolated: " + ", ".join(missing)
            )
            return Diagnosis(what, True, detail, notes=isolation.notes)

        return [asyncio.run(probe())]
    except ClawGymError as error:
        text, _, mend = str(error).rpartition(": ")
        return [Diagnosis(what, False, text or str(error), mend or str(error))]


def _cluster() -> list[Diagnosis]:
    """Check the Ray cluster only if RAY_ADDRESS names one; never start or look for one."""
    if not os.environ.get("RAY_ADDRESS"):
        return [Diagnosis("sandbox: ray", True, _NO_RAY)]
    return _backend("ray")


_NO_RAY = "not checked (RAY_ADDRESS is not set)"
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
    answer = subprocess.run(argv, capture_output=True, text=True).stdout.strip()
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
    if not found and answer != "made":
        mend = (
            "in a container: run as root and use --sandbox chroot (docker run --user 0); "
            "elsewhere: sysctl -w user.max_user_namespaces=15000"
        )
        found.append(Diagnosis(what, False, f"refused to this process ({answer or 'no answer'})", mend))
    return found or [Diagnosis(what, True, "allowed")]


def _checker_libraries() -> Diagnosis:
    """Check the libraries that a few public checkers import if available; without them they score differently.

    Sandboxes see the packages of the distribution, not those that pip installed on this machine.
    """
    if shutil.which("python3", path="/usr/bin") is None:
        return Diagnosis("python3 in sandboxes", False, "no /usr/bin/python3", "apt-get install python3", needed=True)
    names = ("python3-yaml", "python3-cryptography")
    query = ["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n", *names]
    try:
        status = subprocess.run(query, capture_output=True, text=True).stdout.splitlines()
    except FileNotFoundError:
        status = []
    missing = [name for name in names if f"{name} installed" not in status]
    mend = f"apt-get install {' '.join(missing)}" if missing else ""
    detail = (
        f"missing in sandboxes: {', '.join(missing)} (22 of the 2,200 public checkers import them)"
        if missing
        else "present"
    )
    return Diagnosis("libraries of checkers", not missing, detail, mend)


def _task_sets() -> Diagnosis:
    root = os.environ.get("CLAWGYM_DATA")
    if root and os.path.isdir(root):
        return Diagnosis("public task sets", True, f"CLAWGYM_DATA={root}")
    return Diagnosis(
        "public task sets",
        False,
        "CLAWGYM_DATA is not set (downloaded from the Hub instead)"
        if not root
        else f"CLAWGYM_DATA={root} is not a folder",
        "git clone https://github.com/ClawGym/ClawGym-Agents && export CLAWGYM_DATA=$PWD/ClawGym-Agents/RL/data",
    )


def _openclaw() -> Diagnosis:
    from clawgym.agents.openclaw.install import installed

    try:
        copy = installed()
    except ClawGymError as error:
        text, _, mend = str(error).rpartition(": ")
        return Diagnosis("OpenClaw", False, text, mend)
    compare = "`clawgym agents install openclaw --check` compares every file"
    return Diagnosis("OpenClaw", True, f"{copy.version} on Node {copy.runtime}; {compare}")


def _desktops() -> Diagnosis:
    """Check the programs that desktops need, in this machine's ``/usr``, which the sandboxes mount."""
    from clawgym.desktop import PROGRAMS

    missing = [package for program, package in PROGRAMS.items() if not shutil.which(program, path="/usr/bin:/bin")]
    if missing:
        mend = f"apt-get install {' '.join(missing)}"
        return Diagnosis("desktops", False, f"missing: {', '.join(missing)}", mend)
    return _package("PIL", "gui", "desktops")


def examine() -> list[Diagnosis]:
    """Run all checks, in the order of the report."""
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
    sandboxes = [f for f in findings if f.what.startswith("sandbox:") and f.detail != _NO_RAY]
    if not any(f.ok for f in sandboxes):
        mend = "fix one of the sandboxes above"
        findings.append(Diagnosis("working sandbox", False, "no sandbox backend works", mend, needed=True))
    return findings


def _verl() -> list[Diagnosis]:
    from clawgym.trainers.verl.installed import examine as parts

    return [Diagnosis(f"verl: {part.what}", part.ok, part.detail, part.mend, needed=True) for part in parts()]


def check_model(config: ServiceConfig, as_json: bool = False, *, weights: bool = True) -> int:
    """Check the model of a service and print the findings. Returns the exit status."""
    from clawgym.online import portability

    findings = asyncio.run(portability.check_model(config, weights=weights))
    out = Console()
    if as_json:
        rows: list[dict[str, Any]] = [{k: getattr(f, k) for k in portability.ModelFinding.__slots__} for f in findings]
        out.json(rows)
    else:
        width = max(len(f.what) for f in findings)
        for f in findings:
            out.say(f"{f.status:<7}  {f.what:<{width}}  {f.detail}")
            if f.advice:
                out.say(f"{'':<7}  {'':<{width}}  fix: {f.advice}")
    return int(any(f.status == "failed" for f in findings))


def doctor(
    as_json: JsonFlag = False,
    verl: Annotated[bool, typer.Option("--verl", help="Check what `clawgym train --set trainer=verl` needs.")] = False,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Check whether a model fits for `clawgym serve`: smollm2-135m, a folder, or a name on the Hub.",
        ),
    ] = None,
    settings: Settings = None,
) -> None:
    """Report what works here, and how to fix what does not. Exit status 1 if nothing can run.

    With --model: check a model instead, with the settings of `clawgym serve`. Exit status 1 if a check failed.
    """
    if model is not None:
        from clawgym.online.config import load_service_config

        raise typer.Exit(check_model(load_service_config(None, model, settings or ()), as_json))
    if settings:
        raise typer.BadParameter("it belongs to --model: give that too", param_hint="--set")
    logging.getLogger("clawgym.sandbox").setLevel(logging.ERROR)  # warnings of the backends are part of the report
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
                out.say(f"    {'':<{width}}  fix: {f.mend}")
    raise typer.Exit(1 if any(f.needed and not f.ok for f in findings) else 0)
