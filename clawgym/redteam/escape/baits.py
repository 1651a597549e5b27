"""Baits: files, sockets, processes and secrets that the host lays out for the probes, and removes afterwards.

Nothing in them is of value. Listeners are on loopback, ports are chosen by the kernel, names are random, and the one
process to be signalled is a ``sleep`` of this process, which ends by itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import pty
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["Baits", "lay_baits"]

ENV_NAME = "CLAWGYM_BAIT_TOKEN"


class Baits:
    """The baits of one run; :attr:`known` is passed to the probes in the sandbox."""

    def __init__(self, folder: Path, known: dict[str, Any]) -> None:
        self.folder = folder
        self.known = known

    @property
    def secret(self) -> bytes:
        return self.known["secret"].encode()

    @property
    def path(self) -> str:
        return self.known["path"]


def _serve(sock: socket.socket, answer: bytes) -> None:
    """Send ``answer`` to every client, until the socket is closed."""

    def loop() -> None:
        with contextlib.suppress(OSError):
            while True:
                if sock.type == socket.SOCK_DGRAM:
                    data, sender = sock.recvfrom(100)
                    if not data:  # shut down
                        return
                    with contextlib.suppress(OSError):
                        sock.sendto(answer, sender)
                else:
                    client, _ = sock.accept()
                    with client, contextlib.suppress(OSError):
                        client.sendall(answer)

    threading.Thread(target=loop, daemon=True, name="clawgym-bait").start()


def _listener(stack: contextlib.ExitStack, family: int, kind: int, address: Any, answer: bytes) -> socket.socket:
    sock = socket.socket(family, kind)

    def close() -> None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)  # wakes the thread
        sock.close()

    stack.callback(close)
    sock.bind(address)
    if kind == socket.SOCK_STREAM:
        sock.listen()
    _serve(sock, answer)
    return sock


def _handle_of(path: Path) -> str:
    """The file handle of ``path`` as hex (struct file_handle), or ''."""
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(8 + 128)
    ctypes.c_uint.from_buffer(buffer).value = 128
    if libc.name_to_handle_at(-100, os.fsencode(path), buffer, ctypes.byref(ctypes.c_int()), 0) != 0:
        return ""
    return buffer.raw[: 8 + ctypes.c_uint.from_buffer(buffer).value].hex()


def _shared_memory(stack: contextlib.ExitStack, secret: bytes) -> int:
    """Make a SysV segment that everybody may read. Returns its key, or 0 if that fails."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.shmat.restype = ctypes.c_void_p
    key = secrets.randbelow(0x7FFFFFFE) + 1
    segment = libc.shmget(key, 4096, 0o1000 | 0o2000 | 0o666)  # IPC_CREAT | IPC_EXCL
    if segment < 0:
        return 0
    stack.callback(libc.shmctl, segment, 0, None)  # IPC_RMID
    address = libc.shmat(segment, None, 0)
    ctypes.memmove(ctypes.c_void_p(address), secret, len(secret))
    stack.callback(libc.shmdt, ctypes.c_void_p(address))
    return key


def _terminal(stack: contextlib.ExitStack) -> tuple[str, list[int]]:
    try:
        master, slave = pty.openpty()
    except OSError:
        return "/dev/pts/none", [0, 0]
    stack.callback(os.close, master)
    stack.callback(os.close, slave)
    os.set_inheritable(slave, True)
    info = os.fstat(slave)
    return os.ttyname(slave), [info.st_dev, info.st_ino]


def _digests() -> dict[str, str]:
    found: dict[str, str] = {}
    for path in ("/etc/passwd", "/etc/shadow", "/etc/machine-id"):
        with contextlib.suppress(OSError):
            found[path] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return found


@contextlib.contextmanager
def lay_baits() -> Iterator[Baits]:
    """Lay the baits, before a backend starts anything, and remove them at the end. Linux only."""
    secret = f"clawgym-secret-{secrets.token_hex(16)}"
    token = secrets.token_hex(8)
    with contextlib.ExitStack() as stack:
        # In a folder that everybody may read: the sandbox must hide it, not its mode.
        folder = Path(tempfile.mkdtemp(prefix="clawgym-bait-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        folder.chmod(0o777)
        path = folder / "secret"
        path.write_text(secret)
        path.chmod(0o644)
        held = [os.open(path, os.O_RDONLY), os.open(folder, os.O_RDONLY)]
        for fd in held:
            stack.callback(os.close, fd)
            os.set_inheritable(fd, True)

        os.environ[ENV_NAME] = secret
        stack.callback(os.environ.pop, ENV_NAME, None)

        answer = secret.encode()
        tcp = _listener(stack, socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0), answer)
        udp = _listener(stack, socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0), answer)
        try:
            tcp6 = _listener(stack, socket.AF_INET6, socket.SOCK_STREAM, ("::1", 0), answer).getsockname()[1]
        except OSError:
            tcp6 = 0
        _listener(stack, socket.AF_UNIX, socket.SOCK_STREAM, f"\0clawgym-{token}", answer)
        _listener(stack, socket.AF_UNIX, socket.SOCK_DGRAM, f"\0clawgym-{token}-d", answer)
        _listener(stack, socket.AF_UNIX, socket.SOCK_STREAM, str(folder / "socket"), answer)
        (folder / "socket").chmod(0o666)

        shm = Path(f"/dev/shm/clawgym-{token}")
        with contextlib.suppress(OSError):
            shm.write_text(secret)
            stack.callback(shm.unlink, missing_ok=True)
            shm.chmod(0o644)

        marker = f"clawgym-bait-{token}"
        wait = "import sys, time; time.sleep(1800)"
        process = subprocess.Popen([sys.executable, "-I", "-S", "-c", wait, marker], stdin=subprocess.DEVNULL)
        stack.callback(process.wait)
        stack.callback(process.kill)
        command = Path(f"/proc/{process.pid}/cmdline")
        while process.poll() is None and marker.encode() not in command.read_bytes():
            time.sleep(0.001)  # a program that has begun has no command line for a moment
        pts, pts_inode = _terminal(stack)
        known = {
            "secret": secret,
            "path": str(path),
            "inodes": [[os.stat(p).st_dev, os.stat(p).st_ino] for p in (path, folder)],
            "digests": _digests(),
            "handle": _handle_of(path),
            "disk": os.stat("/").st_dev,
            "tcp": tcp.getsockname()[1],
            "tcp6": tcp6,
            "udp": udp.getsockname()[1],
            "abstract": f"clawgym-{token}",
            "abstract_datagram": f"clawgym-{token}-d",
            "unix_path": str(folder / "socket"),
            "shm_key": _shared_memory(stack, answer),
            "shm_name": shm.name,
            "pid": process.pid,
            "marker": marker,
            "pts": pts,
            "pts_inode": pts_inode,
            "owner_uid": os.getuid(),
            "pid_namespace": os.stat("/proc/self/ns/pid").st_ino,
        }
        yield Baits(folder, known)
