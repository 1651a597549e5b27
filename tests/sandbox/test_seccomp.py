"""The seccomp filter, interpreted as the kernel does: its result for every call, on both architectures.

The numbers of calls are those of the kernel's headers (``asm/unistd_64.h``, ``asm-generic/unistd.h``).
"""

from __future__ import annotations

import errno
import itertools
import socket
import struct
from collections.abc import Callable
from functools import cache

import pytest

from clawgym.sandbox.linux import seccomp

ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
I386, ARM32 = 0x40000003, 0x40000028
# fmt: off
DENIED = {
    "_sysctl": (156, None), "acct": (163, 89), "add_key": (248, 217), "adjtimex": (159, 171), "bpf": (321, 280),
    "chroot": (161, 51), "clock_adjtime": (305, 266), "clock_settime": (227, 112), "create_module": (174, None),
    "delete_module": (176, 106), "fanotify_init": (300, 262), "finit_module": (313, 273),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fsopen": (430, 430), "fspick": (433, 433),
    "get_kernel_syms": (177, None), "init_module": (175, 105), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "io_uring_setup": (425, 425), "ioperm": (173, None), "iopl": (172, None),
    "kcmp": (312, 272), "kexec_file_load": (320, 294), "kexec_load": (246, 104), "keyctl": (250, 219),
    "lookup_dcookie": (212, 18), "mount": (165, 40), "mount_setattr": (442, 442), "move_mount": (429, 429),
    "move_pages": (279, 239), "name_to_handle_at": (303, 264), "nfsservctl": (180, 42),
    "open_by_handle_at": (304, 265), "open_tree": (428, 428), "perf_event_open": (298, 241),
    "personality": (135, 92), "pivot_root": (155, 41), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "quotactl": (179, 60), "quotactl_fd": (443, 443), "reboot": (169, 142),
    "request_key": (249, 218), "setdomainname": (171, 162), "sethostname": (170, 161), "setns": (308, 268),
    "settimeofday": (164, 170), "swapoff": (168, 225), "swapon": (167, 224), "syslog": (103, 116),
    "umount2": (166, 39), "unshare": (272, 97), "userfaultfd": (323, 282), "vhangup": (153, 58),
}
SHARED = {
    "mq_open": (240, 180), "mq_unlink": (241, 181), "msgctl": (71, 187), "msgget": (68, 186),
    "msgrcv": (70, 188), "msgsnd": (69, 189), "semctl": (66, 191), "semget": (64, 190), "semop": (65, 193),
    "semtimedop": (220, 192), "shmat": (30, 196), "shmctl": (31, 195), "shmget": (29, 194),
}
CALLS = {
    "clone": (56, 220), "clone3": (435, 435), "ioctl": (16, 29), "setsockopt": (54, 208), "socket": (41, 198),
    "socketpair": (53, 199),
}
# fmt: on
"""Calls whose arguments decide."""
TIOCSTI, TIOCLINUX, TCP_ULP, NEWUSER = 0x5412, 0x541C, 31, 0x10000000

Ask = Callable[..., int]


@cache
def instructions(code: bytes) -> list[tuple[int, int, int, int]]:
    return list(struct.iter_unpack("=HBBI", code))


def answer(code: bytes, arch: int, number: int, *arguments: int) -> int:
    """What classic BPF returns for a ``struct seccomp_data``."""
    data = struct.pack("=IIQ6Q", number, arch, 0, *(*arguments, *[0] * (6 - len(arguments))))
    program = instructions(code)
    at, held = 0, 0
    while True:
        op, yes, no, k = program[at]
        at += 1
        match op:
            case 0x20:
                (held,) = struct.unpack_from("=I", data, k)
            case 0x54:
                held &= k
            case 0x06:
                return k
            case 0x15:
                at += yes if held == k else no
            case 0x35:
                at += yes if held >= k else no
            case 0x45:
                at += yes if held & k else no
            case _:
                raise AssertionError(f"unknown instruction {op:#x}")


@pytest.fixture(params=itertools.product(MACHINES, (False, True)), ids=lambda p: f"{p[0]}{'-shared' * p[1]}")
def machine(request: pytest.FixtureRequest) -> tuple[str, bool]:
    return request.param


@pytest.fixture
def ask(machine: tuple[str, bool]) -> Ask:
    """The answer to a call by name or number: 0 for yes, else the error."""
    name, shared = machine
    column, arch = MACHINES[name]
    code = seccomp.program(name, shared=shared)

    def call(what: str | int, *arguments: int) -> int:
        number = CALLS[what][column] if isinstance(what, str) else what
        found = answer(code, arch, number, *arguments)
        assert found == ALLOW or found & 0xFFFF0000 == ERRNO, hex(found)
        return 0 if found == ALLOW else found & 0xFFFF

    return call


def test_exactly_the_listed_calls_are_denied(machine: tuple[str, bool], ask: Ask) -> None:
    name, shared = machine
    column = MACHINES[name][0]
    denied = {numbers[column] for numbers in (DENIED | SHARED if shared else DENIED).values()}
    decided = {numbers[column] for numbers in CALLS.values()}
    for number in set(range(600)) - decided:
        assert ask(number) == (errno.EPERM if number in denied else 0), number


def test_foreign_call_tables_are_denied(machine: tuple[str, bool], ask: Ask) -> None:
    name, shared = machine
    code = seccomp.program(name, shared=shared)
    for arch in (I386, ARM32, 0, *(arch for other, (_, arch) in MACHINES.items() if other != name)):
        assert answer(code, arch, 0) == KILL
    for number in (0, 1, 400, 2**30 - 1):
        assert ask(0x40000000 + number) == (errno.ENOSYS if name == "x86_64" else 0)
    assert ask(0x3FFFFFFF) == 0


def test_namespaces_of_users_are_not_made(ask: Ask) -> None:
    assert ask("clone3") == errno.ENOSYS, "the C library takes clone instead, whose flags can be seen"
    for bit in range(32):
        assert ask("clone", 1 << bit) == (errno.EPERM if 1 << bit == NEWUSER else 0)
    assert ask("clone", NEWUSER | 0x11) == errno.EPERM
    assert ask("clone", 0, NEWUSER) == 0
    assert ask("clone", NEWUSER << 32) == 0, "the kernel takes the lower half"


def test_nothing_is_typed_into_a_terminal(ask: Ask) -> None:
    for command in range(0x5400, 0x5500):
        assert ask("ioctl", 0, command) == (errno.EPERM if command in (TIOCSTI, TIOCLINUX) else 0), hex(command)
    assert ask("ioctl", 0, 1 << 32 | TIOCSTI) == errno.EPERM
    assert ask("ioctl", TIOCSTI, 0) == 0


def test_pairs_of_sockets_are_unix_ones(ask: Ask) -> None:
    for family in range(50):
        assert ask("socketpair", family, 1) == (0 if family == socket.AF_UNIX else errno.EAFNOSUPPORT), family


def test_no_tcp_socket_becomes_another_protocol(ask: Ask) -> None:
    for level, option in itertools.product((0, 1, 5, 6, 7, 17, 41, 262, 282), range(64)):
        expected = errno.ENOPROTOOPT if (level, option) == (socket.IPPROTO_TCP, TCP_ULP) else 0
        assert ask("setsockopt", 3, level, option) == expected, (level, option)


def test_sockets_are_unix_tcp_and_udp(machine: tuple[str, bool], ask: Ask) -> None:
    flags = (0, socket.SOCK_NONBLOCK, socket.SOCK_CLOEXEC, socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    families = (*range(20), 38, 40, 43, 44, 45, 1 << 16)
    for family, kind, protocol, more in itertools.product(families, range(7), (*range(20), 132, 136, 262), flags):
        expected = 0
        if family != socket.AF_UNIX:
            if machine[1] or family not in (socket.AF_INET, socket.AF_INET6):
                expected = errno.EAFNOSUPPORT
            elif kind not in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
                expected = errno.EPERM
            elif protocol not in (0, socket.IPPROTO_TCP, socket.IPPROTO_UDP):
                expected = errno.EPROTONOSUPPORT
        assert ask("socket", family, kind | more, protocol) == expected, (family, kind | more, protocol)


def test_a_machine_without_a_table_is_refused() -> None:
    with pytest.raises(KeyError):
        seccomp.program("riscv64")
