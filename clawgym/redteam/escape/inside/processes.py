"""Rows 3, 23-27: the host's processes, memory, environment, descriptors and terminals; the sandbox's privileges."""

from __future__ import annotations

import ctypes
import os
import resource

from .kit import blocked, call, error_name, in_child, opened, probe, processes, read, skipped, worst


def _is_bait(pid, bait):
    """Whether ``pid`` is the host's process here too: in a pid namespace it may be another one."""
    try:
        return bait["marker"].encode() in read(f"/proc/{pid}/cmdline", 1 << 16)
    except OSError:
        return not os.path.isdir("/proc/1")  # without /proc it cannot be told apart


def _does(name, *arguments, bait):
    result, error = call(name, *arguments)
    if error is not None:
        return blocked(f"{name}: {error}")
    if name.startswith("pidfd"):
        os.close(result)
    return opened(f"{name} on the host's process") if _is_bait(bait["pid"], bait) else blocked("another process")


@probe("3a", "see a process of the host")
def see(bait):
    if not processes():
        return blocked("no /proc")
    seen = [pid for pid in processes() if _has_marker(pid, bait)]
    return opened(f"its command line is at /proc/{seen[0]}") if seen else blocked(f"{len(processes())} processes, own")


def _has_marker(pid, bait):
    try:
        return bait["marker"].encode() in read(f"/proc/{pid}/cmdline", 1 << 16)
    except OSError:
        return False


@probe("3b", "signal a process of the host (signal 0)")
def signal_zero(bait):
    os.kill(bait["pid"], 0)
    return opened("kill(pid, 0) succeeded") if _is_bait(bait["pid"], bait) else blocked("another process")


@probe("3c", "ptrace a process of the host (seized without a stop, let go at once)")
def ptrace(bait):
    seize = 0x4206

    def attach():
        return _does("ptrace", seize, bait["pid"], 0, 0, bait=bait)  # released when the child ends

    return in_child(attach)


@probe("3d", "read the memory of a process of the host")
def memory(bait):
    # An unmapped address: EFAULT means that permission was granted.
    room = ctypes.create_string_buffer(8)
    local = (ctypes.c_ulong * 2)(ctypes.addressof(room), 8)
    remote = (ctypes.c_ulong * 2)(1, 8)
    _, error = call("process_vm_readv", bait["pid"], local, 1, remote, 1, 0)
    if error == "EFAULT" and _is_bait(bait["pid"], bait):
        return opened("process_vm_readv: EFAULT, it reached the argument checks")
    return blocked(f"process_vm_readv: {error or 'another process'}")


@probe("3e", "take a descriptor out of a process of the host")
def take_descriptor(bait):
    result, error = call("pidfd_open", bait["pid"], 0)
    if error is not None:
        return blocked(f"pidfd_open: {error}")
    try:
        return _does("pidfd_getfd", result, 0, 0, bait=bait)
    finally:
        os.close(result)


@probe("3f", "change the priority or the processors of a process of the host (to what they are)")
def tune(bait):
    pid = bait["pid"]

    def priority():
        os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, pid))

    def processors():
        os.sched_setaffinity(pid, os.sched_getaffinity(pid))

    def limits():
        resource.prlimit(pid, resource.RLIMIT_CORE, resource.prlimit(pid, resource.RLIMIT_CORE))

    def tried(function):
        try:
            function()
        except OSError as error:
            return blocked(f"{function.__name__}: {error_name(error)}")
        return opened(f"{function.__name__} set") if _is_bait(pid, bait) else blocked("another process")

    return worst(tried(function) for function in (priority, processors, limits))


@probe("23a", "no_new_privs is missing")
def no_new_privs(bait):
    libc = ctypes.CDLL(None)
    return blocked("no_new_privs is set") if libc.prctl(39, 0, 0, 0, 0) == 1 else opened("no_new_privs is not set")


@probe("23b", "hold a capability")
def capabilities(bait):
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()
    _, error = call("capget", header, sets)
    if error:
        return skipped(f"capget: {error}")
    effective = sets[0] | sets[3] << 32
    permitted = sets[1] | sets[4] << 32
    libc = ctypes.CDLL(None)
    bounding = sum(1 << n for n in range(64) if libc.prctl(23, n, 0, 0, 0) == 1)
    text = f"effective {effective:x}, permitted {permitted:x}, bounding {bounding:x}"
    return opened(text) if effective | permitted | bounding else blocked(text)


@probe("23d", "become another user")
def become(bait):
    def work():
        for uid in (0, 1, 1000, 65534):
            if uid != os.getuid():
                try:
                    os.setresuid(uid, uid, uid)
                except OSError:
                    continue
                return opened(f"became uid {uid}")
        return blocked(f"uid {os.getuid()} stays it")

    return in_child(work)


@probe("24a", "read a SysV shared memory segment of the host")
def shared_memory(bait):
    segment, error = call("shmget", bait["shm_key"], 0, 0)
    if error:
        return blocked(f"shmget: {error}")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.shmat.restype = ctypes.c_void_p
    address = libc.shmat(segment, None, 0o10000)
    if address in (None, ctypes.c_void_p(-1).value):
        return blocked(f"found, but shmat: {error_name(ctypes.get_errno())}")
    found = ctypes.string_at(address, len(bait["secret"])) == bait["secret"].encode()
    libc.shmdt(ctypes.c_void_p(address))
    return opened("read the host's secret in it") if found else blocked("another segment")


@probe("24b", "read a POSIX shared memory file of the host")
def shared_file(bait):
    data = read(f"/dev/shm/{bait['shm_name']}")
    return opened("read the host's secret in it") if bait["secret"].encode() in data else blocked("another file")


@probe("25a", "find the owner's secret in the environment")
def environment(bait):
    found = any(bait["secret"] in value for value in os.environ.values())
    return opened("inherited") if found else blocked(f"{len(os.environ)} variables, none of the owner's")


@probe("25b", "find it in the environment or the command line of any process")
def environments(bait):
    tried = 0
    for pid in processes():
        for name in ("environ", "cmdline"):
            try:
                data = read(f"/proc/{pid}/{name}", 1 << 20)
            except OSError:
                continue
            tried += 1
            if bait["secret"].encode() in data and pid != os.getpid():
                return opened(f"/proc/{pid}/{name} holds it")
    return blocked(f"not in the {tried} files that can be read" if tried else "none can be read")


def _leads_out(path_or_fd, bait):
    try:
        info = os.stat(path_or_fd)
    except OSError:
        return False
    return [info.st_dev, info.st_ino] in bait["inodes"]


@probe("26a", "find a descriptor that the owner had open")
def descriptors(bait):
    count = 0
    for fd in range(3, 4096):
        try:
            os.fstat(fd)
        except OSError:
            continue
        count += 1
        if _leads_out(fd, bait):
            return opened(f"descriptor {fd} is the owner's")
    return blocked(f"{count} descriptors above 2, none of the owner's")


@probe("26b", "find it in any process that can be looked at")
def others_descriptors(bait):
    count = 0
    for pid in processes():
        try:
            names = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue
        for name in names:
            count += 1
            if _leads_out(f"/proc/{pid}/fd/{name}", bait):
                return opened(f"/proc/{pid}/fd/{name} is the owner's")
    return blocked(f"{count} descriptors, none of the owner's" if count else "none can be looked at")


@probe("27a", "push input into a terminal (TIOCSTI), on one of the sandbox's own")
def push_input(bait):
    return _terminal_ioctl(0x5412, b" ")


@probe("27b", "the virtual console's ioctl (TIOCLINUX), on a terminal of the sandbox's own")
def console_ioctl(bait):
    return _terminal_ioctl(0x541C, b"\x7f")  # a request that no console knows


def _terminal_ioctl(request, argument):
    import fcntl
    import pty

    def push():
        os.setsid()
        _, slave = pty.openpty()
        fcntl.ioctl(slave, 0x540E, 0)  # TIOCSCTTY: it must be one's own for TIOCSTI without a capability
        try:
            fcntl.ioctl(slave, request, argument)
        except OSError as error:
            if error_name(error) in ("EPERM", "EACCES", "EIO"):  # EIO: dev.tty.legacy_tiocsti is 0
                return blocked(f"ioctl: {error_name(error)}")
            return opened(f"ioctl: {error_name(error)}, it reached the terminal")
        return opened("ioctl succeeded")

    return in_child(push)


@probe("27c", "write to a terminal of the host")
def host_terminal(bait):
    answers = []
    for path in (bait["pts"], "/dev/tty"):
        try:
            fd = os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
        except OSError as error:
            answers.append(blocked(f"{path}: {error_name(error)}"))
            continue
        info = os.fstat(fd)
        os.close(fd)
        hosts = path == "/dev/tty" or [info.st_dev, info.st_ino] == bait["pts_inode"]
        answers.append(opened(f"{path} can be written") if hosts else blocked(f"{path} is the sandbox's own"))
    return worst(answers)
