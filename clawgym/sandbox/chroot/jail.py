"""In the child that becomes process 1 of a chroot sandbox: everything between fork and the first command.

Processes are kept apart by users instead of namespaces: the sandbox's programs run as a uid of their own. Process 1 has
two uids: its real and saved uid is its own, its effective uid is the sandbox's. So it may signal the programs and owns
their files, and they can neither signal nor trace it.

Standard library only, with few imports; nothing can be imported once the root has changed.
"""

from __future__ import annotations

import _signal as signal  # pyright: ignore[reportMissingImports]
import os
import time

from clawgym.sandbox.linux import landlock, syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["enter", "kill_programs", "processes", "signal_sandbox", "sweep"]

_entered = False


def enter(plan: dict[str, Any], fds: dict[str, int]) -> list[int]:
    """Become process 1 of the sandbox with the root folder ``plan['root']``. Raises OSError.

    Returns:
        Descriptors that only this process holds: the host's /proc, as the sandbox has none, and the host's /dev/ptmx,
        if there is one.
    """
    uid: int = plan["uid"]
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)  # orphans of a command stay below process 1
    root = os.open(plan["root"], os.O_RDONLY | os.O_DIRECTORY)
    _give(root, uid, frozenset(plan["keep"]), plan["sticky"])
    if plan["new"]:
        _name(root, uid)
    held = [os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)]
    rules: list[tuple[int, int | None]] = [(root, None), (held[0], landlock.FOLDER)]
    try:
        held.append(os.open("/dev/ptmx", os.O_PATH))
        terminals = os.open("/dev/pts", os.O_PATH)
        rules += [(held[1], landlock.FILE), (terminals, landlock.FOLDER)]
    except OSError:
        pass  # no terminals here
    ruleset = landlock.Ruleset(rules)
    for capability in range(64):
        try:
            syscalls.prctl(syscalls.PR_CAPBSET_DROP, capability)
        except OSError:
            break  # past the last one that this kernel knows
    os.fchdir(root)
    os.chroot(".")
    os.chdir("/")
    _become(uid, plan["guard"])
    syscalls.drop_capabilities()
    ruleset.restrict()
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)  # while the sandbox is empty: /proc/self must belong to this process
    return held


def _become(uid: int, guard: int) -> None:
    global _entered
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(guard, uid, guard)
    if os.getresuid() != (guard, uid, guard):
        raise OSError(1, "the uid did not change")
    _entered = True


def _give(root: int, uid: int, keep: frozenset[str], sticky: list[str]) -> None:
    """Give the files to the sandbox's uid; nothing runs there yet, so names cannot change meanwhile."""
    for folder, folders, files, fd in os.fwalk(".", dir_fd=root):
        below = folder[2:] + "/" if folder != "." else ""
        for name in [*folders, *files]:
            if below + name in keep:
                if name in folders:
                    folders.remove(name)
            else:
                os.chown(name, uid, uid, dir_fd=fd, follow_symlinks=False)
    for name in sticky:
        os.chown(name or ".", 0, uid, dir_fd=root, follow_symlinks=False)
        os.chmod(name or ".", 0o1775, dir_fd=root)


def _name(root: int, uid: int) -> None:
    for file, line in (("passwd", f"box:x:{uid}:{uid}:box:/root:/bin/bash\n"), ("group", f"box:x:{uid}:\n")):
        fd = os.open(f"etc/{file}", os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW, dir_fd=root)
        os.write(fd, line.encode())
        os.close(fd)


# -- the end


def kill_programs() -> None:
    """In process 1 of a chroot sandbox: kill everything else in it. Does nothing in other processes."""
    if _entered:
        _signal_others(signal.SIGKILL)


def _signal_others(number: int) -> None:
    try:
        os.kill(-1, number)  # atomic: no fork escapes it
    except OSError:
        pass


def signal_sandbox(uid: int, guard: int, number: int) -> None:
    """Send a signal to everything in a sandbox, including process 1. Needs root. Raises OSError."""
    pid = os.fork()
    if pid == 0:
        try:
            _become(uid, guard)
            _signal_others(number)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def sweep(uid: int, guard: int) -> int:
    """Start a process that kills everything in a sandbox until nothing is left. Returns its pid."""
    pid = os.fork()
    if pid == 0:
        try:
            os.closerange(3, 65536)  # including the lifeline, which must not stay open with this process
            _become(uid, guard)
            while True:
                _signal_others(signal.SIGKILL)
                if not processes(uid, uid) and set(processes(guard, guard)) <= {os.getpid()}:
                    break
                time.sleep(0.002)
        finally:
            os._exit(0)
    return pid


def processes(first: int, last: int) -> list[int]:
    """Every live process that runs as a uid from ``first`` to ``last``."""
    found: list[int] = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/status", "rb") as file:
                    status = file.read()
            except OSError:
                continue
            if b"\nState:\tZ" in status:  # ended, but not yet collected by its parent
                continue
            ids = status.partition(b"\nUid:")[2].partition(b"\n")[0].split()
            if ids and first <= int(ids[0]) <= last:  # the real one
                found.append(int(name))
    return found
