"""What can be watched of this process, and the socket by which others of this user ask for it.

Invariants: while nobody asks, nothing is done but to wait. The socket is in a folder that only its user can enter; a
dead process's is removed by the next one that looks. That it cannot be made is nobody's trouble: there is nothing to
watch then.
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
    """Something that runs. Asked on a thread of its own, at any moment."""

    def about(self) -> dict[str, Any]:
        """Plain JSON data: ``task``, ``agent``, ``step``, ``action`` (the last one), ``text`` (what came of it), and
        ``picture``: a number that changes with the picture, or ``None`` where there is none."""
        ...

    def picture(self) -> bytes | None:
        """The newest picture, as a PNG file."""
        ...


_entries: dict[int, weakref.ref[Watched]] = {}
_numbers = count(1)
_thread: threading.Thread | None = None
_socket: socket.socket | None = None
_path: Path | None = None


def add(watched: Watched) -> int:
    """Let ``watched`` be seen until it is gone, or :func:`drop` is called with the number that this returns."""
    global _thread
    number = next(_numbers)
    _entries[number] = weakref.ref(watched)
    if _thread is None:
        _thread = threading.Thread(target=_serve, name="clawgym-live", daemon=True)
        _thread.start()
    return number


def drop(number: int) -> None:
    """The opposite of :func:`add`. Idempotent."""
    _entries.pop(number, None)


class ThisProcess:
    """A :class:`~clawgym.live.page.Source` of what runs here."""

    def all(self) -> list[dict[str, Any]]:
        """See :class:`~clawgym.live.page.Source`."""
        here = [(number, entry()) for number, entry in list(_entries.items())]
        return [{"id": str(number), **watched.about()} for number, watched in here if watched is not None]

    def picture(self, id: str) -> bytes | None:
        """See :class:`~clawgym.live.page.Source`."""
        entry = _entries.get(int(id)) if id.isdecimal() else None
        watched = entry() if entry is not None else None
        return watched.picture() if watched is not None else None


def listening() -> Iterator[tuple[int, Path]]:
    """The processes of this user that can be asked: id and socket. Removes the sockets of dead ones."""
    with contextlib.suppress(OSError):
        for path in sorted(_folder().glob(f"*{_ENDING}")):
            with contextlib.suppress(OSError, ValueError):
                if _answers(path):
                    yield int(path.name.partition("-")[0]), path


def _folder() -> Path:
    """Raises OSError where others could enter it."""
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
    """Whether somebody listens; the socket of nobody is removed."""
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
        pass  # those of dead processes are gone now
    path = _folder() / f"{os.getpid()}-{secrets.token_hex(8)}{_ENDING}"
    made = socket.socket(socket.AF_UNIX)
    try:
        made.bind(f"{path}.new")
        made.listen()
        os.rename(f"{path}.new", path)  # whoever finds it is answered
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
        with connection, contextlib.suppress(Exception):  # a watcher that goes away is no news
            from clawgym.live.page import answer  # what nobody asks for is not loaded

            answer(connection, ThisProcess())


def _close() -> None:
    if _path is not None:
        with contextlib.suppress(OSError):
            _path.unlink()
            _path.parent.rmdir()  # if it was the last one


def _after_fork() -> None:
    """What runs is the parent's."""
    global _thread, _socket, _path
    _entries.clear()
    if _socket is not None:
        _socket.close()
    _thread, _socket, _path = None, None, None


atexit.register(_close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
