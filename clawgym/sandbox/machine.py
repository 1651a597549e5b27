"""Cores, memory and load of the machine, or machines, on which a backend runs its sandboxes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from clawgym.sandbox.protocol import Backend

__all__ = ["Elsewhere", "Machine", "machine_of"]

_MIB = 2**20


def _cgroup_room(root: Path = Path("/sys/fs/cgroup")) -> float:
    """MiB left below this process' memory limit, for cgroup v2 and v1; infinite without one."""
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            return (int((root / limit).read_text()) - int((root / used).read_text())) / _MIB
        except (OSError, ValueError):
            continue
    return float("inf")


@dataclass(frozen=True)
class Machine:
    """Capacity and load. Tests replace it with fixed values."""

    cores: int
    memory_mb: Callable[[], float]
    """MiB that can be taken without swapping."""
    load: Callable[[], float]
    """Runnable processes per core, over the last minute."""

    @classmethod
    def this(cls) -> Machine:
        """The machine this process runs on."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

        def memory() -> float:
            try:
                text = Path("/proc/meminfo").read_text()
                free = int(text.split("MemAvailable:")[1].split()[0]) / 1024
            except (OSError, IndexError, ValueError):
                return float("inf")
            return min(free, _cgroup_room())

        def load() -> float:
            try:
                return os.getloadavg()[0] / (os.cpu_count() or 1)
            except OSError:
                return 0.0

        return cls(cores, memory, load)


@runtime_checkable
class Elsewhere(Protocol):
    """A backend whose sandboxes run on other machines than this process."""

    def machine(self) -> Machine:
        """The capacity and load of all those machines together. Call ``probe`` first."""
        ...


def machine_of(backend: Backend) -> Machine:
    """The machine or machines on which ``backend`` runs its sandboxes."""
    return backend.machine() if isinstance(backend, Elsewhere) else Machine.this()
