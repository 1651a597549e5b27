"""The host's sockets inside a box, that listen there or connect: a socket belongs to the network it was made in."""

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
    "box_path_of",
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
"""Seconds until a program of the box has to have taken a connection."""


def check_port(port: int) -> None:
    """Raises :class:`SandboxError` for what no program without privileges could listen on."""
    if type(port) is not int or not 1024 <= port <= 65535:
        raise SandboxError(f"port {port!r}: choose a whole number from 1024 to 65535")


def refused(port: int, why: object) -> SandboxError:
    """The error for a port that cannot be had."""
    return SandboxError(f"port {port} cannot be listened on in the box ({why}): choose another one")


def checked(fd: int, port: int) -> socket.socket:
    """``fd``, which came out of a box, as the socket that was asked for: one that listens at ``port``, or, for 0, a new
    one. Raises :class:`SandboxError`."""
    try:
        sock = socket.socket(fileno=fd)
    except OSError:
        os.close(fd)
        raise SandboxError("the box gave something else for a socket: create another one") from None
    try:
        listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        kind = sock.family, sock.type, sock.proto, bool(listens), sock.getsockname()
        at = "127.0.0.1" if port else "0.0.0.0"
        fits = kind == (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, bool(port), (at, port))
    except OSError:
        fits = False
    if not fits:
        sock.close()
        raise SandboxError("the box gave another socket than was asked for: create another box")
    sock.setblocking(False)
    return sock


def listening(port: int) -> socket.socket:
    """A socket that listens in the network of the thread. Raises OSError."""
    return socket.create_server(("127.0.0.1", port), backlog=_BACKLOG)


def fresh() -> socket.socket:
    """A socket to connect from the network of the thread."""
    return socket.socket(socket.AF_INET, socket.SOCK_STREAM)


def in_network(network: int, make: Callable[[], socket.socket]) -> socket.socket:
    """What ``make`` makes in the network namespace that the descriptor ``network`` names. Needs root. Raises OSError.

    Made on a thread of its own, which alone enters the namespace, and ends."""
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
    """Where a box without a network finds the socket, as it sees it: in a folder that it cannot change."""
    return f"/dev/listen-{port}"


def at_path(root: int, port: int) -> socket.socket:
    """A unix socket at :func:`path_of` below the folder behind the descriptor ``root``. Raises OSError."""
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
    """Connect a socket of the box's network to ``port`` there. Raises :class:`SandboxError`; then it is closed."""
    try:
        async with asyncio.timeout(_PATIENCE):
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        if sock.getsockname() == sock.getpeername():  # the kernel chose this very port to connect from
            raise ConnectionRefusedError
    except BaseException as error:
        sock.close()
        if isinstance(error, OSError):  # TimeoutError too
            raise _nobody(port, error) from None
        raise


def _nobody(port: int, error: OSError) -> SandboxError:
    if isinstance(error, TimeoutError | BlockingIOError):
        return SandboxError(f"port {port}: the program that listens there in the box takes no connections: try again")
    return SandboxError(f"port {port}: nothing listens there in the box: start the program, and wait until it does")


def box_path_of(port: int) -> str:
    """Where a program of a box without a network listens, as it sees it: in a folder that is its own."""
    return f"/tmp/port-{port}"


async def connect_path(root: int, port: int) -> socket.socket:
    """Connect to :func:`box_path_of` below the folder behind the descriptor ``root``. Raises :class:`SandboxError`.

    Names in there are the box's to change at any moment: the socket itself is opened, without following any link on the
    way, looked at, and then connected to by its descriptor.
    """
    try:
        place = syscalls.open_beneath(root, box_path_of(port).lstrip("/"), os.O_PATH)
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
            except BlockingIOError:  # its queue is full; unlike a TCP socket this one does not wait by itself
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
