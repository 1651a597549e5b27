"""What can be watched in this process, and the unix socket over which other processes of this user ask for it.

Invariants: it costs nothing while nobody asks. The socket is in a folder that only its user can enter. Sockets of dead
processes are removed by the next process that looks. If the socket cannot be made, the process just cannot be watched.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import socket
import stat
import tempfile
import threading
import weakref
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, Protocol

__all__ = ["ThisProcess", "Watched", "add", "drop", "listening"]

_ENDING = ".sock"


class Watched(Protocol):
    """Something that can be watched. Its methods are called on another thread, at any time."""

    def about(self) -> dict[str, Any]:
        """JSON data: ``task``, ``instruction``, ``agent``, ``step``, ``action`` (the last one), ``text`` (its
        observation), and ``picture`` (a number that changes with each screenshot, or None)."""
        ...

    def picture(self) -> bytes | None:
        """The latest screenshot, as a PNG file."""
        ...


_entries: dict[int, weakref.ref[Watched]] = {}
_numbers = count(1)
_thread: threading.Thread | None = None
_socket: socket.socket | None = None
_path: Path | None = None


def add(watched: Watched) -> int:
    """Show ``watched`` until it is garbage-collected, or :func:`drop` is called with the returned number."""
    global _thread
    number = next(_numbers)
    _entries[number] = weakref.ref(watched)
    if _thread is None:
        _thread = threading.Thread(target=_serve, name="clawgym-live", daemon=True)
        _thread.start()
    return number


def drop(number: int) -> None:
    """Undo :func:`add`. Idempotent."""
    _entries.pop(number, None)


class ThisProcess:
    """A :class:`~clawgym.live.page.PageSource` for this process."""

    def all(self) -> list[dict[str, Any]]:
        """See :class:`~clawgym.live.page.PageSource`."""
        here = [(number, entry()) for number, entry in list(_entries.items())]
        return [{"id": str(number), **watched.about()} for number, watched in here if watched is not None]

    def picture(self, id: str) -> bytes | None:
        """See :class:`~clawgym.live.page.PageSource`."""
        entry = _entries.get(int(id)) if id.isdecimal() else None
        watched = entry() if entry is not None else None
        return watched.picture() if watched is not None else None


def listening() -> Iterator[tuple[int, Path]]:
    """Yield (pid, socket path) of this user's live processes. Removes the sockets of dead ones."""
    with contextlib.suppress(OSError):
        for path in sorted(_folder().glob(f"*{_ENDING}")):
            with contextlib.suppress(OSError, ValueError):
                if _answers(path):
                    yield int(path.name.partition("-")[0]), path


def _folder() -> Path:
    """The folder of the sockets. Raises OSError if other users could enter it."""
    if not hasattr(os, "getuid"):
        raise OSError("sockets of one user alone are not to be had here")
    base = os.environ.get("XDG_RUNTIME_DIR")
    path = Path(base, "clawgym") if base else Path(tempfile.gettempdir(), f"clawgym-{os.getuid()}")
    path.mkdir(mode=0o700, exist_ok=True)
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise PermissionError(f"{path} is not this user's alone")
    return path


def _answers(path: Path) -> bool:
    """Whether a process listens at ``path``; otherwise the socket is removed."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return False
        except TimeoutError:
            return False
    return True


def _open() -> socket.socket:
    global _socket, _path
    for _ in listening():
        pass  # removes the sockets of dead processes
    path = _folder() / f"{os.getpid()}-{secrets.token_hex(8)}{_ENDING}"
    made = socket.socket(socket.AF_UNIX)
    try:
        made.bind(f"{path}.new")
        made.listen()
        os.rename(f"{path}.new", path)  # only now, when it listens, others can find it
    except BaseException:
        made.close()
        with contextlib.suppress(OSError):
            os.unlink(f"{path}.new")
        raise
    _socket, _path = made, path
    return made


def _serve() -> None:
    try:
        listener = _open()
    except OSError:
        return
    while True:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(Exception):  # a client that disconnects is not an error
            from clawgym.live.page import answer  # loaded only when needed

            answer(connection, ThisProcess())


def _close() -> None:
    if _path is not None:
        with contextlib.suppress(OSError):
            _path.unlink()
            _path.parent.rmdir()  # succeeds if it was the last one


def _after_fork() -> None:
    """In a forked child: forget the parent's entries and socket."""
    global _thread, _socket, _path
    _entries.clear()
    if _socket is not None:
        _socket.close()
    _thread, _socket, _path = None, None, None


atexit.register(_close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
