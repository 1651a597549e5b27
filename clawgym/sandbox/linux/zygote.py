"""The zygote: a small, idle process from which sandboxes are cloned.

It is forked from the supervisor before that has read or imported anything but what a sandbox needs. It only receives
messages and clones itself; the child, whose parent is the supervisor, reads the message. So sandboxes share its memory
(a page that the parent changed between two forks would be copied for each child), and no sandbox has the plan of
another one in memory. Standard library only, with as few imports as possible.
"""

from __future__ import annotations

# The C halves: they import less.
import _signal as signal  # pyright: ignore[reportMissingImports]
import gc
import os
import struct
from _socket import AF_UNIX, CMSG_SPACE, SOCK_SEQPACKET, socket

from clawgym.sandbox.chroot import jail
from clawgym.sandbox.inside import guest
from clawgym.sandbox.linux import syscalls, warm
from clawgym.sandbox.namespace import unshare

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["FDS", "FLAGS", "fork"]

FDS = ("born", "control", "errors", "userns", "network", "blob")
"""Descriptors of a message; ``plan['fds']`` names those that are present, in order. The child's pid, as seen here, is
written to the first."""
FLAGS = struct.Struct("=I")
"""Head of each message: the flags of clone(2) for the child."""
_MAX_MESSAGE = 1 << 17
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # it ends only with the supervisor


def fork(filters: dict[str, bytes], *, preloaded: bool = False) -> tuple[int, int]:
    """Start a zygote; ``filters`` has the seccomp filter of each kind of sandbox, and others by name.

    With ``preloaded`` it imports what short Python programs need (``warm.py``), and its sandboxes interpret them.

    Returns:
        The socket to send plans over, and the write end of the lifeline. Every sandbox ends itself once all copies of
        that end are closed.
    """
    ours, theirs = _pair()
    lifeline, alive = os.pipe()
    pid = os.fork()
    if pid:
        os.close(theirs)
        os.close(lifeline)
        return ours, alive
    try:
        if preloaded:
            warm.preload()
            guest.INTERPRETER = warm.interpret
        os.setsid()
        for number in range(1, 32):
            if number not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(number, signal.SIG_IGN if number in _IGNORED else signal.SIG_DFL)
        kept = [os.dup(theirs), os.dup(lifeline)]
        for target, fd in enumerate(kept, 3):
            os.dup2(fd, target, inheritable=False)
        os.closerange(5, 65536)
        syscalls.hide_command_line(b"clawgym-zygote")
        gc.collect()
        gc.freeze()
        gc.disable()
        _serve(socket(AF_UNIX, SOCK_SEQPACKET, 0, fileno=3), filters)
    finally:
        os._exit(0)


def _pair() -> tuple[int, int]:
    from _socket import socketpair

    ours, theirs = socketpair(AF_UNIX, SOCK_SEQPACKET)
    return ours.detach(), theirs.detach()


def _serve(sock: socket, filters: dict[str, bytes]) -> None:
    buffer = bytearray(_MAX_MESSAGE)
    room = CMSG_SPACE(4 * len(FDS))
    kill: int | None = None
    while True:
        size, ancillary, _, _ = sock.recvmsg_into([buffer], room)
        fds = [fd for _, _, data in ancillary for (fd,) in struct.iter_unpack("i", data)]
        if not size:
            if kill is not None:  # a frozen sandbox does not notice that the supervisor has ended
                os.write(kill, b"1")
            return
        if size == FLAGS.size:  # no plan: the ``cgroup.kill`` file of all sandboxes
            kill = fds[0]
            continue
        try:
            pid = syscalls.clone(FLAGS.unpack_from(buffer)[0] | syscalls.CLONE_PARENT)
        except OSError as error:
            os.write(fds[2], f"clone: {error.strerror}".encode())
        else:
            if pid == 0:
                _become_sandbox(bytes(buffer[FLAGS.size : size]), fds, filters)
            os.write(fds[0], struct.pack("i", pid))
        buffer[:size] = bytes(size)  # no other sandbox may have this plan in memory
        for fd in fds:
            os.close(fd)


def _become_sandbox(message: bytes, received: list[int], filters: dict[str, bytes]) -> None:
    """In the forked child: run as process 1 of a sandbox until it ends."""
    try:
        plan: dict[str, Any] = guest.loads(message)
        fds = dict(zip(plan["fds"], received, strict=True))
        os.dup2(fds["errors"], 2)
        os.setsid()
        os.close(fds.pop("born"))
        for number in _IGNORED:
            signal.signal(number, signal.SIG_DFL)
        for path in plan["procs"]:
            syscalls.write_file(path, "0")
        syscalls.hide_command_line(b"box")
        gifts: list[int] = []
        held: list[int] = []
        if plan["kind"] == "chroot":
            held = jail.enter(plan, fds)
        else:
            gifts = unshare.enter(plan, fds)
        for target in (0, 1):
            os.dup2(fds["control"], target)
        kept = [os.dup(fd) for fd in (4, *gifts, *held)]  # 4 is the lifeline
        for target, fd in enumerate(kept, 3):
            os.dup2(fd, target, inheritable=False)
        os.closerange(3 + len(kept), 65536)
        guest.prepare(*range(4 + len(gifts), 3 + len(kept)))
        # From here on no other process in the sandbox can trace this one, or read its memory or its descriptors.
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
        syscalls.filter_syscalls(filters[plan.get("filter", plan["kind"])])
        guest.main(plan["guest"], range(4, 4 + len(gifts)), 3)
    except BaseException as error:
        name = getattr(error, "filename", None) or ""
        os.write(2, f"{getattr(error, 'strerror', None) or error} {name}".strip().encode())
    finally:
        jail.kill_programs()
        os._exit(0)
