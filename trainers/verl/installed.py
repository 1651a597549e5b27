"""Checks the installation of the trainer ``verl``: package versions, GPUs, shared memory, import of verl.

Versions are read without importing the packages. The import of verl is tried in a separate process.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet

__all__ = ["GPU", "WORKING", "Part", "examine"]

WORKING: Mapping[str, str] = {
    "verl": "==0.9.1",
    "torch": ">=2.6",
    "transformers": ">=5.5.3,!=5.6.0,<5.11",
    "tensordict": "==0.10.0",
    "TransferQueue": ">=0.1.10,<0.2",
    "torchdata": ">=0.11",
    "ray": ">=2.50",
    "cachetools": ">=5",
    "fastapi": ">=0.115",
    "uvicorn": ">=0.30",
}
"""Package -> versions that work together. verl's own requirements are incomplete."""
GPU: Mapping[str, str] = {"torch": "==2.11.0", "vllm": "==0.24.0", "flash-attn": ">=2.7"}
"""Versions for GPUs, as verl's authors combine them (constraints-gpu.txt)."""
_LOCKED = "pip install --no-deps -r requirements/test.txt"
_PROBE = "import verl.trainer.ppo.v1, transfer_queue; print('imported')"
_TIMEOUT = 600.0


@dataclass(frozen=True, slots=True)
class Part:
    """The result of one check."""

    what: str
    ok: bool
    detail: str
    mend: str = ""
    """The command that repairs it; empty if ``ok``."""


def examine() -> list[Part]:
    """Check packages, GPUs, shared memory, and the import of verl."""
    found = [_package(name, wanted, _LOCKED) for name, wanted in WORKING.items()]
    gpus = _gpus()
    if gpus:
        mend = "pip install -c constraints-gpu.txt 'clawgym[verl]' vllm flash-attn"
        found += [_package(name, wanted, mend) for name, wanted in GPU.items()]
        found.append(Part("GPUs", True, f"{gpus}: verl.ranks={gpus}"))
    else:
        found.append(Part("GPUs", True, "none: set verl.engine=transformers, for small models on CPUs"))
    found.append(_shared_memory())
    if all(part.ok for part in found):
        found.append(_imports(cpu=not gpus))
    return found


def _package(name: str, wanted: str, mend: str) -> Part:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Part(name, False, f"not installed; {wanted} is needed", mend)
    fits = SpecifierSet(wanted).contains(version.partition("+")[0], prereleases=True)
    return Part(name, fits, version if fits else f"{version}; {wanted} is needed", "" if fits else mend)


def _gpus() -> int:
    """The number of NVIDIA GPUs."""
    try:
        said = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return len(said.stdout.splitlines()) if said.returncode == 0 else 0


def _shared_memory() -> Part:
    """Check /dev/shm, where Ray keeps its objects. If they do not fit, Ray uses slow files."""
    try:
        about = os.statvfs("/dev/shm")
    except OSError as error:
        return Part("shared memory", False, f"/dev/shm: {error.strerror}", "mount a tmpfs on /dev/shm")
    free = about.f_bavail * about.f_frsize
    if free < 600_000_000:
        return Part(
            "shared memory",
            False,
            f"/dev/shm has {free / 1e6:.0f} MB free; Ray needs 600 MB",
            "mount -o remount,size=4G /dev/shm (in a container: --shm-size=4g)",
        )
    return Part("shared memory", True, f"/dev/shm has {free / 1e9:.1f} GB free")


def _imports(*, cpu: bool) -> Part:
    environment = {**os.environ, "VERL_LOGGING_LEVEL": "ERROR"} | ({"VERL_PLATFORM": "cpu"} if cpu else {})
    if cpu:
        environment["VERL_USE_EXTERNAL_MODULES"] = "clawgym.trainers.verl.cpu"
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, env=environment, timeout=_TIMEOUT
        )
    except subprocess.TimeoutExpired:
        return Part("import of verl", False, f"timed out after {_TIMEOUT:.0f} seconds", "try again on an idle machine")
    if "imported" in done.stdout:
        return Part("import of verl", True, "its trainer and its queue")
    said = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return Part("import of verl", False, said, _LOCKED + " --force-reinstall")
