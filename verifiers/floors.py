"""Floors: what a task pays for no work, so that scores can be corrected for it.

A floor is the best mean of the non-composite checks that a cheap policy earns (:mod:`clawgym.verifiers.cheap`).
Measured once for each task content and kept in the user's cache; floors of the public task sets and of our packs
come with the package.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import threading
from functools import cache
from importlib import resources
from pathlib import Path

from platformdirs import user_cache_path

from clawgym.records import Task
from clawgym.sandbox.protocol import Backend
from clawgym.verifiers.cheap import CHEAP_POLICIES, cheap_workspace, grade_cheaply

__all__ = ["key_of", "known_floor", "measure_floor"]

_lock = threading.Lock()


async def measure_floor(task: Task, backend: Backend) -> float:
    """The task's floor; measured with four gradings if it is not known, and kept where the cache can be written."""
    known = known_floor(task)
    if known is not None:
        return known
    task = task.frozen()  # what is measured is what the floor is kept under
    floor = max([(await grade_cheaply(task, cheap_workspace(task, p), backend)).mean for p in CHEAP_POLICIES])
    with _lock:
        floors = _cached() | {key_of(task): floor}
        path = _cache_path()
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(floors))
            temporary.replace(path)
        except OSError:  # a full disk: it is measured again the next time
            with contextlib.suppress(OSError):
                temporary.unlink()
        _read.cache_clear()
    return floor


def known_floor(task: Task) -> float | None:
    """The floor that came with the package or was measured before, or None."""
    key = key_of(task)
    shipped = _shipped().get(key)
    return shipped if shipped is not None else _cached().get(key)


def key_of(task: Task) -> str:
    """Under what a floor is kept: the task's content."""
    return task.content_hash[:24]


@cache
def _shipped() -> dict[str, float]:
    file = resources.files("clawgym.verifiers").joinpath("floors.json.gz")
    return json.loads(gzip.decompress(file.read_bytes())) if file.is_file() else {}


def _cache_path() -> Path:
    return user_cache_path("clawgym") / "floors.json"


@cache
def _read(stamp: int) -> dict[str, float]:
    try:
        return json.loads(_cache_path().read_text())
    except (OSError, ValueError):
        return {}


def _cached() -> dict[str, float]:
    try:
        return _read(_cache_path().stat().st_mtime_ns)
    except OSError:
        return {}
