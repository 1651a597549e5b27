"""The seccomp filter of namespace and chroot sandboxes, assembled here without libseccomp.

It allows by default. It denies calls that reach beyond the sandbox's namespaces or widen the attack surface of the
kernel: AF_VSOCK (reaches the hypervisor, ignores network namespaces), io_uring, new user namespaces, TIOCSTI, bpf,
perf, keyrings, kernel modules, mounts and related calls. Denied calls return EPERM. clone3 returns ENOSYS, so that the
C library falls back to clone, whose flags a filter can see.

Of sockets it allows unix sockets, and TCP and UDP over IPv4 and IPv6. It denies all other protocols (MPTCP, UDP-Lite,
SCTP, ...), for which the kernel might load a module, with socketpair(2) too, and turning a TCP socket into one
(TCP_ULP: kernel TLS, SMC).

Format: struct sock_filter of linux/filter.h; return values of linux/seccomp.h.
"""

from __future__ import annotations

import os
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["DENIED", "USERS", "docker_profile", "program"]

_LD_W_ABS, _JEQ, _JSET, _JGE, _RET, _AND = 0x20, 0x15, 0x45, 0x35, 0x06, 0x54
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_EPERM, _ENOSYS, _ENOPROTOOPT, _EPROTONOSUPPORT, _EAFNOSUPPORT = 1, 38, 92, 93, 97
_NR, _ARCH, _ARG0, _ARG1, _ARG2 = 0, 4, 16, 24, 32  # arguments: their low halves
_CLONE_NEWUSER = 0x10000000

# name: (x86_64, aarch64); None where the architecture has no such call.
DENIED: dict[str, tuple[int | None, int | None]] = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "adjtimex": (159, 171),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "create_module": (174, None),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "get_kernel_syms": (177, None),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioperm": (173, None),
    "iopl": (172, None),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "lookup_dcookie": (212, 18),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "move_pages": (279, 239),
    "name_to_handle_at": (303, 264),
    "nfsservctl": (180, 42),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pivot_root": (155, 41),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "vhangup": (153, 58),
    "_sysctl": (156, None),
}
# A sandbox without an IPC namespace of its own would share these with the whole machine.
SHARED: dict[str, tuple[int, int]] = {
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "msgctl": (71, 187),
    "msgget": (68, 186),
    "msgrcv": (70, 188),
    "msgsnd": (69, 189),
    "semctl": (66, 191),
    "semget": (64, 190),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "shmget": (29, 194),
}
USERS: dict[str, tuple[int | None, int | None]] = {
    "capset": (126, 91),
    "chown": (92, None),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "lchown": (94, None),
    "setfsgid": (123, 152),
    "setfsuid": (122, 151),
    "setgid": (106, 144),
    "setgroups": (116, 159),
    "setregid": (114, 143),
    "setresgid": (119, 149),
    "setresuid": (117, 147),
    "setreuid": (113, 145),
    "setuid": (105, 146),
}
"""Calls that change users and owners."""
_SPECIAL = {
    "clone": (56, 220),
    "clone3": (435, 435),
    "ioctl": (16, 29),
    "setsockopt": (54, 208),
    "socket": (41, 198),
    "socketpair": (53, 199),
}
_TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX
# Sandboxes need no other families (netlink, packet, alg, vsock, bluetooth, ...).
_UNIX, _INET, _INET6 = 1, 2, 10
_TYPE_MASK = 0xF  # without SOCK_CLOEXEC and SOCK_NONBLOCK
_TYPES = (1, 2)  # SOCK_STREAM, SOCK_DGRAM; raw sockets need a capability anyway
_PROTOCOLS = (0, 6, 17)  # the default of the type, TCP, UDP
_IPPROTO_TCP, _TCP_ULP = 6, 31
_ARCHES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def program(machine: str | None = None, *, shared: bool = False, one_user: bool = False) -> bytes:
    """The filter as bytes (an array of struct sock_filter).

    Args:
        machine: ``x86_64`` or ``aarch64``; by default this machine's.
        shared: for a sandbox without network and IPC namespaces of its own: deny internet sockets, System V IPC and
            message queues too.
        one_user: calls that change users and owners do nothing, and return success. A user namespace with one user
            would refuse them, and with them most packages.

    Raises:
        KeyError: there is no table for the architecture.
    """
    column, audit_arch = _ARCHES[machine or os.uname().machine]
    denied = {**DENIED, **SHARED} if shared else DENIED
    out: list[tuple[int, int, int, int]] = []

    def emit(code: int, k: int, jt: int = 0, jf: int = 0) -> None:
        out.append((code, jt, jf, k))

    emit(_LD_W_ABS, _ARCH)
    emit(_JEQ, audit_arch, 1, 0)
    emit(_RET, _KILL)  # a 32-bit or otherwise foreign call table
    emit(_LD_W_ABS, _NR)
    if column == 0:
        emit(_JGE, 0x40000000, 0, 1)  # the x32 table
        emit(_RET, _ERRNO | _ENOSYS)
    for numbers in denied.values():
        number = numbers[column]
        if number is not None:
            emit(_JEQ, number, 0, 1)
            emit(_RET, _ERRNO | _EPERM)
    for numbers in USERS.values() if one_user else ():
        number = numbers[column]
        if number is not None:
            emit(_JEQ, number, 0, 1)
            emit(_RET, _ERRNO)
    emit(_JEQ, _SPECIAL["clone3"][column], 0, 1)
    emit(_RET, _ERRNO | _ENOSYS)
    emit(_JEQ, _SPECIAL["clone"][column], 0, 4)
    emit(_LD_W_ABS, _ARG0)
    emit(_JSET, _CLONE_NEWUSER, 0, 1)
    emit(_RET, _ERRNO | _EPERM)
    emit(_RET, _ALLOW)
    emit(_JEQ, _SPECIAL["ioctl"][column], 0, 5)
    emit(_LD_W_ABS, _ARG1)
    emit(_JEQ, _TERMINAL_INPUT[0], 1, 0)
    emit(_JEQ, _TERMINAL_INPUT[1], 0, 1)
    emit(_RET, _ERRNO | _EPERM)
    emit(_RET, _ALLOW)
    emit(_JEQ, _SPECIAL["socketpair"][column], 0, 4)
    emit(_LD_W_ABS, _ARG0)
    emit(_JEQ, _UNIX, 1, 0)
    emit(_RET, _ERRNO | _EAFNOSUPPORT)
    emit(_RET, _ALLOW)
    emit(_JEQ, _SPECIAL["setsockopt"][column], 0, 6)
    emit(_LD_W_ABS, _ARG1)
    emit(_JEQ, _IPPROTO_TCP, 0, 3)
    emit(_LD_W_ABS, _ARG2)
    emit(_JEQ, _TCP_ULP, 0, 1)
    emit(_RET, _ERRNO | _ENOPROTOOPT)
    emit(_RET, _ALLOW)
    emit(_JEQ, _SPECIAL["socket"][column], 1, 0)
    emit(_RET, _ALLOW)
    emit(_LD_W_ABS, _ARG0)
    emit(_JEQ, _UNIX, 0, 1)
    emit(_RET, _ALLOW)
    if not shared:
        emit(_JEQ, _INET, 2, 0)
        emit(_JEQ, _INET6, 1, 0)
    emit(_RET, _ERRNO | _EAFNOSUPPORT)
    emit(_LD_W_ABS, _ARG1)
    emit(_AND, _TYPE_MASK)
    emit(_JEQ, _TYPES[0], 2, 0)
    emit(_JEQ, _TYPES[1], 1, 0)
    emit(_RET, _ERRNO | _EPERM)
    emit(_LD_W_ABS, _ARG2)
    for index, protocol in enumerate(_PROTOCOLS):
        emit(_JEQ, protocol, len(_PROTOCOLS) - index, 0)
    emit(_RET, _ERRNO | _EPROTONOSUPPORT)
    emit(_RET, _ALLOW)
    return b"".join(struct.pack("=HBBI", code, jt, jf, k) for code, jt, jf, k in out)


def docker_profile() -> str:
    """The same filter as a Docker seccomp profile.

    Docker cannot add to its built-in profile, only replace it. Allowing by default loses little: what the built-in
    profile denies beyond this filter needs a capability, and a sandbox has none. What this filter denies beyond the
    built-in profile (io_uring, vsock, new user namespaces, TIOCSTI) is why it is needed.
    """
    import json

    deny, missing = {"action": "SCMP_ACT_ERRNO", "errnoRet": 1}, {"action": "SCMP_ACT_ERRNO", "errnoRet": 38}

    def masked(index: int, mask: int, value: int) -> dict[str, Any]:
        return {"index": index, "value": mask, "valueTwo": value, "op": "SCMP_CMP_MASKED_EQ"}

    rules: list[dict[str, Any]] = [{"names": sorted(DENIED), **deny}, {"names": ["clone3"], **missing}]
    rules.append({"names": ["clone"], **deny, "args": [masked(0, _CLONE_NEWUSER, _CLONE_NEWUSER)]})
    rules += [{"names": ["ioctl"], **deny, "args": [masked(1, 0xFFFFFFFF, c)]} for c in _TERMINAL_INPUT]
    ulp = {"names": ["setsockopt"], "action": "SCMP_ACT_ERRNO", "errnoRet": _ENOPROTOOPT}
    rules.append({**ulp, "args": [masked(1, 0xFFFFFFFF, _IPPROTO_TCP), masked(2, 0xFFFFFFFF, _TCP_ULP)]})

    def only(call: str, index: int, allowed: tuple[int, ...], number: int, *others: dict[str, Any]) -> None:
        """Deny every value of an argument except ``allowed``: with a default of allow there is no "not in"."""
        refused: dict[str, Any] = {"names": [call], "action": "SCMP_ACT_ERRNO", "errnoRet": number}
        for value in sorted(set(range(max(allowed))) - set(allowed)):
            rules.append({**refused, "args": [*others, masked(index, 0xFFFFFFFF, value)]})
        above = {"index": index, "value": max(allowed), "op": "SCMP_CMP_GT"}
        rules.append({**refused, "args": [*others, above]})

    only("socketpair", 0, (_UNIX,), _EAFNOSUPPORT)
    only("socket", 0, (_UNIX, _INET, _INET6), _EAFNOSUPPORT)
    for family in (_INET, _INET6):
        internet = masked(0, 0xFFFFFFFF, family)
        for kind in range(_TYPE_MASK + 1):
            of_kind = internet, masked(1, _TYPE_MASK, kind)
            if kind in _TYPES:
                only("socket", 2, _PROTOCOLS, _EPROTONOSUPPORT, *of_kind)
            else:
                rules.append({"names": ["socket"], **deny, "args": [*of_kind]})
    # Only the machine's native call table: a rule for these numbers does not apply to the 32-bit table.
    return json.dumps({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": rules})
