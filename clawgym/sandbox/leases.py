"""Leases: what each owner process holds on this host, so that the resources of a dead owner can be found by id.

Each owner has a folder ``<state>/owners/<owner id>/``. Its supervisor holds a lock on the file ``lock`` as long as it
lives, so an unlocked folder belongs to a dead owner. The next start clears what the folder names: cgroups by owner and
lease id, containers by the label with the owner id. Processes are never found by a name pattern. A folder that cannot
be removed, or whose owner died while it was made, is moved to ``<state>/aside``, which every start tries to empty.
Standard library only.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import time
from pathlib import Path

from clawgym.sandbox.inside.trees import remove_tree
from clawgym.sandbox.linux.cgroups import Cgroups

__all__ = ["GUARDS", "LABEL", "OwnerFolder", "UidBlock", "claim", "clear", "left_over", "reap", "state_dir"]

LABEL = "clawgym.owner"
"""Label of every container; its value is the owner id."""

_UID_BASE, _UID_BLOCK, _UID_BLOCKS = 0x70000000, 4096, 4096
"""Outer uids of sandboxes: above the ranges that distributions and systemd use, below 2**31."""
GUARDS = _UID_BLOCK * _UID_BLOCKS
"""Added to the uid of a chroot sandbox: the uid of its process 1."""
_ASIDE = "aside"
_REAP_SECONDS, _CLEAR_SECONDS = 5.0, 60.0
"""Time limits: to clear dead owners at a start, and to clear this owner's resources at its end."""


def state_dir() -> Path:
    """The folder of leases and prepared root file systems; readable by the outer uid of every sandbox."""
    if sys.platform == "linux" and os.geteuid() == 0:
        return Path("/var/cache/clawgym")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "clawgym"


def _lock(path: Path) -> int | None:
    """Lock the file and return its descriptor; None if it is locked, or was just removed or moved.

    The kernel unlocks it at exit.
    """
    import fcntl  # not on every platform, and only needed on Linux

    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), os.stat(path)):
            return fd
    except OSError:
        pass
    os.close(fd)
    return None


def claim(scratch: Path) -> int:
    """Make and lock the folder ``scratch``, named ``<state>/new-<id>``.

    Returns:
        The descriptor that holds the lock. Once it is closed, the next start removes the folder.

    Raises:
        OSError: the folder cannot be made or locked.
    """
    for _ in range(100):
        try:
            scratch.mkdir(exist_ok=True)
            held = _lock(scratch / "lock")
        except (FileExistsError, FileNotFoundError):
            held = None
        if held is not None:
            return held
        time.sleep(0.01)  # reap() took the folder before it was locked
    raise OSError(errno.EAGAIN, "cannot be locked", str(scratch))


class UidBlock:
    """A block of 4096 outer uids that no other owner on this host uses while this process lives."""

    def __init__(self, state: Path) -> None:
        folder = state / "uids"
        folder.mkdir(parents=True, exist_ok=True)
        # Start at a random block: containers that do not see each other share the kernel's process count of a uid.
        start = int.from_bytes(os.urandom(2)) % _UID_BLOCKS
        for block in (*range(start, _UID_BLOCKS), *range(start)):
            self.path = folder / str(block)
            fd = _lock(self.path)
            if fd is not None:
                self._fd = fd
                self.first = _UID_BASE + block * _UID_BLOCK
                self._free = list(range(self.first + _UID_BLOCK - 1, self.first, -1))
                return
        raise OSError(errno.EAGAIN, "every block of outer uids is in use", str(folder))

    def take(self) -> int:
        """A free uid. Raises OSError if all are in use."""
        if not self._free:
            raise OSError(errno.EAGAIN, "every outer uid is in use")
        return self._free.pop()

    def give_back(self, uid: int) -> None:
        self._free.append(uid)


class OwnerFolder:
    """The folder of a living owner: its lock, and the places of its cgroups, uids and containers."""

    def __init__(self, state: Path, owner: str) -> None:
        self.path = state / "owners" / owner
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Locked before it appears among the others: an unlocked folder there counts as a dead owner's.
        scratch = state / f"new-{owner}"
        claim(scratch)
        scratch.rename(self.path)

    def add_cgroups(self, cgroups: Cgroups) -> None:
        """Record the cgroup folders, before anything runs in them."""
        self._note("cgroups.json", cgroups.where())

    def add_uids(self, uids: UidBlock) -> None:
        """Record the uids of the owner's sandboxes."""
        self._note("uids.json", [str(uids.path), uids.first])

    def add_docker(self, engine: str) -> None:
        """Record a Docker engine that may hold containers of this owner."""
        file = self.path / "docker.json"
        engines = set(json.loads(file.read_text())) if file.exists() else set()
        self._note("docker.json", sorted(engines | {engine}))

    def _note(self, name: str, value: object) -> None:
        temporary = self.path / f"{name}.tmp"
        temporary.write_text(json.dumps(value))
        temporary.replace(self.path / name)


def clear(state: Path, owner: str, cgroups: Cgroups, seconds: float = _CLEAR_SECONDS) -> None:
    """Kill and remove everything that ``owner`` holds, and its folder, within about ``seconds``.

    A folder that cannot be removed in time is moved aside.
    """
    end = time.monotonic() + seconds
    for lease in cgroups.leases():
        cgroups.kill(lease)
    deadline = min(end, time.monotonic() + 5)
    while time.monotonic() < deadline and not all(map(cgroups.remove, cgroups.leases())):
        time.sleep(0.005)
    cgroups.remove_all()
    folder = state / "owners" / owner
    if any(folder.glob("chroot-*")):
        from clawgym.sandbox.chroot.clones import recover

        _kill_uids(folder, min(end, time.monotonic() + 5))
        recover(folder, end)
    try:
        engines = json.loads((folder / "docker.json").read_text())
        for engine in engines:
            from clawgym.sandbox.docker.removal import remove_containers  # HTTP: megabytes that few supervisors need

            remove_containers(engine, f"{LABEL}={owner}")
    except (OSError, ValueError):
        pass
    _discard(state, folder, end)


def _discard(state: Path, folder: Path, end: float) -> None:
    """Remove the folder of a dead owner until ``end``; move it aside if that fails."""
    try:
        remove_tree(folder, max(0.5, end - time.monotonic()))
    except OSError:
        try:
            _move_aside(state, folder)
        except OSError:
            pass  # the next start tries again


def _move_aside(state: Path, folder: Path) -> None:
    """Move a folder to where every start removes what it finds. Raises OSError."""
    aside = state / _ASIDE
    aside.mkdir(mode=0o700, exist_ok=True)
    folder.rename(aside / folder.name)


def left_over(state: Path) -> list[Path]:
    """Folders of dead owners that could not be removed so far."""
    found = [path for path in (state / _ASIDE).glob("*") if path.is_dir()]
    for folder in (state / "owners").glob("*"):
        fd = _lock_of(folder)
        if fd is not None:
            os.close(fd)
            found.append(folder)
    return sorted(found)


def _lock_of(folder: Path) -> int | None:
    """Lock the folder of a dead owner; None if its owner lives, or somebody has just removed it."""
    try:
        return _lock(folder / "lock")
    except OSError:
        return None


def _kill_uids(folder: Path, deadline: float) -> None:
    """Kill what still runs as a uid of a dead owner, unless another owner has the block by now."""
    from clawgym.sandbox.chroot.jail import processes

    try:
        path, first = json.loads((folder / "uids.json").read_text())
        fd = _lock(Path(path))
    except (OSError, ValueError):
        return
    if fd is None:  # also while the owner lives: it kills the processes of each sandbox itself
        return
    try:
        while time.monotonic() < deadline:
            left = [pid for low in (first, first + GUARDS) for pid in processes(low, low + _UID_BLOCK - 1)]
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except OSError:
                    pass
            if not left:
                break
            time.sleep(0.01)
    finally:
        os.close(fd)


def reap(state: Path, seconds: float = _REAP_SECONDS) -> list[str]:
    """Clear what dead owners left behind, for about ``seconds``. Returns the ids of the owners that were cleared.

    Never raises: leftovers must not prevent a start. What is not cleared in time is left to the next start.
    """
    dead: list[str] = []
    end = time.monotonic() + seconds
    for folder in [*state.glob("new-*"), *sorted((state / "owners").glob("*"))]:
        if time.monotonic() > end:
            return dead
        fd = _lock_of(folder)
        if fd is None:
            continue
        try:
            if folder.parent == state:
                # Its owner died while it made the folder, or has not locked it yet and tries again. So it is moved at
                # once: removed in place, the folder of the second try could be emptied.
                _move_aside(state, folder)
            else:
                clear(state, folder.name, Cgroups(folder.name, _cgroups_of(folder)), end - time.monotonic())
                dead.append(folder.name)
        except Exception:
            pass  # the folder stays, and :func:`left_over` lists it
        finally:
            os.close(fd)
    _try_again(state / _ASIDE, end)
    return dead


def _cgroups_of(folder: Path) -> dict[str, tuple[str, int]]:
    try:
        return json.loads((folder / "cgroups.json").read_text())
    except (OSError, ValueError):
        return {}


def _try_again(aside: Path, end: float) -> None:
    """Remove what was moved aside, unless another process is at it."""
    try:
        fd = _lock(aside.with_name(f"{_ASIDE}.lock")) if aside.is_dir() else None
    except OSError:
        return
    if fd is None:
        return
    try:
        for folder in aside.iterdir():
            if time.monotonic() > end:
                break
            try:
                remove_tree(folder, end - time.monotonic())
            except OSError:
                pass  # `clawgym doctor` lists it
    finally:
        os.close(fd)
