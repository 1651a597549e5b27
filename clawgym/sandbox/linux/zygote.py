"""The process that boxes are cloned from: small, idle, and ignorant.

Forked from the supervisor before that one has read or imported anything but what a box needs. All it ever does is to
take a message and clone itself; the child, whose parent is the supervisor, reads the message. So boxes share their
memory with it (a page that the parent changes between two forks is a page that each child has for itself), and no
box's memory holds another one's plan. Standard library only, and of that as little as possible.
"""

from __future__ import annotations

# The C halves, for the reasons above.
import _signal as signal  # pyright: ignore[reportMissingImports]
import gc
import os
import struct
from _socket import AF_UNIX, CMSG_SPACE, SOCK_SEQPACKET, socket

from clawgym.sandbox.chroot import jail
from clawgym.sandbox.inside import guest
from clawgym.sandbox.linux import syscalls
from clawgym.sandbox.namespace import unshare

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["FDS", "FLAGS", "fork"]

FDS = ("born", "control", "errors", "userns", "network", "blob")
"""Descriptors of a message; ``plan['fds']`` names those that are there, in their order. The child's pid, as seen from
here, goes to the first."""
FLAGS = struct.Struct("=I")
"""What a message begins with: the flags of clone(2) for the child."""
_MAX_MESSAGE = 1 << 17
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the end of the supervisor is the only end


def fork(filters: dict[str, bytes]) -> tuple[int, int]:
    """Start the process; ``filters`` holds the filter of each kind of box.

    Returns the socket to send plans over, and the write end of the lifeline: when every copy of that is closed, each
    box ends itself.
    """
    ours, theirs = _pair()
    lifeline, alive = os.pipe()
    pid = os.fork()
    if pid:
        os.close(theirs)
        os.close(lifeline)
        return ours, alive
    try:
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
            if kill is not None:  # a box that is frozen cannot see for itself that its supervisor has gone
                os.write(kill, b"1")
            return
        if size == FLAGS.size:  # not a box, but the file that kills them all
            kill = fds[0]
            continue
        try:
            pid = syscalls.clone(FLAGS.unpack_from(buffer)[0] | syscalls.CLONE_PARENT)
        except OSError as error:
            os.write(fds[2], f"clone: {error.strerror}".encode())
        else:
            if pid == 0:
                _become_box(buffer[FLAGS.size : size], fds, filters)
            os.write(fds[0], struct.pack("i", pid))
        for fd in fds:
            os.close(fd)


def _become_box(message: bytearray, received: list[int], filters: dict[str, bytes]) -> None:
    """In the forked child: it lives, and ends, as process 1 of a box."""
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
        # From here on nobody in the box can trace this process, or read its memory or its descriptors.
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
        syscalls.filter_syscalls(filters[plan["kind"]])
        guest.main(plan["guest"], range(4, 4 + len(gifts)), 3)
    except BaseException as error:
        name = getattr(error, "filename", None) or ""
        os.write(2, f"{getattr(error, 'strerror', None) or error} {name}".strip().encode())
    finally:
        jail.kill_programs()
        os._exit(0)
