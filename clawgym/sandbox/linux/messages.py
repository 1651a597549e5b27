"""Messages between an owner and its supervisor: JSON and file descriptors over a socket pair. Standard library only."""

from __future__ import annotations

import array
import json
import socket
from typing import Any

__all__ = ["receive", "send"]

_MAX_MESSAGE = 1 << 17


def receive(sock: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Receive one message and its descriptors; the message is None at the end of the stream."""
    data, ancillary, _, _ = sock.recvmsg(_MAX_MESSAGE, socket.CMSG_SPACE(16 * 4))
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    return (json.loads(data) if data else None), list(fds)


def send(sock: socket.socket, message: dict[str, Any], fds: list[int] | None = None, head: bytes = b"") -> None:
    """Send one message with descriptors, preceded by the bytes ``head``."""
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([head, json.dumps(message).encode()], ancillary)
