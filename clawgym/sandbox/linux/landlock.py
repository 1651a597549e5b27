"""Landlock (Linux 5.13): a process restricts itself and its children in files, TCP, signals and sockets.

Numbers and structures are those of linux/landlock.h. Standard library only, with few imports.
"""

from __future__ import annotations

import errno
import struct

from clawgym.sandbox.linux import syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["FILE", "FOLDER", "Ruleset", "abi"]

# The same numbers on every architecture.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION = 1
_PATH_BENEATH = 1
_WRITE_FILE, _READ_FILE, _READ_DIR, _IOCTL_DEV = 1 << 1, 1 << 2, 1 << 3, 1 << 15
FILE = _READ_FILE | _WRITE_FILE | _IOCTL_DEV
FOLDER = FILE | _READ_DIR
# How many file rights each version knows: 13, then REFER, TRUNCATE, nothing new, IOCTL_DEV.
_RIGHTS = (0, 13, 14, 15, 15, 16)
_TCP, _SCOPES = 0b11, 0b11  # bind and connect (version 4); abstract unix sockets and signals (version 6)


def abi() -> int:
    """The Landlock version of this kernel; 0 if there is none or it may not be used."""
    try:
        return syscalls.syscall("landlock", _CREATE_RULESET, 0, 0, _VERSION)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
            return 0
        raise


class Ruleset:
    """Denies all that no rule allows. Without Landlock in the kernel it allows everything."""

    def __init__(self, rules: Iterable[tuple[int, int | None]]) -> None:
        """``rules``: (descriptor of a file or folder, rights to it and everything below; None for all rights)."""
        version = abi()
        self._fd: int | None = None
        if not version:
            return
        files = (1 << _RIGHTS[min(version, len(_RIGHTS) - 1)]) - 1
        fields = [files]
        if version >= 4:
            fields.append(_TCP)
        if version >= 6:
            fields.append(_SCOPES)
        attributes = struct.pack(f"={len(fields)}Q", *fields)
        self._fd = syscalls.syscall("landlock_create_ruleset", _CREATE_RULESET, attributes, len(attributes), 0)
        for fd, rights in rules:
            rule = struct.pack("=Qi", files if rights is None else rights & files, fd)
            syscalls.syscall("landlock_add_rule", _ADD_RULE, self._fd, _PATH_BENEATH, rule, 0)

    def restrict(self) -> None:
        """Apply the rules to this process, permanently; needs ``no_new_privs``."""
        if self._fd is not None:
            syscalls.syscall("landlock_restrict_self", _RESTRICT_SELF, self._fd, 0)
