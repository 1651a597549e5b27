"""Cgroup limits for the sandboxes of one owner, for cgroup version 1, 2 and hybrids. Standard library only.

Version 1 has a hierarchy for each controller, version 2 one for all. ``cgroup.kill`` and ``cgroup.freeze`` exist in
every version 2 hierarchy, even one without controllers (``unified`` of the hybrid). If no cgroup can be made,
:attr:`Cgroups.limits` is empty and the caller falls back to rlimits.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

__all__ = ["Cgroups"]

_WANTED = ("memory", "pids", "cpu")


def _mounts() -> list[tuple[str, Path, list[str]]]:
    """(file system type, mount point, controllers) of every cgroup mount."""
    rows: list[tuple[str, Path, list[str]]] = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            rows.append((kind, Path(left.split()[4]), options.split(",")))
    return rows


def _own_paths() -> dict[str, str]:
    """Controller ('' for version 2) -> this process's cgroup path."""
    paths: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        for name in names.split(","):
            paths[name] = path
    return paths


def _write(path: Path | str, value: int | str) -> None:
    fd = os.open(path, os.O_WRONLY)  # ten times as fast as pathlib; each sandbox needs a dozen
    try:
        os.write(fd, str(value).encode())
    finally:
        os.close(fd)


def _read(path: str) -> str:
    fd = os.open(path, os.O_RDONLY)
    try:
        parts = []
        while part := os.read(fd, 1 << 14):
            parts.append(part)
        return b"".join(parts).decode()
    finally:
        os.close(fd)


class Cgroups:
    """The cgroups of one owner, named after its id, with one child for each lease."""

    def __init__(self, owner: str, at: dict[str, tuple[str, int]] | None = None) -> None:
        """Make the cgroups of ``owner``, or take over those in ``at``, a result of :meth:`where`."""
        self.name = f"clawgym-{owner}"
        self.roots: dict[str, Path] = {}
        """Controller -> the owner's folder; 'kill' -> its folder in a version 2 hierarchy."""
        self._version: dict[str, int] = {}
        if at is not None:
            for name, (path, version) in at.items():
                if Path(path).name == self.name and Path(path).is_dir():
                    self.roots[name], self._version[name] = Path(path), version
            return
        try:
            mounts, own = _mounts(), _own_paths()
        except (OSError, ValueError):
            return
        for kind, point, options in mounts:
            if kind == "cgroup":
                for name in _WANTED:
                    if name in options:
                        self._claim(name, 1, [point / own.get(name, "/").lstrip("/"), point])
            else:
                self._claim_v2(point, own.get("", "/"))

    def where(self) -> dict[str, tuple[str, int]]:
        """Controller -> (folder, version), so that another process can clear them later."""
        return {name: (str(path), self._version[name]) for name, path in self.roots.items()}

    @property
    def limits(self) -> list[str]:
        """Controllers that can be limited here."""
        return [name for name in _WANTED if name in self.roots]

    def _claim(self, name: str, version: int, bases: list[Path]) -> bool:
        for base in bases:
            try:
                (base / self.name).mkdir(exist_ok=True)
            except OSError:
                continue
            self.roots[name] = base / self.name
            self._version[name] = version
            return True
        return False

    def _claim_v2(self, point: Path, own: str) -> None:
        here = point / own.lstrip("/")
        for base in (point, here.parent if here != point else here, here):
            if not self._claim("kill", 2, [base]):
                continue
            try:
                available = set((base / "cgroup.controllers").read_text().split())
                for controller in _WANTED:
                    if controller not in available:
                        continue
                    _write(base / "cgroup.subtree_control", f"+{controller}")
                    _write(base / self.name / "cgroup.subtree_control", f"+{controller}")
                    self.roots[controller] = base / self.name
                    self._version[controller] = 2
                return
            except OSError:
                try:
                    (base / self.name).rmdir()
                except OSError:
                    pass
                self.roots.pop("kill", None)

    def create(self, lease: str, *, memory: int, pids: int, cpus: float) -> list[str]:
        """Make the cgroups of a lease. Returns the ``cgroup.procs`` files that a pid must be written to.

        ``memory`` is in bytes, ``cpus`` in cores.
        """
        procs: list[str] = []
        for name, root in self.roots.items():
            folder = f"{root}/{lease}"
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder)
            procs.append(f"{folder}/cgroup.procs")
            v2 = self._version[name] == 2
            if name == "memory":
                _write(f"{folder}/memory.max" if v2 else f"{folder}/memory.limit_in_bytes", memory)
                try:  # no swap in addition, where swap is accounted
                    if v2:
                        _write(f"{folder}/memory.swap.max", 0)
                    else:
                        _write(f"{folder}/memory.memsw.limit_in_bytes", memory)
                except OSError:
                    pass
            elif name == "pids":
                _write(f"{folder}/pids.max", pids)
            elif name == "cpu":
                quota = max(1000, int(cpus * 100_000))
                if v2:
                    _write(f"{folder}/cpu.max", f"{quota} 100000")
                else:
                    _write(f"{folder}/cpu.cfs_period_us", 100_000)
                    _write(f"{folder}/cpu.cfs_quota_us", quota)
        return sorted(set(procs))

    def try_out(self) -> None:
        """Move a child in and out. If that is refused (no delegated cgroup), give up all cgroups."""
        try:
            procs = self.create("try-out", memory=1 << 30, pids=64, cpus=1.0)
            pid = os.fork()
            if pid == 0:
                try:
                    for path in procs:
                        _write(Path(path), 0)
                    os._exit(0)
                finally:
                    os._exit(1)
            works = os.waitpid(pid, 0)[1] == 0
        except OSError:
            works = False
        for _ in range(200):
            if self.remove("try-out"):
                break
            time.sleep(0.005)
        if not works:
            self.remove_all()
            self.roots.clear()

    def _folders(self, lease: str) -> set[str]:
        return {f"{root}/{lease}" for root in self.roots.values()}

    def events(self, lease: str) -> dict[str, int]:
        """How often a limit was hit: ``oom`` and ``pids``."""
        found = {"oom": 0, "pids": 0}
        for name, key, files in (
            ("memory", "oom_kill", ("memory.events", "memory.oom_control")),
            ("pids", "max", ("pids.events",)),
        ):
            for file in files:
                try:
                    text = _read(f"{self.roots[name]}/{lease}/{file}")
                except (OSError, KeyError):
                    continue
                for line in text.splitlines():
                    head, _, value = line.partition(" ")
                    if head == key and value.isdigit():
                        found["oom" if name == "memory" else "pids"] += int(value)
        return found

    def pids(self, lease: str) -> set[int]:
        """Processes in the lease's cgroups."""
        found: set[int] = set()
        for folder in self._folders(lease):
            try:
                found.update(map(int, _read(f"{folder}/cgroup.procs").split()))
            except OSError:
                pass
        return found

    def kill(self, lease: str) -> None:
        """Send SIGKILL to everything in the lease, atomically where ``cgroup.kill`` exists."""
        try:
            _write(f"{self.roots['kill']}/{lease}/cgroup.kill", 1)
        except (OSError, KeyError):
            for pid in self.pids(lease):
                with contextlib.suppress(OSError):
                    os.kill(pid, 9)

    def freeze(self, lease: str, frozen: bool) -> bool:
        """Freeze or thaw every process of the lease. Returns False if there is no cgroup for that."""
        try:
            _write(f"{self.roots['kill']}/{lease}/cgroup.freeze", int(frozen))
        except (OSError, KeyError):
            return False
        return True

    def is_frozen(self, lease: str) -> bool:
        """Whether every process of the lease is frozen."""
        try:
            return "frozen 1" in _read(f"{self.roots['kill']}/{lease}/cgroup.events")
        except (OSError, KeyError):
            return False

    def remove(self, lease: str) -> bool:
        """Remove the cgroups of the lease. Returns False while one still has a process."""
        for folder in self._folders(lease):
            try:
                os.rmdir(folder)
            except FileNotFoundError:
                pass
            except OSError:
                return False
        return True

    def leases(self) -> set[str]:
        """Ids of the leases that have a cgroup."""
        return {child.name for root in self.roots.values() for child in root.iterdir() if child.is_dir()}

    def remove_all(self) -> None:
        """Remove the owner's cgroups, once they have no leases."""
        for root in set(self.roots.values()):
            try:
                root.rmdir()
            except OSError:
                pass
