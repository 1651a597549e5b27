"""Rows 17-22: system calls that widen the attack surface of the kernel or change settings of the whole machine.

A refused call returns EPERM or ENOSYS; a call that is let through fails because of its arguments.
"""

from __future__ import annotations

import ctypes
import os
import resource

from .kit import blocked, call, error_name, in_child, opened, probe, reach, worst

_NEWNS, _NEWUSER = 0x00020000, 0x10000000
_NOWHERE = b"/no-such-folder/clawgym"


def _in_new_user(then):
    def work():
        _, error = call("unshare", _NEWUSER)
        return blocked(f"unshare: {error}") if error else then()

    return in_child(work)


@probe("17a", "a new user namespace by unshare")
def unshare_user(bait):
    return _in_new_user(lambda: opened("unshare(CLONE_NEWUSER) succeeded"))


@probe("17b", "a new user namespace by clone")
def clone_user(bait):
    def work():
        result, error = call("clone", _NEWUSER | 17, 0, 0, 0, 0)
        if error:
            return blocked(f"clone: {error}")
        if result == 0:
            os._exit(0)
        os.waitpid(result, 0)
        return opened("clone(CLONE_NEWUSER) succeeded")

    return in_child(work)


@probe("17c", "a new user namespace by clone3 (whose flags no filter can see)")
def clone3_user(bait):
    def work():
        arguments = (ctypes.c_uint64 * 8)(_NEWUSER, 0, 0, 0, 17, 0, 0, 0)
        result, error = call("clone3", arguments, 64)
        if error:
            return blocked(f"clone3: {error}")
        if result == 0:
            os._exit(0)
        os.waitpid(result, 0)
        return opened("clone3(CLONE_NEWUSER) succeeded")

    return in_child(work)


@probe("17d", "mount something in a new user namespace")
def mount_in_user(bait):
    def mount():
        _, error = call("unshare", _NEWNS)
        if error:
            return blocked(f"unshare(CLONE_NEWNS): {error}")
        return reach("mount", b"none", b"/", b"clawgym-no-such-type", 0, None)

    return _in_new_user(mount)


@probe("17e", "another new namespace without a user namespace (mount, pid, network, ipc, uts, cgroup, time)")
def unshare_others(bait):
    def tried(flag):
        def work():
            _, error = call("unshare", flag)
            return blocked(f"unshare: {error}") if error else opened(f"unshare({flag:#x}) succeeded")

        return in_child(work)

    return worst(tried(flag) for flag in (_NEWNS, 0x20000000, 0x40000000, 0x08000000, 0x04000000, 0x02000000, 0x80))


@probe("18a", "bpf")
def bpf(bait):
    return reach("bpf", 9999, None, 0)


@probe("18b", "perf_event_open")
def perf(bait):
    return reach("perf_event_open", None, 0, -1, -1, 0)


@probe("18c", "userfaultfd")
def userfault(bait):
    return reach("userfaultfd", 0x40000000)


@probe("19a", "io_uring_setup")
def uring(bait):
    return reach("io_uring_setup", 1, None)


@probe("19b", "io_uring_enter and io_uring_register")
def uring_others(bait):
    return worst([reach("io_uring_enter", -1, 0, 0, 0, None, 0), reach("io_uring_register", -1, 0, None, 0)])


@probe("20a", "keyctl")
def keyctl(bait):
    return reach("keyctl", 9999, 0, 0, 0, 0)


@probe("20b", "add_key and request_key")
def keys(bait):
    return worst([reach("add_key", None, None, None, 0, 0), reach("request_key", None, None, None, 0)])


@probe("20c", "personality (a fixed memory layout)")
def personality(bait):
    return in_child(lambda: reach("personality", 0x0040000))


@probe("20d", "clock_settime (an impossible time)")
def clock(bait):
    return reach("clock_settime", 0, (ctypes.c_long * 2)(0, -1))


@probe("20e", "name_to_handle_at")
def name_to_handle(bait):
    return reach("name_to_handle_at", -100, b"/", None, None, 0)


@probe("20f", "adjtimex (an impossible request)")
def adjust_clock(bait):
    return reach("adjtimex", None)


@probe("20g", "a second call table of the processor (32-bit on x86-64), which a filter may not know", bare=False)
def foreign_table(bait):
    return in_child(_int80)


def _int80():
    import mmap
    import platform

    if platform.machine() != "x86_64":
        return blocked("the machine has one call table")
    # mov eax, 20 (getpid of the 32-bit table); int 0x80; ret
    code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")
    address = ctypes.addressof(ctypes.c_char.from_buffer(code))
    answer = ctypes.CFUNCTYPE(ctypes.c_int)(address)()
    if answer == os.getpid():
        return opened("int 0x80 answered")
    return blocked(f"int 0x80: {error_name(-answer)}")


@probe("21a", "swapon (of a file that is not there)")
def swap(bait):
    return reach("swapon", _NOWHERE, 0)


@probe("21b", "read the kernel's log")
def dmesg(bait):
    result, error = call("syslog", 3, ctypes.create_string_buffer(64), 64)
    return blocked(f"syslog: {error}") if error else opened(f"syslog gave {result} bytes")


@probe("21c", "fsopen")
def fsopen(bait):
    return reach("fsopen", None, 0)


@probe("21d", "open_tree (a copy of a mount)")
def open_tree(bait):
    result, error = call("open_tree", -100, b"/", 1)
    if error:
        return blocked(f"open_tree: {error}")
    os.close(result)
    return opened("open_tree(OPEN_TREE_CLONE) succeeded")


@probe("21e", "move_mount and mount_setattr")
def move_mount(bait):
    return worst([reach("move_mount", -1, b"", -1, b"", 0), reach("mount_setattr", -1, b"x", 0, None, 32)])


@probe("21f", "kernel modules: init_module, finit_module, delete_module (nothing to load, an unknown name)", bare=False)
def modules(bait):
    return worst(
        [
            reach("init_module", None, 0, None),
            reach("finit_module", -1, None, 0),
            reach("delete_module", b"clawgym_no_such_module", os.O_NONBLOCK),
        ]
    )


@probe("21g", "kexec_load and reboot (with impossible flags, with the wrong magic)", bare=False)
def kexec(bait):
    answers = [reach("kexec_load", 0, 17, None, 0x8000)]
    answers.append(reach("reboot", 1, 2, 3, None))
    return worst(answers)


@probe("21h", "acct (a file that is not there)", bare=False)
def acct(bait):
    return reach("acct", _NOWHERE)


@probe("21i", "the processor's ports (ioperm, for one child)", bare=False)
def ports(bait):
    return in_child(lambda: reach("ioperm", 0x80, 1, 1))


@probe("22a", "set the host's name (to what it is)", bare=False)
def hostname(bait):
    name = os.uname().nodename.encode()
    return reach("sethostname", name, len(name))


@probe("22b", "set the domain's name (to what it is)", bare=False)
def domainname(bait):
    buffer = ctypes.create_string_buffer(6 * 65)
    ctypes.CDLL(None).uname(buffer)
    name = buffer.raw[5 * 65 :].split(b"\0")[0]
    return reach("setdomainname", name, len(name))


@probe("22c", "a higher priority (nice -5, for one child)")
def nice(bait):
    def work():
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) - 5)
        return opened("nice -5 was granted")

    return in_child(work)


@probe("22d", "real-time scheduling (for one child, which ends)")
def realtime(bait):
    def work():
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        return opened("SCHED_FIFO was granted")

    return in_child(work)


@probe("22e", "raise one's own hard limits (for one child)")
def raise_limits(bait):
    def tried(name):
        kind = getattr(resource, name)

        def work():
            _, hard = resource.getrlimit(kind)
            if hard == resource.RLIM_INFINITY:
                return blocked(f"{name} has no limit to raise")
            resource.setrlimit(kind, (hard + 1, hard + 1))
            return opened(f"{name} was raised above {hard}")

        return in_child(work)

    names = ("RLIMIT_NOFILE", "RLIMIT_NPROC", "RLIMIT_FSIZE", "RLIMIT_DATA", "RLIMIT_CORE", "RLIMIT_AS")
    return worst(tried(name) for name in names)
