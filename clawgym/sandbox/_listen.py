"""Listening sockets of the host's at a port inside a box: a socket belongs to the network it was made in for good."""

from __future__ import annotations

import os
import socket
import threading

from clawgym.errors import SandboxError
from clawgym.sandbox import _linux

__all__ = ["at_path", "check_port", "checked", "in_network", "path_of", "refused"]

_BACKLOG = 1024


def check_port(port: int) -> None:
    """Raises :class:`SandboxError` for what no program without privileges could listen on."""
    if type(port) is not int or not 1024 <= port <= 65535:
        raise SandboxError(f"port {port!r}: choose a whole number from 1024 to 65535")


def refused(port: int, why: object) -> SandboxError:
    """The error for a port that cannot be had."""
    return SandboxError(f"port {port} cannot be listened on in the box ({why}): choose another one")


def checked(fd: int, port: int) -> socket.socket:
    """``fd``, which came out of a box, as the socket that was asked for. Raises :class:`SandboxError`."""
    try:
        sock = socket.socket(fileno=fd)
    except OSError:
        os.close(fd)
        raise SandboxError("the box gave something else for a socket: create another one") from None
    listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if sock.family != socket.AF_INET or not listens or sock.getsockname() != ("127.0.0.1", port):
        sock.close()
        raise SandboxError("the box gave another socket than was asked for: create another box")
    sock.setblocking(False)
    return sock


def in_network(network: int, port: int) -> socket.socket:
    """A socket in the network namespace that the descriptor ``network`` names. Needs root. Raises OSError.

    Made on a thread of its own, which alone enters the namespace, and ends."""
    made: list[socket.socket | OSError] = []

    def make() -> None:
        try:
            _linux.setns(network, _linux.CLONE_NEWNET)
            made.append(socket.create_server(("127.0.0.1", port), backlog=_BACKLOG))
        except OSError as error:
            made.append(error)

    thread = threading.Thread(target=make, name="clawgym-listen")
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
