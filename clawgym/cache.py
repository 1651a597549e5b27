"""Folders in the user's cache that are made atomically: filled under another name, made read-only, then renamed.

Invariant: a folder that exists is complete. An interrupted process leaves only a hidden folder, which the next one
removes. Two processes that make the same folder wait for each other.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import platformdirs

__all__ = ["Progress", "cache_folder", "filled", "only_one"]

Progress = Callable[[str, int, int], None]
"""Called with a description of the work, the amount done and the total (0 if unknown)."""


def cache_folder(kind: str) -> Path:
    """The cache folder for one kind of data."""
    return Path(platformdirs.user_cache_dir("clawgym", appauthor=False)) / kind


def filled(place: Path, fill: Callable[[Path], None], tell: Progress) -> Path:
    """Make the folder ``place`` unless it exists. ``fill`` is called with an empty folder to fill.

    Raises the exceptions of ``fill``, and OSError.
    """
    if place.is_dir():
        return place
    with only_one(place, tell):
        if place.is_dir():
            return place
        scratch = place.with_name(f".{place.name}.new")
        try:
            _remove(scratch)  # left by a killed process
            scratch.mkdir(mode=0o755)
            fill(scratch)
            _make_readonly(scratch)
            scratch.rename(place)
        finally:
            _remove(scratch)
    return place


@contextlib.contextmanager
def only_one(place: Path, tell: Progress) -> Iterator[None]:
    """Hold the lock of ``place``. On systems without such locks, the last rename wins."""
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:
        yield
        return
    with (place.parent / f".{place.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell("waiting for another process", 0, 0)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make_readonly(top: Path) -> None:
    """Make a tree readable by everybody and writable by nobody: sandboxes run as other users."""
    for root, _, names in os.walk(top, topdown=False):
        for name in names:
            path = os.path.join(root, name)
            os.chmod(path, 0o555 if os.stat(path).st_mode & 0o100 else 0o444)
        os.chmod(root, 0o555)


def _remove(top: Path) -> None:
    if not top.exists():
        return
    for root, folders, _ in os.walk(top):
        os.chmod(root, 0o755)
        for name in folders:
            os.chmod(os.path.join(root, name), 0o755)
    shutil.rmtree(top)
