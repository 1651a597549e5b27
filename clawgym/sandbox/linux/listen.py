"""Sockets of the host in the network of a sandbox: a socket belongs to the network namespace it was made in."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import threading
import time
from collections.abc import Callable

from clawgym.errors import SandboxError
from clawgym.sandbox.linux import syscalls

__all__ = [
    "at_path",
    "sandbox_path_of",
    "check_port",
    "checked",
    "connect",
    "connect_path",
    "fresh",
    "in_network",
    "listening",
    "path_of",
    "refused",
]

_BACKLOG = 1024
_PATIENCE = 5.0
"""Seconds to wait until a program of the sandbox accepts a connection."""


def check_port(port: int) -> None:
    """Raise :class:`SandboxError` for a port that a program without privileges cannot use."""
    if type(port) is not int or not 1024 <= port <= 65535:
        raise SandboxError(f"port {port!r}: choose a whole number from 1024 to 65535")


def refused(port: int, why: object) -> SandboxError:
    """The error for a port that cannot be listened on."""
    return SandboxError(f"port {port} cannot be listened on in the sandbox ({why}): choose another one")


def checked(fd: int, port: int) -> socket.socket:
    """Check a descriptor that came from a sandbox.

    Args:
        fd: the descriptor; closed if it is refused.
        port: a TCP socket that listens at 127.0.0.1:``port`` is expected; for 0 a new TCP socket.

    Raises:
        SandboxError: it is something else.
    """
    try:
        sock = socket.socket(fileno=fd)
    except OSError:
        os.close(fd)
        raise SandboxError("the sandbox sent something else than a socket: create another sandbox") from None
    try:
        listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        kind = sock.family, sock.type, sock.proto, bool(listens), sock.getsockname()
        at = "127.0.0.1" if port else "0.0.0.0"
        fits = kind == (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, bool(port), (at, port))
    except OSError:
        fits = False
    if not fits:
        sock.close()
        raise SandboxError("the sandbox sent another socket than requested: create another sandbox")
    sock.setblocking(False)
    return sock


def listening(port: int) -> socket.socket:
    """A socket that listens in this thread's network namespace. Raises OSError."""
    return socket.create_server(("127.0.0.1", port), backlog=_BACKLOG)


def fresh() -> socket.socket:
    """An unconnected socket of this thread's network namespace."""
    return socket.socket(socket.AF_INET, socket.SOCK_STREAM)


def in_network(network: int, make: Callable[[], socket.socket]) -> socket.socket:
    """Call ``make`` in the network namespace with the descriptor ``network``. Needs root. Raises OSError.

    It runs on a new thread, which alone enters the namespace.
    """
    made: list[socket.socket | OSError] = []

    def work() -> None:
        try:
            syscalls.setns(network, syscalls.CLONE_NEWNET)
            made.append(make())
        except OSError as error:
            made.append(error)

    thread = threading.Thread(target=work, name="clawgym-listen")
    thread.start()
    thread.join()
    if isinstance(made[0], OSError):
        raise made[0]
    made[0].setblocking(False)
    return made[0]


def path_of(port: int) -> str:
    """Path, as seen in a sandbox without a network, of the socket it connects to; the sandbox cannot change the
    folder."""
    return f"/dev/listen-{port}"


def at_path(root: int, port: int) -> socket.socket:
    """Listen at :func:`path_of`, in the root folder with the descriptor ``root``. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        path = f"/proc/self/fd/{root}{path_of(port)}"  # the whole path may be too long for an address
        sock.bind(path)
        os.chmod(path, 0o666)
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


# -- connecting


async def connect(sock: socket.socket, port: int) -> None:
    """Connect a socket of the sandbox's network to ``port`` there. On failure it is closed.

    Raises:
        SandboxError: nothing listens there, or the connection is not accepted in time.
    """
    try:
        async with asyncio.timeout(_PATIENCE):
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        if sock.getsockname() == sock.getpeername():  # the kernel chose the same port for this end
            raise ConnectionRefusedError
    except BaseException as error:
        sock.close()
        if isinstance(error, OSError):  # TimeoutError too
            raise _nobody(port, error) from None
        raise


def _nobody(port: int, error: OSError) -> SandboxError:
    if isinstance(error, TimeoutError | BlockingIOError):
        return SandboxError(
            f"port {port}: the program that listens there in the sandbox takes no connections: try again"
        )
    return SandboxError(f"port {port}: nothing listens there in the sandbox: start the program, and wait until it does")


def sandbox_path_of(port: int) -> str:
    """Path, as seen in a sandbox without a network, where its program listens; the folder belongs to the sandbox."""
    return f"/tmp/port-{port}"


async def connect_path(root: int, port: int) -> socket.socket:
    """Connect to :func:`sandbox_path_of`, in the root folder with the descriptor ``root``.

    The sandbox may change the path at any moment. So the socket is opened without following links, checked, and
    connected to by its descriptor.

    Raises:
        SandboxError: nothing listens there, or the connection is not accepted in time.
    """
    try:
        place = syscalls.open_beneath(root, sandbox_path_of(port).lstrip("/"), os.O_PATH)
    except OSError as error:
        raise _nobody(port, error) from None
    sock = socket.socket(socket.AF_UNIX)
    sock.setblocking(False)
    try:
        if not stat.S_ISSOCK(os.fstat(place).st_mode):
            raise ConnectionRefusedError
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                sock.connect(f"/proc/self/fd/{place}")
                return sock
            except BlockingIOError:  # its queue is full: a unix socket does not wait by itself
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.01)
    except BaseException as error:
        sock.close()
        if isinstance(error, OSError):
            raise _nobody(port, error) from None
        raise
    finally:
        os.close(place)
