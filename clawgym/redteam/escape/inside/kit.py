"""Shared code of the probes in the sandbox: registry, verdicts, raw system calls, entry point."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import signal
import sys

PROBES = {}
"""Id -> (function, what it tries, whether it is harmless without a sandbox)."""
BLOCKED, OPEN, SKIPPED = "blocked", "open", "skipped"

# x86_64, aarch64; None where the architecture has no such call.
CALLS = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "adjtimex": (159, 171),
    "bpf": (321, 280),
    "capget": (125, 90),
    "chroot": (161, 51),
    "clock_settime": (227, 112),
    "clone": (56, 220),
    "clone3": (435, 435),
    "delete_module": (176, 106),
    "finit_module": (313, 273),
    "fsopen": (430, 430),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioperm": (173, None),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pidfd_getfd": (438, 438),
    "pidfd_open": (434, 434),
    "pivot_root": (155, 41),
    "process_vm_readv": (310, 270),
    "ptrace": (101, 117),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "shmat": (30, 196),
    "shmget": (29, 194),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
}
REFUSED = ("EPERM", "EACCES", "ENOSYS", "EROFS")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def probe(name, tries, bare=True):
    """Register a function ``(bait) -> (verdict, evidence)``. ``bare``: whether it is harmless without a sandbox."""

    def register(function):
        PROBES[name] = (function, tries, bare)
        return function

    return register


def blocked(evidence):
    return BLOCKED, evidence


def opened(evidence):
    return OPEN, evidence


def skipped(why):
    return SKIPPED, why


def error_name(error):
    """The name of an OSError or error number, such as ``EPERM``."""
    number = error.errno if isinstance(error, OSError) else error
    return errno.errorcode.get(number or 0, str(error))


def call(name, *arguments):
    """Make a raw system call. Returns (result, error name or None); ENOSYS if the architecture lacks the call."""
    machine = {"x86_64": 0, "aarch64": 1}.get(platform.machine())
    number = None if machine is None else CALLS[name][machine]
    if number is None:
        return -1, "ENOSYS"
    words = [a if isinstance(a, (bytes, ctypes.Array)) or a is None else ctypes.c_long(a) for a in arguments]
    ctypes.set_errno(0)
    result = _libc.syscall(ctypes.c_long(number), *words)
    return result, (error_name(ctypes.get_errno()) if result == -1 else None)


def reach(name, *arguments, refused=REFUSED):
    """Answer whether a system call gets past the permission check."""
    _, error = call(name, *arguments)
    if error in refused:
        return blocked(f"{name}: {error}")
    return opened(f"{name} succeeded" if error is None else f"{name}: {error}, it reached the argument checks")


def worst(answers):
    """Combine answers: the first open one, else blocked with the evidence of all."""
    answers = list(answers)
    for verdict, evidence in answers:
        if verdict == OPEN:
            return opened(evidence)
    texts = list(dict.fromkeys(evidence for _, evidence in answers))
    return blocked("; ".join(texts[:4]) + (f"; and {len(texts) - 4} more" if len(texts) > 4 else ""))


def in_child(function):
    """Run ``function()`` in a forked child, to contain its side effects. A killed child counts as blocked."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        try:
            answer = function()
        except OSError as error:
            answer = blocked(error_name(error))
        except (ValueError, MemoryError) as error:  # raised by Python at a limit
            answer = blocked(str(error) or type(error).__name__)
        os.write(writer, json.dumps(answer).encode()[:4000])
        os._exit(0)
    os.close(writer)
    data = b""
    while True:
        chunk = os.read(reader, 4096)
        if not chunk:
            break
        data += chunk
    os.close(reader)
    _, status = os.waitpid(pid, 0)
    if not data:
        return blocked(f"killed by {signal.Signals(status & 127).name}" if status & 127 else "ended without a word")
    verdict, evidence = json.loads(data)
    return verdict, evidence


def read(path, limit=4096):
    """The beginning of a file."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        return os.read(fd, limit)
    finally:
        os.close(fd)


def can_open(path, flags):
    """Answer whether ``path`` can be opened, without reading or writing."""
    try:
        os.close(os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY))
    except OSError as error:
        return blocked(f"{path}: {error_name(error)}")
    return opened(f"{path} can be opened {'for writing' if flags & os.O_WRONLY else 'for reading'}")


def processes():
    """The pids in /proc; empty without /proc."""
    try:
        return sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
    except OSError:
        return []


def main():
    """Run one probe. Arguments: MODULE and ID; stdin: the bait as JSON; last line of stdout: the answer as JSON."""
    import importlib

    module, name = sys.argv[1:3]
    importlib.import_module(f"inside.{module}")
    try:
        answer = PROBES[name][0](json.load(sys.stdin))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        answer = blocked(f"{where}{error_name(error)}")
    print("\n" + json.dumps(answer), flush=True)
