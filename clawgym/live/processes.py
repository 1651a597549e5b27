"""What runs in the processes of this user, as reported by :mod:`clawgym.live.registry`."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from clawgym.live.registry import listening

__all__ = ["Processes"]

_SECONDS = 3.0


class Processes:
    """A :class:`~clawgym.live.page.PageSource` for all processes of this user, or for the process ``pid``."""

    def __init__(self, pid: int | None = None) -> None:
        self._pid = pid
        self._pool = ThreadPoolExecutor(16, "clawgym-watch")  # a process that does not answer does not delay the others

    def all(self) -> list[dict[str, Any]]:
        """See :class:`~clawgym.live.page.PageSource`."""
        return [entry for found in self._pool.map(_entries, self._sockets().values()) for entry in found]

    def picture(self, id: str) -> bytes | None:
        """See :class:`~clawgym.live.page.PageSource`."""
        name, _, number = id.partition("/")
        path = self._sockets().get(name)
        return _get(path, f"/picture/{number}") if path is not None and number.isdecimal() else None

    def _sockets(self) -> dict[str, Path]:
        return {path.stem: path for pid, path in listening() if self._pid in (None, pid)}


def _entries(path: Path) -> list[dict[str, Any]]:
    try:
        return [{**entry, "id": f"{path.stem}/{entry['id']}"} for entry in json.loads(_get(path, "/all") or b"[]")]
    except (ValueError, KeyError, TypeError):
        return []


def _get(path: Path, what: str) -> bytes | None:
    try:
        with socket.socket(socket.AF_UNIX) as asked:
            asked.settimeout(_SECONDS)
            asked.connect(str(path))
            asked.sendall(f"GET {what} HTTP/1.0\r\n\r\n".encode())
            with asked.makefile("rb") as answer:
                head, _, body = answer.read().partition(b"\r\n\r\n")
    except OSError:
        return None
    return body if head.split(b"\r\n")[0].endswith(b" 200 OK") else None
